"""Reads a recording as a stream, and cuts it at silences into windows that Whisper takes at once.

The windows are those of faster-whisper's BatchedInferencePipeline: Silero's detector finds the
parts with speech, and parts that follow each other share a window while they have at most WINDOW_S
together. Nothing of a window depends on what was said before it. So windows of one recording can be
computed anywhere, in any order, and equal ones once.

faster-whisper looks at all samples of a recording. Here at most some minutes are in memory: the
detector's state goes from block to block, and a part is complete as soon as the silence behind it
is as long as what is added to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import soundfile

RATE_HZ = 16_000
"""Whisper's."""
BLOCK_S = 30
WINDOW_S = 30
"""Whisper's."""
FULL_SCALE = 32_768
FRAME = 512
"""Samples of which the detector gives one probability."""
CONTEXT = 64
"""Samples before a frame that it looks at, too."""
SPEECH_ABOVE, SILENCE_BELOW = 0.5, 0.35
SHORT_SILENCE = RATE_HZ * 98 // 1000
"""A part that gets too long is cut at the last silence that is longer."""
MIN_SILENCE = RATE_HZ * 160 // 1000
PAD = RATE_HZ * 400 // 1000
"""Added to a part at both ends."""
MAX_PART = WINDOW_S * RATE_HZ - FRAME - 2 * PAD


class WrongInput(ValueError):
    """An input that this model does not take."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def faster_whisper() -> Any:
    """The package, without PyAV: it gets samples instead of files here."""
    sys.modules.setdefault("av", ModuleType("av"))
    import faster_whisper as package

    return package


def opened(path: Path) -> Any:
    """A recording: wav, flac, mp3, ogg (Vorbis, Opus), aiff or au.

    Raises:
        WrongInput: it is something else.
    """
    try:
        return soundfile.SoundFile(str(path))
    except soundfile.LibsndfileError as error:
        raise WrongInput("file", "not a recording in wav, flac, mp3 or ogg") from error


def seconds_of(path: Path) -> float:
    """How long a recording is, by what its file says.

    Raises:
        WrongInput: it is no recording.
    """
    with opened(path) as file:
        return float(file.frames / file.samplerate)


def blocks_of(path: Path) -> Iterator[Any]:
    """Yields a recording as Whisper takes it: float32, one channel, RATE_HZ, of 16 bits each.

    Raises:
        WrongInput: it is no recording, or ends in the middle of something that is none.
    """
    with opened(path) as file:
        resampler = None
        if file.samplerate != RATE_HZ:
            import soxr  # `work` needs none of it

            resampler = soxr.ResampleStream(file.samplerate, RATE_HZ, 1, dtype="float32")
        try:
            for block in file.blocks(BLOCK_S * file.samplerate, dtype="float32", always_2d=True):
                one = block.mean(axis=1)
                yield _rounded(one if resampler is None else resampler.resample_chunk(one))
        except soundfile.LibsndfileError as error:
            raise WrongInput("file", "it can't be read to its end") from error
        if resampler is not None:
            yield _rounded(resampler.resample_chunk(np.zeros(0, np.float32), last=True))


def _rounded(samples: Any) -> Any:
    """Samples of 16 bits. So a window is the same whether it was a file in between or not."""
    whole = np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1)
    return whole.astype(np.float32) / np.float32(FULL_SCALE)


@dataclass
class Part:
    """A part with speech, in samples of the recording."""

    start: int
    end: int


@dataclass
class Window:
    """Parts of a recording, one behind the other.

    `parts`: in samples of the recording. `samples`: float32, at most WINDOW_S of them.
    """

    parts: list[Part]
    samples: Any

    @property
    def places(self) -> list[list[int]]:
        """Start and end of each part, in samples of the recording."""
        return [[one.start, one.end] for one in self.parts]


class SpeechDetector:
    """Silero's, of faster-whisper, for samples that come in pieces."""

    def __init__(self) -> None:
        self._session = faster_whisper().vad.get_vad_model().session
        self._h = np.zeros((1, 1, 128), np.float32)
        self._c = np.zeros((1, 1, 128), np.float32)
        self._context = np.zeros((1, CONTEXT), np.float32)

    def probabilities(self, samples: Any) -> list[float]:
        """Returns how likely there is speech in each of the next frames.

        `samples`: a multiple of FRAME.
        """
        if not len(samples):
            return []
        frames = samples.reshape(-1, FRAME)
        before = np.concatenate([self._context, frames[:-1, -CONTEXT:]])
        self._context = frames[-1:, -CONTEXT:].copy()
        inputs = {"input": np.concatenate([before, frames], 1), "h": self._h, "c": self._c}
        output, self._h, self._c = self._session.run(None, inputs)
        return [float(one) for one in output.reshape(-1)]


@dataclass
class PartFinder:
    """Finds parts with speech, as faster_whisper.vad.get_speech_timestamps does, without pads."""

    at: int = 0
    """Where the next frame begins."""
    start: int | None = None
    """Where the part begins that is not complete."""
    _quiet_since: int = 0
    _cut: int = 0
    """The last silence in the part at which it may be cut, 0 if there is none."""
    _after_cut: int = 0
    """Where speech goes on behind it."""

    def add(self, probability: float) -> Part | None:
        """Takes the next frame. Returns the part that it completes."""
        now, self.at = self.at, self.at + FRAME
        is_speech = probability >= SPEECH_ABOVE
        if is_speech and self._quiet_since:
            self._quiet_since = 0
            if self._after_cut < self._cut:
                self._after_cut = now
        if self.start is None:
            self.start = now if is_speech else None
            return None
        is_silence = probability < SILENCE_BELOW
        if now - self.start > MAX_PART:
            return self._divide(now, is_silence=is_silence)
        return self._end(now) if is_silence else None

    def _divide(self, now: int, *, is_silence: bool) -> Part:
        """Ends a part that is too long: at its last silence, otherwise here."""
        assert self.start is not None, "only a part is divided; this is a bug"
        part = Part(self.start, self._cut or now)
        goes_on = self._cut and self._after_cut >= self._cut
        self.start = self._after_cut if goes_on else None
        self._cut = self._after_cut = 0
        self._quiet_since = now if goes_on and is_silence else 0
        return part

    def _end(self, now: int) -> Part | None:
        """Ends a part if it has been quiet for long enough."""
        assert self.start is not None, "only a part ends; this is a bug"
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since > SHORT_SILENCE:
            self._cut = self._quiet_since
        if now - self._quiet_since < MIN_SILENCE:
            return None
        part = Part(self.start, self._quiet_since)
        self.start = None
        self._quiet_since = self._cut = self._after_cut = 0
        return part

    def finish(self, count: int) -> Part | None:
        """Ends a recording of `count` samples. Returns the part at its end."""
        part = None if self.start is None else Part(self.start, count)
        self.start = None
        return part


@dataclass
class _Samples:
    """The samples that may still be needed."""

    start: int = 0
    kept: Any = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def end(self) -> int:
        return self.start + len(self.kept)

    def add(self, block: Any, needed_from: int) -> None:
        """Adds a block, and drops what is before `needed_from`."""
        dropped = min(max(0, needed_from - self.start), len(self.kept))
        self.kept = np.concatenate([self.kept[dropped:], block])
        self.start += dropped

    def part(self, part: Part) -> Any:
        return self.kept[part.start - self.start : part.end - self.start]


class Cutter:
    """Cuts a recording that comes in blocks into windows."""

    def __init__(self) -> None:
        self._detector = SpeechDetector()
        self._finder = PartFinder()
        self._samples = _Samples()
        self._waiting: Part | None = None
        """The last part that was found. How far its end is padded depends on the next one."""
        self._window: list[tuple[Part, Any]] = []

    @property
    def seconds(self) -> float:
        """How much has been read."""
        return self._samples.end / RATE_HZ

    @property
    def held(self) -> int:
        """How many samples are in memory."""
        return len(self._samples.kept) + sum(len(samples) for _, samples in self._window)

    def add(self, block: Any) -> Iterator[Window]:
        """Takes the next block. Yields the windows that it completes."""
        waiting = None if self._waiting is None else self._waiting.start
        starts = (waiting, self._finder.start, self._finder.at)
        needed_from = min(one for one in starts if one is not None) - PAD
        self._samples.add(block, needed_from)
        at = self._finder.at
        count = (self._samples.end - at) // FRAME * FRAME
        yield from self._look(self._samples.part(Part(at, at + count)))

    def finish(self) -> Iterator[Window]:
        """Ends the recording. Yields its last windows."""
        count = self._samples.end
        rest = self._samples.part(Part(self._finder.at, count))
        # As faster-whisper pads it: a whole frame more if nothing is missing.
        rest = np.pad(rest, (0, FRAME - len(rest) % FRAME))
        rest[-CONTEXT:] = 0
        yield from self._look(rest)
        if (part := self._finder.finish(count)) is not None:
            yield from self._found(part)
        if (last := self._waiting) is not None:
            last.end = min(count, last.end + PAD)
            yield from self._complete(last)
        if self._window:
            yield self._take()

    def _look(self, samples: Any) -> Iterator[Window]:
        for probability in self._detector.probabilities(samples):
            if (part := self._finder.add(probability)) is not None:
                yield from self._found(part)
            last, start = self._waiting, self._finder.start
            if last is not None and start is None and self._finder.at - last.end >= 2 * PAD:
                self._waiting = None
                last.end += PAD
                yield from self._complete(last)

    def _found(self, part: Part) -> Iterator[Window]:
        last, self._waiting = self._waiting, part
        if last is None:
            part.start = max(0, part.start - PAD)
            return
        silence = part.start - last.end
        half = silence // 2
        part.start -= half if silence < 2 * PAD else PAD
        last.end += half if silence < 2 * PAD else PAD
        yield from self._complete(last)

    def _complete(self, part: Part) -> Iterator[Window]:
        has = sum(one.end - one.start for one, _ in self._window)
        if has + part.end - part.start > WINDOW_S * RATE_HZ:
            yield self._take()
        self._window.append((part, self._samples.part(part).copy()))

    def _take(self) -> Window:
        taken, self._window = self._window, []
        return Window([part for part, _ in taken], np.concatenate([one for _, one in taken]))


def windows_of(path: Path) -> Iterator[Window]:
    """Yields the windows of a recording. None: nobody speaks in it.

    Raises:
        WrongInput: it is no recording, or nothing is in it.
    """
    cutter = Cutter()
    for block in blocks_of(path):
        yield from cutter.add(block)
    if not cutter.seconds:
        raise WrongInput("file", "nothing is recorded in it")
    yield from cutter.finish()


def whole_of(path: Path) -> Window:
    """Returns a recording that is one window.

    Raises:
        WrongInput: it is no recording, nothing is in it, or it is longer than a window.
    """
    longest, blocks = WINDOW_S * RATE_HZ, list[Any]()
    for block in blocks_of(path):
        blocks.append(block)
        if sum(map(len, blocks)) > longest:
            raise WrongInput("file", f"longer than {WINDOW_S} s, so it needs vad_filter")
    samples = np.concatenate([np.zeros(0, np.float32), *blocks])
    if not len(samples):
        raise WrongInput("file", "nothing is recorded in it")
    return Window([Part(0, len(samples))], samples)
