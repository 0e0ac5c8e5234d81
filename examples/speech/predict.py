"""Speaks English text with hibari (https://pypi.org/project/hibari-tts/).

The network is distilled from Kokoro-82M and is included in the package with one voice. Other voices
must be downloaded, which a class in production must not do.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path as LocalPath
from typing import Any

import numpy as np
import soundfile
from cog import BasePredictor, Input, Path

RATE_HZ = 24_000
VOICES = ("heart",)
SEED = 0
"""Seed for the breathing noise in the voice, so that identical texts produce identical files."""
FORMATS = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
    "wav": ("WAV", "PCM_16"),
    "pcm": ("RAW", "PCM_16"),
}
"""The libsndfile format and encoding for each kind. libsndfile does not support aac."""


ENDLESS_WAV = struct.pack(
    "<4sI4s4sIHHIIHH4sI",
    *(b"RIFF", 0xFFFFFFFF, b"WAVE", b"fmt ", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16),
    *(b"data", 0xFFFFFFFF),
)
"""Header for a WAV whose length is unknown."""


class InvalidInput(ValueError):
    """An invalid input."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Speaks texts."""

    def setup(self) -> None:
        """Loads the network and the dictionary."""
        from hibari import Hibari  # `work` needs neither

        self.say = Hibari(threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.say("Ready.")

    def work(self, input: Any) -> int:
        return len(input.input)

    def predict(
        self,
        input: str = Input(description="The text.", min_length=1, max_length=4096),
        voice: str = Input(description="The voice: heart.", default=VOICES[0]),
        response_format: str = Input(
            description="pcm: 24 kHz, 16 bits, little-endian, one channel.",
            default="mp3",
            choices=list(FORMATS),
        ),
        speed: float = Input(description="1: as usual.", default=1.0, ge=0.25, le=4),
        stream: bool = Input(
            description=(
                "True to return a file per sentence as soon as it is spoken; joined, they are the "
                "whole file."
            ),
            default=False,
        ),
    ) -> Iterator[Path]:
        """Yields the audio file, 24 kHz mono, as a whole or in parts."""
        if voice not in VOICES:
            raise InvalidInput("voice", f"must be one of {', '.join(VOICES)}")
        folder = LocalPath(tempfile.mkdtemp())
        sentences = self.say.stream(input, speed=speed, seed=SEED)
        number = -1
        parts = parts_of(sentences, folder, response_format, is_whole=not stream)
        for number, part in enumerate(parts):
            target = folder / f"speech-{number}.{response_format}"
            target.write_bytes(part)
            yield Path(target)
        if number < 0:
            raise InvalidInput("input", "it contains no words to speak")


def parts_of(
    sentences: Iterable[Any], folder: LocalPath, kind: str, *, is_whole: bool
) -> Iterator[bytes]:
    """Yields the bytes of the audio file, either in parts as they are produced or all at the end.

    Args:
        is_whole: True if all bytes are returned at once. Otherwise, the WAV header declares an
            unknown length, as OpenAI's does.
    """
    is_endless = kind == "wav" and not is_whole
    written, encoding = FORMATS["pcm" if is_endless else kind]
    target, head = folder / "whole", ENDLESS_WAV if is_endless else b""
    endian = "LITTLE" if written == "RAW" else None
    count = sent = 0
    with soundfile.SoundFile(
        str(target), "w", RATE_HZ, 1, encoding, endian=endian, format=written
    ) as file:
        for samples in sentences:
            file.write(np.clip(samples, -1.0, 1.0))
            file.flush()
            count += len(samples)
            if not is_whole and (part := target.read_bytes()[sent:]):
                sent += len(part)
                yield head + part
                head = b""
    rest = target.read_bytes()[sent:]
    if rest and count:
        yield head + rest
