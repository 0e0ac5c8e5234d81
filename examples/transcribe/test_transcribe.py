"""Transcribes recordings and speaks texts with OpenAI's client through the whole pipeline, and
compares the results with direct calls to faster-whisper.
"""

from __future__ import annotations

import io
import json
import math
import sys
import wave
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.oracles import word_errors, words
from examples.show import KEPT
from examples.transcribe.conftest import oracle, run

pytestmark = pytest.mark.slow(about_s=120)

DIRECT = """
import json, sys, types
sys.modules["av"] = types.ModuleType("av")
import ctranslate2, faster_whisper, soundfile
for path in sys.argv[2:]:
    ctranslate2.set_random_seed(0)
    # A new one for each, as its thread takes a seed once.
    model = faster_whisper.WhisperModel(
        sys.argv[1], device="cpu", compute_type="int8", cpu_threads=1
    )
    segments, _ = model.transcribe(soundfile.read(path, dtype="float32")[0], vad_filter=True)
    print(json.dumps("".join(one.text for one in segments).strip()))
"""
REWRITTEN = """
import sys
import numpy, soundfile, soxr
samples, rate = soundfile.read(sys.argv[1], dtype="float32")
stereo = numpy.stack([samples, samples], axis=1)
folder = sys.argv[2]
soundfile.write(f"{folder}/same.flac", stereo, rate, "PCM_16")
fine = soxr.resample(stereo, rate, 44100)
soundfile.write(f"{folder}/fine.mp3", fine, 44100)
soundfile.write(f"{folder}/fine.ogg", fine, 44100)
"""


def seconds_of(path: Path) -> float:
    with wave.open(str(path)) as file:
        return int(file.getnframes()) / int(file.getframerate())


def test_words_are_those_of_faster_whisper(
    client: Any, python: str, sentences: dict[Path, str]
) -> None:
    printed = run(python, DIRECT, KEPT / "transcribe" / "weights", *sentences)
    direct = [json.loads(line) for line in printed.splitlines()]
    errors, count = 0, 0
    for (path, sentence), expected in zip(sentences.items(), direct, strict=True):
        with path.open("rb") as file:
            reply = client.audio.transcriptions.create(model="transcribe", file=file)
        assert reply.text == expected
        assert reply.usage.seconds == math.ceil(seconds_of(path))
        errors += word_errors(words(reply.text), words(sentence))
        count += len(words(sentence))
    print(f"{errors} of {count} words are wrong, as with faster-whisper", file=sys.stderr)
    assert errors / count < 0.12


def test_times_streams_and_subtitles(client: Any, sentences: dict[Path, str]) -> None:
    path = next(iter(sentences))
    create = client.audio.transcriptions.create
    verbose = create(
        model="transcribe",
        file=path,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (verbose.language, verbose.duration) == ("en", pytest.approx(seconds_of(path)))
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    times = [at for word in verbose.words for at in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= verbose.duration
    assert words("".join(word.word for word in verbose.words)) == words(verbose.text)
    subtitles = create(model="transcribe", file=path, response_format="srt")
    assert words(" ".join(subtitles.split("\n")[2::4])) == words(verbose.text)
    *deltas, done = create(model="transcribe", file=path, stream=True)
    assert "".join(delta.delta for delta in deltas) == done.text
    assert words(done.text) == words(verbose.text)


def test_other_files_are_read_alike(
    client: Any, python: str, sentences: dict[Path, str], tmp_path: Path
) -> None:
    path = next(iter(sentences))
    run(python, REWRITTEN, path, tmp_path)
    create = client.audio.transcriptions.create
    plain = create(model="transcribe", file=path).text
    assert create(model="transcribe", file=tmp_path / "same.flac").text == plain
    for name in ("fine.mp3", "fine.ogg"):
        heard = words(create(model="transcribe", file=tmp_path / name).text)
        assert word_errors(heard, words(plain)) <= 2, name


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # makes it call translations
def test_wrong_requests_are_named(client: Any, sentences: dict[Path, str]) -> None:
    path = next(iter(sentences))

    def refused(call: Any, **fields: Any) -> tuple[str, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            call(model="transcribe", **fields)
        error: Any = caught.value
        return error.param, error.body["message"]

    audio = client.audio
    noise = ("a.mp3", b"no sound at all" * 100)
    reason = "file: not a recording in wav, flac, mp3, ogg, m4a, webm or aac"
    assert refused(audio.transcriptions.create, file=noise) == ("file", reason)
    assert refused(audio.transcriptions.create, file=noise, stream=True) == ("file", reason)
    reason = "language: must be one of en"
    assert refused(audio.transcriptions.create, file=path, language="fr") == ("language", reason)
    reason = "model: this model supports only English"
    assert refused(audio.translations.create, file=path) == ("model", reason)


@pytest.fixture(scope="module")
def minutes(python: str, sentences: dict[Path, str]) -> Path:
    """Returns a two-minute recording that repeats all sentences several times."""
    path = KEPT / "transcribe" / "recordings" / "minutes.wav"
    oracle(python, "longer", path, "2", *sentences)
    return path.absolute()


def test_a_stream_has_the_windows_of_the_whole(python: str, minutes: Path) -> None:
    assert int(oracle(python, "windows", minutes)) > 3
    held_s = float(oracle(python, "random", "200"))
    assert 60 < held_s < 130, "two minutes are in memory, however long a recording is"


def test_speech_without_a_pause_is_cut_where_it_is_quietest(python: str) -> None:
    cuts_s = json.loads(oracle(python, "cuts"))
    assert [round(cut_s / 7) * 7 for cut_s in cuts_s] == [28, 56, 84]
    assert all(-0.05 < cut_s - round(cut_s / 7) * 7 < 0.12 for cut_s in cuts_s)


def test_steps_give_the_transcript_of_the_whole(client: Any, python: str, minutes: Path) -> None:
    count, joined = json.loads(oracle(python, "steps", minutes))
    assert count > 3
    verbose = client.audio.transcriptions.create(
        model="transcribe",
        file=minutes,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.text == "".join(segment["text"] for segment in joined).strip()
    times = [(segment.start, segment.end) for segment in verbose.segments]
    assert times == [(segment["start"], segment["end"]) for segment in joined]
    assert len(verbose.words) == sum(len(segment["words"]) for segment in joined)
    assert verbose.usage.seconds == math.ceil(seconds_of(minutes))
    text = "".join(
        getattr(event, "delta", "")
        for event in client.audio.transcriptions.create(
            model="transcribe", file=minutes, stream=True
        )
    )
    assert text == verbose.text


def test_equal_windows_give_equal_samples(python: str, sentences: dict[Path, str]) -> None:
    """Uses a temperature above 0 and doesn't depend on earlier samples."""
    texts = json.loads(oracle(python, "samples", next(iter(sentences))))
    assert texts[0] == texts[2]


def test_silence_has_no_words(client: Any) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as silence:
        silence.setnchannels(1)
        silence.setsampwidth(2)
        silence.setframerate(16_000)
        silence.writeframes(bytes(2 * 16_000 * 3))
    reply = client.audio.transcriptions.create(
        model="transcribe", file=("a.wav", file.getvalue()), response_format="verbose_json"
    )
    assert (reply.text, reply.segments, reply.duration) == ("", [], 3.0)


def test_what_is_said_can_be_written_down_again(client: Any) -> None:
    text = "The gate of the dam is open. Please keep behind the yellow line."
    heads = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": b""}
    for kind, head in heads.items():
        audio = client.audio.speech.create(
            model="speech", input=text, voice="heart", response_format=kind
        ).content
        assert audio.startswith(head)
        reply = client.audio.transcriptions.create(model="transcribe", file=(f"a.{kind}", audio))
        assert word_errors(words(reply.text), words(text)) <= 1, kind
    create = client.audio.speech.create
    pcm = create(model="speech", input=text, voice="heart", response_format="pcm").content
    slow = create(
        model="speech", input=text, voice="heart", response_format="pcm", speed=0.5
    ).content
    assert 1.5 < len(slow) / len(pcm) < 2.5
    assert create(model="speech", input=text, voice="heart", response_format="pcm").content == pcm
    with pytest.raises(openai.BadRequestError, match="voice: must be one of heart"):
        create(model="speech", input=text, voice="alloy")
    with pytest.raises(openai.BadRequestError, match="'mp3', 'opus', 'flac', 'wav' or 'pcm'"):
        create(model="speech", input=text, voice="heart", response_format="aac")
