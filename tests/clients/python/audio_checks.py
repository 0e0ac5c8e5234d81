"""OpenAI's client against speech models: each format, streams, timestamps, batches, and errors.

Inputs and expected results are in the file PENSTOCK_CLIENTS_AUDIO (tests/clients/audio_classes.py).
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import openai

from tests.clients.python.checks import AUDIO, KEY, LIMIT_S, URL, check, main, raises

client: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S, max_retries=0)
"""Untyped, so that checks can inspect any response."""
given: dict[str, Any] = json.loads(Path(AUDIO).read_text()) if AUDIO else {}
HEARER: str = given.get("hearer", "")
POLL_S = 0.25


def transcribed(**fields: Any) -> Any:
    path = Path(given["recording"])
    return client.audio.transcriptions.create(model=HEARER, file=path, **fields)


def same(got: Any, expected: Any) -> None:
    assert got == expected, f"{str(got)[:500]}, not {str(expected)[:500]}"


@check
def json_with_usage_in_seconds() -> None:
    answer = transcribed()
    same(answer.text, given["text"])
    usage = answer.to_dict()["usage"]
    same(usage, {"type": "duration", "seconds": given["seconds"]})


@check
def text_and_subtitles() -> None:
    same(transcribed(response_format="text"), given["text"] + "\n")
    srt, vtt = transcribed(response_format="srt"), transcribed(response_format="vtt")
    assert srt.startswith("1\n00:00:0"), srt
    assert vtt.startswith("WEBVTT\n\n00:00:0"), vtt
    same(srt.count(" --> "), len(given["segments"]))
    same(vtt.count(" --> "), len(given["segments"]))


@check
def times_of_segments_and_words() -> None:
    usual = transcribed(response_format="verbose_json")
    same([one.text for one in usual.segments], [f" {one.strip()}" for one in given["segments"]])
    times = [at for one in usual.segments for at in (one.start, one.end)]
    same(times, sorted(times))
    assert times[-1] <= usual.duration
    words = transcribed(response_format="verbose_json", timestamp_granularities=["word"])
    assert words.segments is None
    same(len(words.words), given["words"])
    spoken = "".join(one.word for one in words.words).split()
    same(spoken, given["text"].split())
    both = transcribed(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    same((len(both.words), len(both.segments)), (given["words"], len(given["segments"])))


@check
def a_stream_has_deltas_and_the_whole() -> None:
    *deltas, done = transcribed(stream=True)
    same([one.type for one in deltas], ["transcript.text.delta"] * len(given["segments"]))
    same([one.delta for one in deltas], given["segments"])
    same((done.type, done.text), ("transcript.text.done", given["text"]))


@check
def a_stream_of_the_asynchronous_client() -> None:
    async def read() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S
        ) as asynchronous:
            stream: Any = await asynchronous.audio.transcriptions.create(
                model=HEARER, file=Path(given["recording"]), stream=True
            )
            return [event.type async for event in stream]

    same(asyncio.run(read())[-1], "transcript.text.done")


@check
def a_translation() -> None:
    path = Path(given["recording"])
    if given["translates"]:
        answer = client.audio.translations.create(model=HEARER, file=path)
        same(answer.text, given["text"].upper())
        return
    with raises(openai.BadRequestError) as caught:
        client.audio.translations.create(model=HEARER, file=path)
    same(caught.error.param, "model")


@check
def lines_of_a_batch_by_ids_of_uploads() -> None:
    upload = client.files.create(file=Path(given["recording"]), purpose="user_data")
    url = "/v1/audio/transcriptions"
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": HEARER, **body}}
        for name, body in (
            ("a", {"file": upload.id}),
            ("b", {"url": upload.id, "response_format": "verbose_json"}),
        )
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    until_s = time.monotonic() + LIMIT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until_s, batch.status
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    same((batch.status, batch.error_file_id), ("completed", None))
    answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    bodies = {one["custom_id"]: one["response"]["body"] for one in answers}
    same(bodies["a"]["text"], given["text"])
    same(len(bodies["b"]["segments"]), len(given["segments"]))


@check
def speech_whole_and_in_parts() -> None:
    body = {"model": given["speaker"], "voice": given["voice"], "input": given["said"]}
    whole = client.audio.speech.create(**body, response_format="pcm").content
    create = client.audio.speech.with_streaming_response.create
    sse = {"stream_format": "sse"}
    with create(**body, response_format="pcm", extra_body=sse) as answer:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer.iter_lines()
            if line.startswith("data: ")
        ]
    same({one["type"] for one in events[:-1]}, {"speech.audio.delta"})
    parts = [base64.b64decode(one["audio"]) for one in events[:-1]]
    assert len(parts) > 1
    same(len(b"".join(parts)), len(whole))
    assert b"".join(parts) == whole, "the parts are the whole"
    usage = {"type": "characters", "characters": len(given["said"])}
    same(events[-1], {"type": "speech.audio.done", "usage": usage})


@check
def errors_name_the_field() -> None:
    noise = ("a.wav", b"noise " * 1000)
    cases = (
        ({"file": noise}, "file"),
        ({"file": ("a.wav", b"")}, "file"),
        ({"response_format": "docx"}, "response_format"),
        ({"include": ["logprobs"]}, "include"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"stream": True, "response_format": "srt"}, "stream"),
        ({"file": noise, "stream": True}, "file"),
    )
    for fields, param in cases:
        with raises(openai.BadRequestError) as caught:
            client.audio.transcriptions.create(
                **{"model": HEARER, "file": Path(given["recording"])} | fields
            )
        same(caught.error.param, param)
    with raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nobody", file=Path(given["recording"]))
    wrong_voice = {"model": given["speaker"], "voice": "nobody", "input": "a"}
    with raises(openai.BadRequestError) as caught:
        client.audio.speech.create(**wrong_voice)
    same(caught.error.param, "voice")


main()
