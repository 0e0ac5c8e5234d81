"""Writes down what is said in a recording, with Whisper (https://arxiv.org/abs/2212.04356).

faster-whisper computes it on CTranslate2: in 8-bit integers on a CPU, in half precision on a GPU.
Its module for files imports PyAV, whose wheel bundles encoders under the GPL. So PyAV is not
installed here (overrides.txt), and libsndfile reads the files (docs/decisions/0101-speech.md).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path as LocalPath
from types import ModuleType
from typing import Any

import numpy as np
import soundfile
from cog import BasePredictor, Input, Path

WEIGHTS = LocalPath(__file__).parent / "weights"
RATE_HZ = 16_000
"""Whisper's."""
BLOCK_S = 30
TASKS = ["transcribe", "translate"]
SEED = 0
"""Of the samples at a temperature above 0, so equal recordings give equal texts."""


class WrongInput(ValueError):
    """An input that this model does not take."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def opened(path: LocalPath) -> Any:
    """A recording: wav, flac, mp3, ogg (Vorbis, Opus), aiff or au.

    Raises:
        WrongInput: it is something else.
    """
    try:
        return soundfile.SoundFile(str(path))
    except soundfile.LibsndfileError as error:
        raise WrongInput("file", "not a recording in wav, flac, mp3 or ogg") from error


def samples_of(path: LocalPath) -> Any:
    """A recording as Whisper takes it: float32, one channel, RATE_HZ."""
    with opened(path) as file:
        blocks = file.blocks(BLOCK_S * file.samplerate, dtype="float32", always_2d=True)
        channel = np.concatenate([np.zeros(0, np.float32), *(one.mean(axis=1) for one in blocks)])
        rate_hz = file.samplerate
    if rate_hz == RATE_HZ or not channel.size:
        return channel
    import soxr  # `work` needs none of it

    return soxr.resample(channel, rate_hz, RATE_HZ)


def whisper() -> Any:
    """faster-whisper, without PyAV: this file gives it samples instead of files."""
    sys.modules.setdefault("av", ModuleType("av"))
    import faster_whisper

    return faster_whisper


class Predictor(BasePredictor):
    """Transcribes and translates."""

    def setup(self) -> None:
        """Reads the weights."""
        if not WEIGHTS.is_dir():
            raise FileNotFoundError(f"{WEIGHTS} is missing: make example NAME=transcribe")
        import ctranslate2

        on_gpu = ctranslate2.get_cuda_device_count() > 0
        self.seed = ctranslate2.set_random_seed
        self.model = whisper().WhisperModel(
            str(WEIGHTS),
            device="cuda" if on_gpu else "cpu",
            compute_type="float16" if on_gpu else "int8",
            cpu_threads=int(os.environ.get("OMP_NUM_THREADS", "0")),
        )

    def work(self, input: Any) -> int:
        """Seconds of sound, begun ones too."""
        with opened(input.file) as file:
            duration_s: float = file.frames / file.samplerate
        return max(1, math.ceil(duration_s))

    def predict(
        self,
        file: Path = Input(description="The recording: wav, flac, mp3 or ogg."),
        language: str = Input(
            description="Of the recording, in ISO 639-1. Empty: it is detected.", default=""
        ),
        prompt: str = Input(
            description="What comes before, or words as they are spelled.", default=""
        ),
        temperature: float = Input(
            description="0: the likeliest words, with others only if these can't be right.",
            default=0.0,
            ge=0,
            le=1,
        ),
        task: str = Input(
            description="`translate`: into English.", default="transcribe", choices=TASKS
        ),
        word_timestamps: bool = Input(description="When each word is said.", default=False),
    ) -> Iterator[dict[str, Any]]:
        """Yields each segment as soon as it is written, with its start and end in seconds.

        Each has the language and the duration of the whole recording. One in which nobody speaks
        has a single segment without text.
        """
        known = self.model.supported_languages
        if language and language not in known:
            raise WrongInput("language", f"not one of {', '.join(sorted(known))}")
        if task == "translate" and known == ["en"]:
            raise WrongInput("task", "this model knows English only")
        samples = samples_of(file)
        if not samples.size:
            raise WrongInput("file", "nothing is recorded in it")
        self.seed(SEED)
        options = {"temperature": temperature} if temperature else {}
        segments, info = self.model.transcribe(
            samples,
            language=language or None,
            task=task,
            initial_prompt=prompt or None,
            word_timestamps=word_timestamps,
            vad_filter=True,
            **options,
        )
        about = {"language": info.language, "duration": float(info.duration)}
        number = 0
        for segment in segments:
            if segment.text.strip():
                yield {"id": number} | shown(segment) | about
                number += 1
        if not number:
            yield {"id": 0, "start": 0.0, "end": float(info.duration), "text": ""} | about


def shown(segment: Any) -> dict[str, Any]:
    """A segment of faster-whisper, ready for JSON."""
    return {
        "seek": segment.seek,
        "start": float(segment.start),
        "end": float(segment.end),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": float(segment.temperature or 0.0),
        "avg_logprob": float(segment.avg_logprob),
        "compression_ratio": float(segment.compression_ratio),
        "no_speech_prob": float(segment.no_speech_prob),
        "words": [
            {"word": word.word, "start": float(word.start), "end": float(word.end)}
            for word in segment.words or ()
        ],
    }
