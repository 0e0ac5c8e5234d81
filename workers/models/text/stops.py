"""Finds where a text stops, and how much of it readers may see before that is known."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for the first of some stop sequences in a text that grows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def find(self, text: str, known: int) -> int | None:
        """Where the first stop sequence begins, or None.

        Args:
            text: all of the text so far.
            known: its first characters, which have no whole stop sequence.
        """
        start = max(0, known - self._longest + 1)
        found = [at for stop in self._stops if (at := text.find(stop, start)) >= 0]
        return min(found, default=None)

    def visible(self, text: str) -> int:
        """How many characters can't be part of a stop sequence that ends later."""
        first = max(0, len(text) - self._longest + 1) if self._stops else len(text)
        for at in range(first, len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
