"""Recordings from many sources, damaged in many ways, are either transcribed and charged in full,
or rejected.
corpus.py makes the corpus with the libraries of the class. FFmpeg is used as an oracle if it is
installed.
"""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
import subprocess
import sys
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from api.dispatch.request import COST_HEADER
from examples.oracles import word_errors, words
from examples.transcribe.conftest import FORMATS, run

pytestmark = pytest.mark.slow(about_s=240)

CORPUS = Path(__file__).parent / "corpus.py"
TOLERANCE_S = 0.1
USD_PER_SECOND = 0.0001
FFMPEG_LIMIT_S = 60.0
SAID = "The gate of the dam is open. Please keep behind the yellow line."


@dataclass(frozen=True)
class Recording:
    """A recording in the corpus.

    `seconds` is the amount of audio in it, or None if unknown. `error` is the reason it can't be
    read.
    """

    path: Path
    origin: str
    damage: str
    seconds: float | None
    counted: float = 0.0
    decoded: float = 0.0
    error: str = ""


@pytest.fixture(scope="module")
def corpus(
    python: str, sentences: dict[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> list[Recording]:
    folder = tmp_path_factory.mktemp("corpus")
    lines = run(python, CORPUS, "corpus", next(iter(sentences)), folder).splitlines()
    return [Recording(**facts | {"path": Path(facts["path"])}) for facts in map(json.loads, lines)]


def transcribe(client: Any, path: Path) -> tuple[Any, float]:
    """Returns a recording's transcript and its price in USD."""
    raw = client.audio.transcriptions.with_raw_response.create(
        model="transcribe",
        file=path,
        response_format="verbose_json",
        extra_headers={"cache-control": "no-cache"},
    )
    return raw.parse(), float(raw.headers[COST_HEADER])


def test_a_recording_is_read_to_its_end_or_refused(corpus: list[Recording]) -> None:
    assert len(corpus) == 60
    assert len({(recording.origin, recording.damage) for recording in corpus}) == 60
    for recording in corpus:
        if recording.error:
            assert recording.damage in ("cut", "hole"), recording
            continue
        assert abs(recording.counted - recording.decoded) <= TOLERANCE_S, recording
        if recording.seconds is not None:
            assert abs(recording.decoded - recording.seconds) <= TOLERANCE_S, recording
    refused = [f"{recording.origin} {recording.damage}" for recording in corpus if recording.error]
    print(f"{len(refused)} of 60 are refused: {', '.join(refused)}", file=sys.stderr)
    assert len(refused) <= 11


def test_recordings_of_all_lengths_are_counted(
    python: str, sentences: dict[Path, str], tmp_path: Path
) -> None:
    lines = run(python, CORPUS, "lengths", next(iter(sentences)), tmp_path).splitlines()
    assert len(lines) == 45
    for facts in map(json.loads, lines):
        assert abs(facts["counted"] - facts["seconds"]) <= TOLERANCE_S, facts
        assert abs(facts["decoded"] - facts["seconds"]) <= TOLERANCE_S, facts


def test_what_is_left_of_a_recording_is_what_ffmpeg_reads(corpus: list[Recording]) -> None:
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    for recording in corpus:
        if recording.damage == "cut" and not recording.error:
            command = [
                "ffmpeg",
                "-v",
                "quiet",
                "-i",
                str(recording.path),
                "-ac",
                "1",
                "-ar",
                "16000",
            ]
            command += ["-f", "s16le", "-"]
            done = subprocess.run(command, capture_output=True, timeout=FFMPEG_LIMIT_S, check=False)
            assert abs(len(done.stdout) / 32_000 - recording.decoded) <= TOLERANCE_S, recording


def test_transcripts_of_damaged_recordings_have_all_words_that_are_left(
    client: Any, corpus: list[Recording], sentences: dict[Path, str]
) -> None:
    """Checks the words, seconds and charges for sixty recordings across the whole pipeline."""
    whole = dict[str, list[str]]()
    spoken = words(next(iter(sentences.values())))
    for recording in corpus:
        if recording.error:
            with pytest.raises(openai.BadRequestError, match="file: ") as caught:
                transcribe(client, recording.path)
            error: Any = caught.value
            assert error.param == "file"
            continue
        reply, cost_usd = transcribe(client, recording.path)
        assert reply.duration == pytest.approx(recording.counted, abs=1e-6)
        assert reply.usage.seconds == math.ceil(recording.counted)
        assert cost_usd == pytest.approx(reply.usage.seconds * USD_PER_SECOND)
        text = words(reply.text)
        expected = whole.setdefault(recording.origin, text)
        if recording.damage in ("none", "lied", "tagged"):
            assert text == expected, recording
        elif recording.damage == "joined":
            # If the encoding makes speech hard to understand, changing the window may add or drop a
            # word.
            missed = 0 if recording.origin.startswith("chromium") else word_errors(expected, spoken)
            assert word_errors(text, expected * 2) <= 1 + 2 * missed, recording
        elif recording.damage == "cut":
            assert len(text) > len(expected) // 3
            assert word_errors(text, expected[: len(text)]) <= 2, recording
        else:
            assert word_errors(text, expected) <= 3, recording


def write_wav(path: Path, samples: list[tuple[float, ...]], rate: int = 16_000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples[0]))
        file.setsampwidth(2)
        file.setframerate(rate)
        whole = (int(32_767 * value) for frame in samples for value in frame)
        file.writeframes(b"".join(value.to_bytes(2, "little", signed=True) for value in whole))
    return path


def read_wav(path: Path) -> list[float]:
    with wave.open(str(path)) as file:
        data = file.readframes(file.getnframes())
    values = memoryview(data).cast("h")
    return [value / 32_768 for value in values]


def test_channels_that_cancel_each_other_out_are_heard(
    client: Any, sentences: dict[Path, str], tmp_path: Path
) -> None:
    speech = next(iter(sentences))
    inverted = write_wav(tmp_path / "inverted.wav", [(value, -value) for value in read_wav(speech)])
    assert words(transcribe(client, inverted)[0].text) == words(transcribe(client, speech)[0].text)


def test_a_sample_that_is_no_number_is_silent(
    client: Any, python: str, sentences: dict[Path, str], tmp_path: Path
) -> None:
    code = """
import sys, soundfile
samples, rate = soundfile.read(sys.argv[1], dtype="float32")
samples[5000], samples[9000] = float("nan"), float("inf")
soundfile.write(sys.argv[2], samples, rate, "FLOAT")
"""
    speech, path = next(iter(sentences)), tmp_path / "nan.wav"
    run(python, code, speech, path)
    reply, _ = transcribe(client, path)
    assert word_errors(words(reply.text), words(transcribe(client, speech)[0].text)) <= 1


@pytest.mark.parametrize("kind", FORMATS)
def test_our_own_speech_is_heard_in_full(client: Any, tmp_path: Path, kind: str) -> None:
    """Recordings are tested whole and streamed, in each format that speech output supports."""
    create = client.audio.speech.create
    options = {"model": "speech", "input": SAID, "voice": "heart"}
    pcm = create(**options, response_format="pcm").content
    seconds = len(pcm) / 2 / 24_000
    whole = create(**options, response_format=kind).content
    streamed = b""
    with client.audio.speech.with_streaming_response.create(
        **options, response_format=kind, stream_format="sse"
    ) as events:
        for line in events.iter_lines():
            if line.startswith("data: ") and (event := json.loads(line[6:])).get("audio"):
                streamed += base64.b64decode(event["audio"])
    for name, data in {"whole": whole, "streamed": streamed}.items():
        path = tmp_path / f"{name}.{kind}"
        path.write_bytes(data)
        if kind == "pcm":
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, 24_000, 0, "NONE", ""))
                file.writeframes(data)
        reply, _ = transcribe(client, path)
        assert abs(reply.duration - seconds) <= TOLERANCE_S, (name, kind)
        assert word_errors(words(reply.text), words(SAID)) <= 1, (name, kind)


def test_files_that_are_no_recordings_are_refused(client: Any, tmp_path: Path) -> None:
    empty_wav = io.BytesIO()
    with wave.open(empty_wav, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
    cases = {
        "empty.wav": (empty_wav.getvalue(), "it contains no sound"),
        "wavs.wav": (empty_wav.getvalue() * 1001, "more than 1000 recordings"),
        "rate.wav": (empty_wav.getvalue()[:24] + bytes(8) + empty_wav.getvalue()[32:], "rate of 0"),
        "list.m4a": (b"#EXTM3U\nhttp://127.0.0.1/a.mp3\n" * 20, "m4a, webm or aac"),
        "box.m4a": (b"\0\0\0\x10ftypM4A \0\0\0\0" + bytes(200), "not a complete recording"),
        "page.ogg": (b"OggS" + bytes(200), "it is damaged at 0.0 s"),
        "head.webm": (b"\x1a\x45\xdf\xa3\x80" + bytes(200), "not a complete recording"),
        "head.flac": (b"fLaC" + bytes(200), "rate of 0|it contains no sound"),
    }
    for name, (data, reason) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(openai.BadRequestError, match=reason):
            transcribe(client, path)
