"""The recent utilization of a worker's model processes, for the autoscaler.

Written by the loop of the worker, and read by the thread that answers scrapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

from workers import metrics

Lane = Literal["interactive", "batch"]
LANES: tuple[Lane, ...] = ("interactive", "batch")

FADE_S = 30.0
"""An earlier second counts for a third after this time. So the ratio covers about a minute.

Batches of some seconds make a shorter one jump, and a longer one is late when load grows.
"""
DIGITS = 3
"""Kept digits. An average that fades is never zero, and idle workers must be seen as idle."""


class _State(NamedTuple):
    """Replaced as a whole, so that another thread never reads half of it."""

    at_s: float
    running: float
    """Processes that run a batch, divided by all. A batch of both lanes counts in parts."""
    average: float

    def average_at(self, now_s: float) -> float:
        """The average, with what ran since the last change."""
        fade = math.exp(-max(0.0, now_s - self.at_s) / FADE_S)
        return self.running + (self.average - self.running) * fade


class BusyRatio:
    """The part of what model processes can do that they do, by lane.

    A running batch counts while it runs. So batches of a minute do not come as a surprise. If
    more items could have joined it for nothing, its process reports afterwards what was spare.

    Args:
        processes: how many model processes there are.
        clock: returns monotonic seconds. Tests replace it.
    """

    def __init__(self, processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._batches = 0
        self._of = {lane: _State(clock(), 0.0, 0.0) for lane in LANES}

    def publish(self) -> None:
        """Shows the ratios to scrapes from now on. Before the first call there are none."""
        for lane in LANES:
            metrics.BUSY_RATIO.labels(lane).set_function(partial(self.read, lane))

    def start(self, lanes: Iterable[Lane]) -> dict[Lane, float]:
        """A batch starts, with one lane for each of its items. Returns what `end` needs."""
        each = list(lanes)
        parts: dict[Lane, float] = {
            lane: each.count(lane) / len(each) / self._processes for lane in LANES
        }
        self._batches += 1
        self._add(parts, 1)
        return parts

    def end(self, parts: dict[Lane, float]) -> None:
        """The batch for which `start` returned these parts ends."""
        self._batches -= 1
        self._add(parts, -1)

    def spare(self, parts: dict[Lane, float], seconds: float) -> None:
        """Records the spare seconds among the last seconds of a batch with these parts."""
        now_s = self._clock()
        for lane, part in parts.items():
            state = self._of[lane]
            average = max(0.0, state.average_at(now_s) - seconds * part / FADE_S)
            self._of[lane] = _State(now_s, state.running, average)

    def read(self, lane: Lane) -> float:
        """The ratio of the last minute or so, from 0 to 1."""
        return round(self._of[lane].average_at(self._clock()), DIGITS)

    def _add(self, parts: dict[Lane, float], sign: int) -> None:
        now_s = self._clock()
        for lane, part in parts.items():
            state = self._of[lane]
            # Rounding errors end with the last batch.
            running = max(0.0, state.running + sign * part) if self._batches else 0.0
            self._of[lane] = _State(now_s, running, state.average_at(now_s))
