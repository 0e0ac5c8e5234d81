"""Recordings to transcribe and text to speak, as requested by OpenAI's client."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.errors import BadInput, InputTooLarge
from shared.models.catalog import Catalog, Model
from shared.models.interface import ModelInterface
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio

PRICE = {"per_work_usd": 0.5}
TRANSCRIPTIONS, TRANSLATIONS, SPEECH = (
    f"/v1/audio/{name}" for name in ("transcriptions", "translations", "speech")
)


def interface(inputs: dict[str, Any], output: dict[str, Any], **more: Any) -> ModelInterface:
    """An interface whose first input is required."""
    return ModelInterface(
        inputs={"type": "object", "properties": inputs, "required": [next(iter(inputs))]},
        output=output,
        weighs=True,
        cog_version="0.23.1",
        sources_sha256="0" * 64,
        **more,
    )


HEARS = interface(
    {
        "file": {"type": "string", "format": "uri"},
        "language": {"type": "string", "default": ""},
        "prompt": {"type": "string", "default": ""},
        "temperature": {"type": "number", "default": 0, "minimum": 0, "maximum": 1},
        "task": {"type": "string", "enum": ["transcribe", "translate"], "default": "transcribe"},
        "word_timestamps": {"type": "boolean", "default": False},
    },
    {"type": "array", "items": {"type": "object"}},
    streams="items",
)
HEARS_LITTLE = interface(
    {"file": {"type": "string", "format": "uri"}},
    {"type": "array", "items": {"type": "object"}},
    streams="items",
)
SPEAKS = interface(
    {
        "input": {"type": "string", "minLength": 1},
        "voice": {"type": "string", "enum": ["heart", "sky"], "default": "heart"},
        "response_format": {"type": "string", "enum": ["mp3", "wav", "flac"], "default": "mp3"},
        "speed": {"type": "number", "default": 1, "minimum": 0.5, "maximum": 2},
    },
    {"type": "string", "format": "uri"},
)

SINGS = interface(
    {
        "input": {"type": "string"},
        "stream": {"type": "boolean", "default": False},
        "response_format": {"type": "string", "enum": ["mp3", "pcm"], "default": "mp3"},
    },
    {"type": "array", "items": {"type": "string", "format": "uri"}},
    streams="items",
)


def entry(name: str, api: str, known: ModelInterface, **more: Any) -> Model:
    given = {"task": "custom", "source": "local:nowhere", "work": {"max": 60}, "price": PRICE}
    return Model.model_validate(given | {"name": name, "api": api, "interface": known} | more)


EARS = entry("ears", "transcription", HEARS)
CATALOG = Catalog(
    (
        TEXT_MODEL,
        EARS,
        entry("tin-ear", "transcription", HEARS_LITTLE),
        entry("mouth", "speech", SPEAKS),
        entry("singer", "speech", SINGS),
    )
)
SAID = b"good day\nhow are <you>"
TEXT = "good day how are <you>"


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings, catalog=CATALOG) as running:
        yield running


def recording(said: bytes = SAID, name: str = "speech.wav") -> io.BytesIO:
    file = io.BytesIO(said)
    file.name = name
    return file


async def test_json_text_and_usage(api: ApiUnderTest) -> None:
    client = api.openai()
    answer = await client.audio.transcriptions.with_raw_response.create(
        file=recording(), model="ears", language="en", prompt="a", temperature=0.5
    )
    reply = answer.parse()
    assert reply.text == TEXT
    assert (reply.usage.type, reply.usage.seconds) == ("duration", 3)
    assert float(answer.headers["x-penstock-cost-usd"]) == 1.5
    (item,) = api.worker.items
    assert item.input.values == {  # type: ignore[union-attr]
        "file": None,
        "language": "en",
        "prompt": "a",
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("form", "expected", "media_type"),
    [
        ("text", f"{TEXT}\n", "text/plain; charset=utf-8"),
        (
            "srt",
            "1\n00:00:00,000 --> 00:00:01,250\ngood day\n\n"
            "2\n00:00:01,500 --> 00:00:02,750\nhow are <you>\n",
            "text/plain; charset=utf-8",
        ),
        (
            "vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\ngood day\n\n"
            "00:00:01.500 --> 00:00:02.750\nhow are &lt;you&gt;\n",
            "text/vtt; charset=utf-8",
        ),
    ],
)
async def test_texts_and_subtitles(
    api: ApiUnderTest, form: str, expected: str, media_type: str
) -> None:
    create = api.openai().audio.transcriptions.with_raw_response.create
    answer = await create(file=recording(), model="ears", response_format=form)
    assert answer.parse() == expected
    assert answer.headers["content-type"] == media_type


async def test_verbose_json_has_segments_and_words(api: ApiUnderTest) -> None:
    create = api.openai().audio.transcriptions.create
    given = {"file": recording(), "model": "ears", "response_format": "verbose_json"}
    usual = await create(**given)
    assert (usual.text, usual.language, usual.duration) == (TEXT, "en", 3.0)
    assert [(one.id, one.start, one.end, one.text) for one in usual.segments] == [
        (0, 0.0, 1.25, " good day"),
        (1, 1.5, 2.75, " how are <you>"),
    ]
    assert (usual.words, usual.usage.seconds) == (None, 3)
    given["file"] = recording()
    words = await create(**given, timestamp_granularities=["word"])
    assert words.segments is None
    assert [one.word for one in words.words] == [" good", " day", " how", " are", " <you>"]
    assert words.words[2].start == 1.5
    given["file"] = recording()
    both = await create(**given, timestamp_granularities=["segment", "word"])
    assert (len(both.segments), len(both.words)) == (2, 5)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # because the client calls it
async def test_translations(api: ApiUnderTest) -> None:
    client = api.openai()
    reply = await client.audio.translations.create(file=recording(), model="ears", prompt="a")
    assert reply.text == TEXT.upper()
    verbose = await client.audio.translations.create(
        file=recording(), model="ears", response_format="verbose_json"
    )
    assert (verbose.text, len(verbose.segments)) == (TEXT.upper(), 2)
    assert verbose.to_dict()["task"] == "translate"


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_class_that_gives_no_transcript_is_told_of(api: ApiUnderTest, stream: str) -> None:
    form, files = {"model": "ears", "stream": stream}, {"file": ("a.wav", b"no times")}
    answer = await api.http.post(TRANSCRIPTIONS, data=form, files=files)
    assert answer.status_code == 500
    assert "did not return a valid transcript" in answer.json()["error"]["message"]


async def test_a_silent_recording_has_an_empty_text(api: ApiUnderTest) -> None:
    create = api.openai().audio.transcriptions.create
    assert (await create(file=recording(b"\n"), model="ears")).text == ""
    subtitles = await create(file=recording(b"\n"), model="ears", response_format="vtt")
    assert subtitles == "WEBVTT\n"


async def test_a_text_with_an_arrow_is_no_time_of_webvtt(api: ApiUnderTest) -> None:
    create = api.openai().audio.transcriptions.create
    said = recording(b"00:01.000 --> 00:02.000 R&B")
    subtitles = await create(file=said, model="ears", response_format="vtt")
    assert subtitles.count("-->") == 1
    assert subtitles.endswith("\n00:01.000 --&gt; 00:02.000 R&amp;B\n")


async def test_a_stream_has_a_delta_for_each_segment_as_it_is_written(api: ApiUnderTest) -> None:
    stream = await api.openai().audio.transcriptions.create(
        file=recording(), model="ears", stream=True
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "transcript.text.delta",
        "transcript.text.delta",
        "transcript.text.done",
    ]
    assert [event.delta for event in events[:2]] == ["good day", " how are <you>"]
    assert (events[2].text, events[2].usage.seconds) == (TEXT, 3)


async def test_spaces_before_the_first_words_are_in_no_delta(api: ApiUnderTest) -> None:
    stream = await api.openai().audio.transcriptions.create(
        file=recording(b"\ngood day"), model="ears", stream=True
    )
    *deltas, done = [event async for event in stream]
    assert [event.delta for event in deltas] == ["good day"]
    assert done.text == "good day"


def split_events(stream: str) -> list[str]:
    """The stream's events, without the comments that keep a slow stream alive."""
    lines = [line for line in stream.splitlines() if not line.startswith(":")]
    return "\n".join(lines).strip().split("\n\n")


async def test_a_stream_is_read_on_from_an_id(api: ApiUnderTest) -> None:
    form = {"model": "ears", "stream": "true"}
    files = {"file": ("a.wav", SAID)}
    keyed = {"idempotency-key": "k"}
    whole = await api.http.post(TRANSCRIPTIONS, data=form, files=files, headers=keyed)
    blocks = split_events(whole.text)
    assert [block.split("\n")[0] for block in blocks] == ["id: 1", "id: 2", "id: 2f1"]
    rest = await api.http.post(
        TRANSCRIPTIONS, data=form, files=files, headers=keyed | {"last-event-id": "1"}
    )
    assert split_events(rest.text) == blocks[1:]
    assert len(api.worker.jobs) == 1
    other = await api.http.post(
        TRANSCRIPTIONS, data=form, files={"file": ("a.wav", b"else")}, headers=keyed
    )
    assert other.status_code == 422


async def test_what_a_worker_finds_wrong_is_the_error_of_a_stream_too(api: ApiUnderTest) -> None:
    api.worker.refusal = BadInput("file: not a recording", field="file")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.openai().audio.transcriptions.create(
                file=recording(), model="ears", stream=stream
            )
        assert (caught.value.param, caught.value.code) == ("file", "invalid_input")


async def test_what_a_worker_finds_wrong_with_a_url_names_the_url(api: ApiUnderTest) -> None:
    api.worker.refusal = BadInput("file: not a recording", field="file")
    upload = await api.openai().files.create(file=("day.wav", SAID), purpose="user_data")
    form = {"url": (None, upload.id), "model": (None, "ears")}
    answer = await api.http.post(TRANSCRIPTIONS, files=form)
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == ("url", "url: not a recording")
    streamed = await api.http.post(TRANSCRIPTIONS, files=form | {"stream": (None, "true")})
    assert '"param":"url"' in streamed.text
    assert '"message":"url: not a recording"' in streamed.text


async def test_what_a_worker_finds_wrong_with_a_stream_of_speech_is_named(
    api: ApiUnderTest,
) -> None:
    api.worker.refusal = BadInput("stream: this voice can't", field="stream")
    body = {"model": "singer", "input": "la", "stream_format": "sse"}
    answer = await api.http.post(SPEECH, json=body)
    assert '"param":"stream_format"' in answer.text
    assert "stream_format: this voice can't" in answer.text


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"model": "nobody"}, "model", "does not exist"),
        ({"model": TEXT_MODEL.name}, "model", "does not serve transcription"),
        ({"response_format": "docx"}, "response_format", "'json', 'text', 'srt', 'vtt' or"),
        ({"temperature": "2"}, "temperature", "less than or equal to 1"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"language": "English"}, "language", "pattern"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "requires response_f"),
        (
            {"timestamp_granularities[]": "letter", "response_format": "verbose_json"},
            "timestamp_granularities",
            "'word' or 'segment'",
        ),
        ({"stream": "true", "response_format": "srt"}, "stream", "requires response_format json"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"mood": "happy"}, "mood", "unknown parameter"),
        ({"prompt[]": "la"}, "prompt", "prompt[]: unknown parameter"),
        (
            {"model": "tin-ear", "language": "en"},
            "language",
            "language: is not supported by tin-ear",
        ),
        (
            {
                "model": "tin-ear",
                "response_format": "verbose_json",
                "timestamp_granularities[]": "word",
            },
            "timestamp_granularities",
            "timestamp_granularities: is not supported by tin-ear",
        ),
    ],
)
async def test_wrong_fields_are_named(
    api: ApiUnderTest, fields: dict[str, str], param: str, reason: str
) -> None:
    answer = await api.http.post(TRANSCRIPTIONS, data=fields, files={"file": ("a.wav", SAID)})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), error
    assert error["param"] == param
    assert reason in error["message"]
    assert error["message"].startswith((f"{param}", "model "))
    assert not api.worker.jobs


async def test_a_recording_may_be_named_by_its_id_or_url(api: ApiUnderTest) -> None:
    upload = await api.openai().files.create(file=("day.WAV", SAID), purpose="user_data")
    assert upload.purpose == "user_data"
    file_url = f"{str(api.http.base_url).rstrip('/')}/v1/files/{upload.id}"
    for url in (upload.id, file_url, f"data:audio/wav;base64,{base64.b64encode(SAID).decode()}"):
        answer = await api.http.post(
            TRANSCRIPTIONS, files={"url": (None, url), "model": (None, "ears")}
        )
        assert (answer.status_code, answer.json().get("text")) == (200, TEXT), answer.text
    names = {item.input.places[0].name for item in api.worker.items}  # type: ignore[union-attr]
    assert names == {"recording.wav"}, "equal recordings are equal inputs"
    downloaded = await api.openai().files.content(upload.id)
    assert downloaded.content == SAID
    with pytest.raises(openai.BadRequestError, match="purpose must be batch, got user_data"):
        await api.openai().batches.create(
            input_file_id=upload.id, endpoint="/v1/audio/transcriptions", completion_window="24h"
        )


async def test_wrong_urls_are_named(api: ApiUnderTest) -> None:
    async def asked(**given: Any) -> tuple[str, str]:
        error = (await api.http.post(TRANSCRIPTIONS, **given)).json()["error"]
        return error["param"], error["message"]

    unknown = f"file-{'0' * 32}"
    known = {"model": (None, "ears")}
    param, message = await asked(files=known | {"url": (None, unknown)})
    assert (param, message) == ("url", f"url: file '{unknown}' does not exist")
    assert (await asked(files=known | {"url": (None, "a.wav")}))[1].startswith(
        "url: must be a data"
    )
    both = known | {"url": (None, unknown), "file": ("a.wav", SAID)}
    assert await asked(files=both) == (
        "url",
        "url: can't be combined with file; send only one of them",
    )
    assert not api.worker.jobs


async def test_wrong_files_are_named(api: ApiUnderTest) -> None:
    async def asked(**given: Any) -> tuple[int, str, str]:
        answer = await api.http.post(TRANSCRIPTIONS, **given)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    form = {"model": "ears"}
    assert await asked(json=form) == (
        400,
        "content-type",
        "content-type: must be multipart/form-data",
    )
    other = {"files": {"other": ("a", b"")}, "data": form}
    assert (await asked(**other))[1:] == ("other", "other: unknown parameter")
    listed = {"files": {"file[]": ("a", SAID)}, "data": form}
    assert (await asked(**listed))[1:] == ("file[]", "file[]: unknown parameter")
    text = {"files": {"prompt": (None, b"a")}, "data": form | {"file": "a"}}
    assert (await asked(**text))[1:] == ("file", "file: must be a file, not text")
    two = {"files": [("file", ("a", SAID)), ("file", ("b", SAID))], "data": form}
    assert (await asked(**two))[1:] == (
        "file",
        "file: exactly one file or url is required, got 2 files",
    )
    empty = {"files": {"file": ("a", b"")}, "data": form}
    assert (await asked(**empty))[1:] == ("file", "file: must not be empty")
    large = {"files": {"file": ("a", bytes(25 * 1024 * 1024 + 1))}, "data": form}
    assert await asked(**large) == (
        413,
        "file",
        "file: must be at most 26214400 bytes, got 26214401",
    )


async def test_errors_of_a_class_name_the_fields_of_the_form(api: ApiUnderTest) -> None:
    async def asked(path: str) -> tuple[str, str]:
        answer = await api.http.post(path, files={"file": ("a.wav", SAID)})
        assert answer.status_code == 400
        assert answer.headers["x-penstock-cost-usd"] == "0"
        error = answer.json()["error"]
        return error["param"], error["message"]

    api.worker.refusal = InputTooLarge("it weighs 61, and at most 60 is allowed", field="input")
    reason = "file: exceeds the maximum of 60 seconds for ears"
    assert await asked(TRANSCRIPTIONS) == ("file", reason)
    api.worker.refusal = BadInput("task: this model knows English only", field="task")
    assert await asked(TRANSLATIONS) == ("model", "model: this model knows English only")
    answer = await api.http.post(
        TRANSLATIONS, data={"model": "tin-ear"}, files={"file": ("a.wav", SAID)}
    )
    assert answer.json()["error"]["message"] == "model: tin-ear does not support translation"


async def test_speech_is_a_file_of_its_format(api: ApiUnderTest) -> None:
    create = api.openai().audio.speech.with_raw_response.create
    answer = await create(model="mouth", input="hello", voice="sky", response_format="wav", speed=2)
    assert answer.headers["content-type"] == "audio/wav"
    assert float(answer.headers["x-penstock-cost-usd"]) == 2.5
    given = {"input": "hello", "voice": "sky", "response_format": "wav", "speed": 2}
    assert json.loads(answer.content) == given
    usual = await create(model="mouth", input="hello", voice="heart")
    assert usual.headers["content-type"] == "audio/mpeg"


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]


async def test_speech_comes_in_parts_as_they_are_said(api: ApiUnderTest) -> None:
    create = api.openai().audio.speech.with_streaming_response.create
    given: dict[str, Any] = {"model": "singer", "input": "good day to you", "voice": "heart"}
    with pytest.raises(openai.BadRequestError, match="voice: is not supported by singer"):
        async with create(**given, stream_format="sse"):
            pass
    given["voice"] = openai.omit
    async with create(**given, stream_format="sse") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    parts = [base64.b64decode(event["audio"]) for event in events[:-1]]
    assert parts == [b"good ", b"day ", b"to ", b"you "]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert events[-1] == {
        "type": "speech.audio.done",
        "usage": {"type": "characters", "characters": 15},
    }
    (item,) = api.worker.items
    assert item.input.values == {"input": "good day to you", "stream": True}  # type: ignore[union-attr]
    whole = await api.openai().audio.speech.create(**given)
    assert json.loads(whole.content) == {"input": "good day to you"}


async def test_speech_goes_on_behind_an_id(api: ApiUnderTest) -> None:
    body = {"model": "singer", "input": "good day to you", "stream_format": "sse"}
    keyed = {"idempotency-key": "k"}
    whole = await api.http.post(SPEECH, json=body, headers=keyed)
    ids = [line for line in whole.text.split("\n") if line.startswith("id:")]
    assert ids == ["id: 1", "id: 2", "id: 3", "id: 4", "id: 4f1"]
    rest = await api.http.post(SPEECH, json=body, headers=keyed | {"last-event-id": "2"})
    assert events_of(rest) == events_of(whole)[2:]
    assert len(api.worker.jobs) == 1
    other = await api.http.post(SPEECH, json=body | {"input": "no"}, headers=keyed)
    assert other.status_code == 422


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": "a" * 4097}, "input", "at most 4096 characters"),
        ({"voice": "alloy"}, "voice", "'heart' or 'sky'"),
        ({"response_format": "aac"}, "response_format", "'mp3', 'wav' or 'flac'"),
        ({"response_format": "docx"}, "response_format", "'mp3', 'opus', 'aac'"),
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"speed": 3}, "speed", "less than or equal to 2"),
        ({"instructions": "gaily"}, "instructions", "instructions: is not supported by mouth"),
        ({"stream_format": "sse"}, "stream_format", "must be audio, because mouth does not stream"),
        ({"stream_format": "mp3"}, "stream_format", "'audio' or 'sse'"),
        ({"model": "ears"}, "model", "does not serve speech"),
    ],
)
async def test_wrong_fields_of_speech_are_named(
    api: ApiUnderTest, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = await api.http.post(SPEECH, json={"model": "mouth", "input": "a"} | fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), error
    assert error["param"] == param
    assert reason in error["message"]
    assert not api.worker.jobs


@pytest.mark.parametrize(
    ("api_name", "known", "reason"),
    [
        ("speech", HEARS, "the class must have an input named 'input'"),
        ("transcription", SPEAKS, "the class must have an input named 'file'"),
        (
            "transcription",
            HEARS.model_copy(update={"streams": ""}),
            r"must return Iterator\[dict\[str, Any\]\]",
        ),
        (
            "speech",
            SPEAKS.model_copy(update={"output": {"type": "string"}}),
            "must return Path",
        ),
        (
            "speech",
            SPEAKS.model_copy(update={"output": {"type": "array"}, "streams": "text"}),
            r"or Iterator\[Path\]",
        ),
        (
            "speech",
            interface(
                {"input": {"type": "string"}, "speed": {"type": "integer"}},
                {"type": "string", "format": "uri"},
            ),
            "the input 'speed' must be a number, not a integer",
        ),
    ],
)
def test_an_entry_whose_class_can_not_serve_an_endpoint_is_refused(
    api_name: str, known: ModelInterface, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        entry("mine", api_name, known)


def test_an_input_that_nothing_gives_needs_a_default() -> None:
    more = dict(SPEAKS.inputs, required=["input", "voice"])
    with pytest.raises(ValueError, match="'voice' must have a default"):
        entry("mine", "speech", SPEAKS.model_copy(update={"inputs": more}))
    with pytest.raises(ValueError, match="api: "):
        Model.model_validate(TEXT_MODEL.model_dump() | {"api": "speech"})
