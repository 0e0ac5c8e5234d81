"""Cuts a recording at silences into windows, which examples/transcribe transcribes one by one.

The windows of a long recording can therefore be separate items that run on any worker, in any
order, with identical ones running only once.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path as LocalPath
from typing import Any

import soundfile
from cog import BaseModel, BasePredictor, Input, Path
from decoding import FULL_SCALE, RATE_HZ
from recordings import count_seconds
from windows import faster_whisper, windows_of


class Output(BaseModel):
    """The windows of a recording, in order.

    `windows`: flac, 16 kHz, 16 bits, one channel, at most 30 s. `parts`: for each window, the
    positions of its parts, in samples of the recording at 16 kHz. `duration`: length of the
    recording, in seconds.
    """

    windows: list[Path]
    parts: list[Any]
    duration: float


class Predictor(BasePredictor):
    """Cuts at silences."""

    def setup(self) -> None:
        """Loads the speech detector, which is part of faster-whisper."""
        faster_whisper().vad.get_vad_model()

    def work(self, input: Any) -> int:
        """Returns the seconds of audio in the file, rounded up."""
        duration_s: float = count_seconds(input.file)
        return max(1, math.ceil(duration_s))

    def predict(
        self,
        file: Path = Input(description="The recording: wav, flac, mp3, ogg, m4a, webm or aac."),
    ) -> Output:
        """Returns the recording's windows as lossless files. None if there is no speech."""
        folder, files, parts = LocalPath(tempfile.mkdtemp()), list[Path](), list[Any]()
        for number, window in enumerate(windows_of(file)):
            target = folder / f"window-{number}.flac"
            samples = (window.samples * FULL_SCALE).astype("int16")
            soundfile.write(str(target), samples, RATE_HZ, "PCM_16", format="FLAC")
            files.append(Path(target))
            parts.append(window.places)
        return Output(windows=files, parts=parts, duration=count_seconds(file))
