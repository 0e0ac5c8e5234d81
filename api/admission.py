"""How much an instance takes on: bounds the items that wait for a worker; the dispatcher asks before it publishes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from api import metrics
from shared.errors import Overloaded

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 60.0
"""Bounds of what callers are told; OpenAI's client 1.x and 2.x ignore more than 60 s."""
FIRST_GUESS_S = 0.05
"""Seconds an item takes, until one has been measured."""
WEIGHT = 0.2
"""Of the newest measurement in the moving average."""


class Admission:
    """Counts items in flight, by model, and measures how fast they leave.

    A request is let in while fewer than `max_in_flight` items are in flight, and then with all its items: otherwise
    a large request would never find room beside small ones. So the true bound is max_in_flight plus one request.

    Args:
        max_in_flight: items in flight from which on requests are refused.
        clock: monotonic seconds, for tests.
    """

    def __init__(self, max_in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._item_s: dict[str, float] = {}
        self._last_end_s: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        """Items in flight now."""
        return self._in_flight.total()

    def admit(self, model: str, items: int) -> None:
        """Takes `items` of `model` in.

        Raises:
            Overloaded: the instance is full; `retry_after_s` is when the model that is done soonest will be.
        """
        if self.in_flight >= self._max_in_flight:
            metrics.SHED.labels(model).inc(items)
            raise Overloaded(
                f"{self.in_flight} items are waiting for a worker, the most that are taken on; try again later",
                retry_after_s=self.retry_after_s(),
            )
        if not self._in_flight[model]:
            self._last_end_s[model] = self._clock()
        self._in_flight[model] += items
        metrics.in_flight(model).inc(items)

    def release(self, model: str, items: int, *, answered: bool) -> None:
        """Lets `items` go; `answered` ones tell how long one takes, given up ones don't."""
        if answered:
            now_s = self._clock()
            took_s = (now_s - self._last_end_s[model]) / items
            known_s = self._item_s.get(model, took_s)
            self._item_s[model] = known_s + WEIGHT * (took_s - known_s)
            self._last_end_s[model] = now_s
        self._in_flight[model] -= items
        metrics.in_flight(model).dec(items)
        if not self._in_flight[model]:
            del self._in_flight[model]

    def retry_after_s(self) -> float:
        """Seconds until the first model has worked off its items in flight, at the speed it has had lately."""
        backlogs_s = [items * self._item_s.get(model, FIRST_GUESS_S) for model, items in self._in_flight.items()]
        return min(max(min(backlogs_s, default=0.0), SHORTEST_RETRY_S), LONGEST_RETRY_S)
