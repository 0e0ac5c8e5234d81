"""Transcribes a recording with Whisper (https://arxiv.org/abs/2212.04356).

faster-whisper runs it on CTranslate2, with 8-bit integers on a CPU and half precision on a GPU.
faster-whisper's file module imports PyAV, whose wheel bundles GPL encoders. PyAV is therefore not
installed here (overrides.txt). Instead, recordings.py measures the audio in a file, and decoding.py
decodes it (docs/decisions/0128-sound-in-recordings.md).

A recording is cut into windows at silences, and each window is transcribed separately. The first
segments therefore arrive while the rest is still being read.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import Any

from cog import BasePredictor, Input, Path
from recordings import InvalidInput, count_seconds
from transcript import Transcript
from windows import RATE_HZ, faster_whisper, whole_of, windows_of

WEIGHTS = LocalPath(__file__).parent / "weights"
TASKS = ["transcribe", "translate"]
SEED = 0
"""Seed for sampling at temperatures above 0, so identical windows produce identical texts.

A CTranslate2 thread accepts a seed only once, the first time it samples. The weights are therefore
reloaded after a window that used sampling, which takes 0.4 s for Whisper tiny on a CPU.
"""
BAR = 10


class Predictor(BasePredictor):
    """Transcribes and translates."""

    def setup(self) -> None:
        if not WEIGHTS.is_dir():
            raise FileNotFoundError(f"{WEIGHTS} is missing; run: make example NAME=transcribe")
        import ctranslate2

        self.on_gpu = ctranslate2.get_cuda_device_count() > 0
        self.seed = ctranslate2.set_random_seed
        self.load()

    def load(self) -> None:
        """Loads the weights, for threads that have not used a seed yet."""
        self.model: Any = None  # frees memory before the weights are loaded
        self.has_sampled = False
        self.model = faster_whisper().WhisperModel(
            str(WEIGHTS),
            device="cuda" if self.on_gpu else "cpu",
            compute_type="float16" if self.on_gpu else "int8",
            cpu_threads=int(os.environ.get("OMP_NUM_THREADS", "0")),
        )
        generate = self.model.generate_with_fallback

        def watched(*arguments: Any) -> Any:
            before, self.has_sampled = self.has_sampled, True  # even if it is canceled
            result = generate(*arguments)
            # The third element is the temperature, which is 0 if the first attempt was good enough.
            self.has_sampled = before or result[2] > 0
            return result

        self.model.generate_with_fallback = watched

    def work(self, input: Any) -> int:
        """Returns the seconds of audio in the file, rounded up."""
        duration_s: float = count_seconds(input.file)
        return max(1, math.ceil(duration_s))

    def predict(
        self,
        file: Path = Input(description="The recording: wav, flac, mp3, ogg, m4a, webm or aac."),
        language: str = Input(
            description=("Language of the recording, in ISO 639-1. Empty: it is detected."),
            default="",
        ),
        prompt: str = Input(
            description="Text that comes before, or words as they are spelled.", default=""
        ),
        temperature: float = Input(
            description="0: the likeliest words; others are sampled only if those can't be right.",
            default=0.0,
            ge=0,
            le=1,
        ),
        task: str = Input(
            description="`translate`: into English.", default="transcribe", choices=TASKS
        ),
        word_timestamps: bool = Input(
            description=("True to return start and end of each word."), default=False
        ),
        vad_filter: bool = Input(
            description=(
                "False: the file is treated as one window, at most 30 s without long silences."
            ),
            default=True,
        ),
    ) -> Iterator[dict[str, Any]]:
        """Yields each segment once its window is transcribed, with its start and end in seconds.

        Each segment has the language and duration of the whole recording. A recording without
        speech has a single segment without text.
        """
        known = self.model.supported_languages
        if language and language not in known:
            raise InvalidInput("language", f"must be one of {', '.join(sorted(known))}")
        if task == "translate" and known == ["en"]:
            raise InvalidInput("task", "this model supports only English")
        options: dict[str, Any] = {
            "language": language or None,
            "task": task,
            "initial_prompt": prompt or None,
            "word_timestamps": word_timestamps,
        }
        if temperature:
            options["temperature"] = temperature
        duration_s = count_seconds(file)
        transcript = Transcript(duration_s)
        for window in windows_of(file) if vad_filter else [whole_of(file)]:
            if self.has_sampled:
                self.load()
            self.seed(SEED)
            segments, info = self.model.transcribe(window.samples, **options)
            # The language of the first window applies to the whole recording.
            options["language"] = info.language
            about = {"language": info.language}
            yield from transcript.add(
                (shown(segment) | about for segment in segments), window.places
            )
            show_progress(window.parts[-1].end / RATE_HZ, duration_s)
        yield from transcript.finish(options["language"] or "en")


def show_progress(done_s: float, all_s: float) -> None:
    """Prints a line that Replicate's clients parse (`parseProgressFromLogs`)."""
    share = min(1.0, done_s / all_s)
    bar = ("#" * round(BAR * share)).ljust(BAR)
    print(f"{share:4.0%}|{bar}| {int(min(done_s, all_s))}/{int(all_s)}", file=sys.stderr)


def shown(segment: Any) -> dict[str, Any]:
    """Returns a faster-whisper segment, ready for JSON."""
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
