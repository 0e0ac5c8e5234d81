"""Joins the transcripts of a recording's windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

RATE_HZ = 16_000
"""Sample rate used for window positions."""


def offset_s(places: Sequence[Sequence[int]], at_s: float, *, is_end: bool = False) -> float:
    """Returns the offset between times in the recording and times in a window.

    Args:
        places: start and end of each part in the window, in samples of the recording.
        at_s: time in the window. A time after the window's end counts as being in the last part.
        is_end: True if something ends there. In that case, a time between two parts counts as being
            in the first one.
    """
    at, before, offset = int(at_s * RATE_HZ), 0, 0
    for start, end in places:
        offset, before = start - before, before + end - start
        if at < before or (is_end and at == before):
            break
    return offset / RATE_HZ


def in_recording(segment: dict[str, Any], places: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns a window's segment with times relative to the recording, as faster-whisper does."""
    words = []
    for word in segment.get("words", ()):
        offset = offset_s(places, (word["start"] + word["end"]) / 2)
        times = {name: round(word[name] + offset, 2) for name in ("start", "end")}
        words.append(word | times)
    if words:
        return segment | {"words": words, "start": words[0]["start"], "end": words[-1]["end"]}
    start, end = segment["start"], segment["end"]
    return segment | {
        "start": round(start + offset_s(places, start), 2),
        "end": round(end + offset_s(places, end, is_end=True), 2),
    }


class Transcript:
    """Numbers the segments of a recording."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._language = ""
        self._number = 0

    def add(
        self, segments: Iterable[dict[str, Any]], places: Sequence[Sequence[int]]
    ) -> Iterator[dict[str, Any]]:
        """Yields the next window's segments as segments of the whole recording.

        Each has the recording's duration and the language of its first segment.
        """
        for segment in segments:
            if not segment["text"].strip():
                continue
            self._language = self._language or segment.get("language", "")
            about = {"language": self._language, "duration": self._duration_s}
            yield in_recording(segment, places) | {"id": self._number} | about
            self._number += 1

    def finish(self, language: str = "en") -> Iterator[dict[str, Any]]:
        """Yields a segment without text if there are no others. `language` is its language."""
        if not self._number:
            about = {"language": language, "duration": self._duration_s}
            yield {"id": 0, "start": 0.0, "end": self._duration_s, "text": ""} | about
