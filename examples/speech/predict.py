"""Says a text in English, with hibari (https://pypi.org/project/hibari-tts/).

Its network is distilled from Kokoro-82M and is in the package. It has one voice there; others are
downloads, which a class at work does not make.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path as LocalPath
from typing import Any

import numpy as np
import soundfile
from cog import BasePredictor, Input, Path

RATE_HZ = 24_000
VOICES = ("heart",)
SEED = 0
"""Of the breath in the voice, so equal texts give equal files."""
FORMATS = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
    "wav": ("WAV", "PCM_16"),
    "pcm": ("RAW", "PCM_16"),
}
"""The file and the encoding of each in libsndfile. It has none for aac."""


class WrongInput(ValueError):
    """An input that this model does not take."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Says texts."""

    def setup(self) -> None:
        """Reads the network and the dictionary."""
        from hibari import Hibari  # `work` needs none of it

        self.say = Hibari(threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.say("Ready.")

    def work(self, input: Any) -> int:
        """Characters."""
        return len(input.input)

    def predict(
        self,
        input: str = Input(description="The text.", min_length=1, max_length=4096),
        voice: str = Input(description="Who says it: heart.", default=VOICES[0]),
        response_format: str = Input(
            description="pcm: 24 kHz, 16 bits, little-endian, one channel.",
            default="mp3",
            choices=list(FORMATS),
        ),
        speed: float = Input(description="1: as usual.", default=1.0, ge=0.25, le=4),
    ) -> Path:
        """Returns the file with the sound, 24 kHz in one channel."""
        if voice not in VOICES:
            raise WrongInput("voice", f"not one of {', '.join(VOICES)}")
        samples = self.say(input, speed=speed, seed=SEED)
        if not samples.size:
            raise WrongInput("input", "there is nothing in it to say")
        target = LocalPath(tempfile.mkdtemp()) / f"speech.{response_format}"
        kind, encoding = FORMATS[response_format]
        soundfile.write(
            str(target),
            np.clip(samples, -1.0, 1.0),
            RATE_HZ,
            encoding,
            endian="LITTLE" if response_format == "pcm" else None,
            format=kind,
        )
        return Path(target)
