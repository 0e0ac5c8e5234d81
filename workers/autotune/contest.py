"""Finds the fastest option by timing all of them in alternation until two quiet rounds agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.errors import PenstockError
from workers.autotune.choice import Finding, Layout
from workers.models.backend import Backend

MARGIN = 1.05
"""How many times faster a later option must be, because short measurements are noisy."""
LAYOUT_MARGIN = 1.3
"""The same for layouts. The first layout computes a single text on all cores, which is 1.7 times as
fast on two cores. Under load, it is 6 to 20% slower, so with a smaller margin the choice would be
random.
"""
DISTURBED = 0.25
"""A reading is void if other programs had the cores for this fraction of its duration."""
ROUNDS_MAX = 6


class Timing(NamedTuple):
    """One timing of a backend in a layout.

    `disturbance` is the fraction of time that its processes waited for cores, 0 to 1.
    """

    texts_per_s: float
    disturbance: float = 0.0


@dataclass(eq=False)
class Option:
    """A backend in a layout, with its finding and readings so far."""

    backend: Backend
    layout: Layout
    finding: Finding
    readings: list[Timing] = field(default_factory=list)

    @property
    def best(self) -> Timing:
        """The fastest reading, because noise can only slow things down."""
        return max(self.readings)


Measure = Callable[[Option], Timing]


class Contest:
    """Times options and finds the winner. The time limit applies to all calls to `decide` combined.

    Args:
        limit_s: no round starts after this time.
        rounds: number of rounds that must agree.
    """

    def __init__(
        self, meter: Measure, clock: Callable[[], float], limit_s: float, rounds: int
    ) -> None:
        self._meter = meter
        self._clock = clock
        self._limit_s = limit_s
        self.rounds = rounds
        self._spent_s = 0.0
        self._has_timed = False
        self.disturbed = 0
        self.counted = 0

    def decide(self, options: Sequence[Option], margin: float = MARGIN) -> Option | None:
        """Returns the fastest option, or the first one within `margin` of it.

        None if no two quiet rounds agree.

        Args:
            options: at least one. A single option is timed once to get its figures.
            margin: how many times faster a later option must be.
        """
        wins: Counter[int] = Counter()
        for _ in range(ROUNDS_MAX):
            living = [option for option in options if not option.finding.reason]
            row = [(option, reading) for option in living if (reading := self._time_option(option))]
            if not row:
                return None
            if len(options) == 1:
                return row[0][0]
            if max(reading.disturbance for _, reading in row) > DISTURBED:
                self.disturbed += 1
            else:
                self.counted += 1
                winner = _fastest(row, margin)
                wins[options.index(winner)] += 1
                if wins[options.index(winner)] == self.rounds:
                    return winner
            if self._spent_s > self._limit_s:
                return None
        return None

    def _time_option(self, option: Option) -> Timing | None:
        # At least one option is always timed.
        if self.rounds == 1 and self._has_timed and self._spent_s > self._limit_s:
            option.finding.reason = f"not measured: exceeded {self._limit_s:g} s"
            return None
        began_s = self._clock()
        try:
            reading = self._meter(option)
        except PenstockError as error:
            option.finding.reason = error.message
            return None
        finally:
            self._spent_s += self._clock() - began_s
        self._has_timed = True
        option.readings.append(reading)
        option.finding.texts_per_s[option.layout.name] = round(option.best.texts_per_s, 1)
        option.finding.disturbance = round(max(option.finding.disturbance, reading.disturbance), 2)
        return reading


def _fastest(row: Sequence[tuple[Option, Timing]], margin: float) -> Option:
    best, best_reading = row[0]
    for option, reading in row[1:]:
        if reading.texts_per_s > best_reading.texts_per_s * margin:
            best, best_reading = option, reading
    return best
