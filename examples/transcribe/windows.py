"""Cuts a recording at silences into windows short enough for Whisper.

The windows are the same as in faster-whisper's BatchedInferencePipeline: Silero's detector finds
the parts with speech, and consecutive parts share a window as long as they total at most WINDOW_S.
No window depends on the speech before it. A recording's windows can therefore be computed anywhere,
in any order, and identical windows need to be computed only once.

faster-whisper needs all of a recording's samples. Here, a few minutes of samples are enough: the
detector's state carries over from block to block, and a part is complete as soon as the silence
after it is as long as the padding added to its end. faster-whisper cuts continuous speech wherever
a window is full, possibly mid-word. Here, continuous speech is cut where it is quietest.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from decoding import RATE_HZ, decode
from recordings import InvalidInput

WINDOW_S = 30
"""Whisper's sample rate."""
FRAME = 512
"""Number of samples for each probability that the detector returns."""
CONTEXT = 64
"""Number of samples before a frame that the detector also considers."""
SPEECH_ABOVE, SILENCE_BELOW = 0.5, 0.35
SHORT_SILENCE = RATE_HZ * 98 // 1000
"""A part that gets too long is cut at the last silence longer than this."""
MIN_SILENCE = RATE_HZ * 160 // 1000
PAD = RATE_HZ * 400 // 1000
"""Padding at both ends of a part."""
MAX_PART = WINDOW_S * RATE_HZ - FRAME - 2 * PAD
SEARCHED = 10 * RATE_HZ // FRAME
"""Number of frames to search for the quietest one at the end of a full part that has no pause.
"""


def faster_whisper() -> Any:
    """Imports the package without PyAV, because here it gets samples instead of files."""
    sys.modules.setdefault("av", ModuleType("av"))
    import faster_whisper as package

    return package


@dataclass
class Part:
    """A part with speech, in samples of the recording."""

    start: int
    end: int


@dataclass
class Window:
    """Consecutive parts of a recording.

    `parts` is in samples of the recording. `samples` is float32, at most WINDOW_S long.
    """

    parts: list[Part]
    samples: Any

    @property
    def places(self) -> list[list[int]]:
        """Start and end of each part, in samples of the recording."""
        return [[part.start, part.end] for part in self.parts]


class SpeechDetector:
    """Silero's detector from faster-whisper, for samples that arrive in blocks."""

    def __init__(self) -> None:
        self._session = faster_whisper().vad.get_vad_model().session
        self._h = np.zeros((1, 1, 128), np.float32)
        self._c = np.zeros((1, 1, 128), np.float32)
        self._context = np.zeros((1, CONTEXT), np.float32)

    def probabilities(self, samples: Any) -> list[float]:
        """Returns, for each of the next frames, the probability that it contains speech.

        The length of `samples` is a multiple of FRAME.
        """
        if not len(samples):
            return []
        frames = samples.reshape(-1, FRAME)
        before = np.concatenate([self._context, frames[:-1, -CONTEXT:]])
        self._context = frames[-1:, -CONTEXT:].copy()
        inputs = {"input": np.concatenate([before, frames], 1), "h": self._h, "c": self._c}
        output, self._h, self._c = self._session.run(None, inputs)
        return [float(probability) for probability in output.reshape(-1)]


@dataclass
class PartFinder:
    """Finds parts with speech, like faster_whisper.vad.get_speech_timestamps without padding."""

    at: int = 0
    """Position of the next frame."""
    start: int | None = None
    """Start of the current part."""
    _quiet_since: int = 0
    _cut: int = 0
    """The last silence at which the part may be cut, or 0 if there is none."""
    _after_cut: int = 0
    """Position where speech resumes after that silence."""
    _powers: deque[float] = field(default_factory=lambda: deque(maxlen=SEARCHED))
    """Power of the last frames."""

    def add(self, probability: float, power: float) -> Part | None:
        """Processes the next frame. Returns the part that this frame completes.

        Args:
            power: mean square of the frame's samples.
        """
        now, self.at = self.at, self.at + FRAME
        self._powers.append(power)
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
        """Ends a part that is too long: at its last pause, or else where it is quietest."""
        assert self.start is not None, "there is no part to divide; this is a bug"
        if not self._cut:
            place = self._find_quietest()
            part, self.start = Part(self.start, place), place
            self._quiet_since = now if is_silence else 0
            return part
        part = Part(self.start, self._cut)
        goes_on = self._after_cut >= self._cut
        self.start = self._after_cut if goes_on else None
        self._cut = self._after_cut = 0
        self._quiet_since = now if goes_on and is_silence else 0
        return part

    def _find_quietest(self) -> int:
        """Returns the boundary of the two adjacent recent frames with the lowest total power."""
        powers = np.array(self._powers)
        together = powers[:-1] + powers[1:]
        return self.at - FRAME * (len(together) - int(together.argmin()))

    def _end(self, now: int) -> Part | None:
        """Ends a part if it has been quiet long enough."""
        assert self.start is not None, "there is no part to end; this is a bug"
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
        """Ends a recording of `count` samples. Returns the part at the recording's end."""
        part = None if self.start is None else Part(self.start, count)
        self.start = None
        return part


@dataclass
class _Samples:
    """Samples that may still be needed."""

    start: int = 0
    kept: Any = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def end(self) -> int:
        return self.start + len(self.kept)

    def add(self, block: Any, needed_from: int) -> None:
        """Adds a block and drops samples before `needed_from`."""
        dropped = min(max(0, needed_from - self.start), len(self.kept))
        self.kept = np.concatenate([self.kept[dropped:], block])
        self.start += dropped

    def part(self, part: Part) -> Any:
        return self.kept[part.start - self.start : part.end - self.start]


class Cutter:
    """Cuts a recording that arrives in blocks into windows."""

    def __init__(self) -> None:
        self._detector = SpeechDetector()
        self._finder = PartFinder()
        self._samples = _Samples()
        self._waiting: Part | None = None
        """The last part found. The padding at the part's end depends on the next part."""
        self._window: list[tuple[Part, Any]] = []

    @property
    def seconds(self) -> float:
        """Returns the seconds read so far."""
        return float(self._samples.end / RATE_HZ)

    @property
    def held(self) -> int:
        """Returns the number of samples in memory."""
        return len(self._samples.kept) + sum(len(samples) for _, samples in self._window)

    def add(self, block: Any) -> Iterator[Window]:
        """Processes the next block. Yields the windows that the block completes."""
        waiting = None if self._waiting is None else self._waiting.start
        starts = (waiting, self._finder.start, self._finder.at)
        needed_from = min(start for start in starts if start is not None) - PAD
        self._samples.add(block, needed_from)
        at = self._finder.at
        count = (self._samples.end - at) // FRAME * FRAME
        yield from self._look(self._samples.part(Part(at, at + count)))

    def finish(self) -> Iterator[Window]:
        """Ends the recording. Yields its last windows."""
        count = self._samples.end
        rest = self._samples.part(Part(self._finder.at, count))
        # Padded as in faster-whisper: by a whole frame if nothing is missing.
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
        powers = np.square(samples).reshape(-1, FRAME).mean(axis=1)
        for probability, power in zip(self._detector.probabilities(samples), powers, strict=True):
            if (part := self._finder.add(probability, power)) is not None:
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
        has = sum(part.end - part.start for part, _ in self._window)
        if has + part.end - part.start > WINDOW_S * RATE_HZ:
            yield self._take()
        self._window.append((part, self._samples.part(part).copy()))

    def _take(self) -> Window:
        window, self._window = self._window, []
        return Window(
            [part for part, _ in window], np.concatenate([samples for _, samples in window])
        )


def windows_of(path: Path) -> Iterator[Window]:
    """Yields the windows of a recording. Yields nothing if it has no speech.

    Raises:
        InvalidInput: the file is not a recording or is empty.
    """
    cutter = Cutter()
    for block in decode(path):
        yield from cutter.add(block)
    if not cutter.seconds:
        raise InvalidInput("file", "the recording is empty")
    yield from cutter.finish()


def whole_of(path: Path) -> Window:
    """Returns a recording that consists of a single window.

    Raises:
        InvalidInput: the file is not a recording, is empty, or is longer than a window.
    """
    longest, blocks = WINDOW_S * RATE_HZ, list[Any]()
    for block in decode(path):
        blocks.append(block)
        if sum(map(len, blocks)) > longest:
            raise InvalidInput("file", f"longer than {WINDOW_S} s, which requires vad_filter")
    samples = np.concatenate([np.zeros(0, np.float32), *blocks])
    if not len(samples):
        raise InvalidInput("file", "the recording is empty")
    return Window([Part(0, len(samples))], samples)
