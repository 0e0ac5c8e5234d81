"""Time series as queries see them: samples that appear late, as after a scrape."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
"""Sorted name-value pairs."""

TRIMMED_AT = 2048
"""Number of samples at which the older half of a series is dropped, if no query looks back that
far.
"""


@dataclass(slots=True)
class Series:
    """A series' samples, keyed by scrape time."""

    labels: Labels
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    age_s: float = 0.0
    """Seconds after a scrape before queries see its samples."""
    has_fallen: bool = False
    """True if a value was ever lower than the one before it, as happens after a counter reset."""
    ended_s: float = math.inf
    """Time at which the series' target disappeared, when Prometheus writes a staleness marker."""


@dataclass(frozen=True)
class Matcher:
    """A condition in a selector."""

    label: str
    operator: str
    value: str

    def fits(self, labels: Labels) -> bool:
        """Returns whether labels meet the condition.

        As in Prometheus, a missing label counts as empty.
        """
        value = dict(labels).get(self.label, "")
        tests: dict[str, Callable[[], bool]] = {
            "=": lambda: value == self.value,
            "!=": lambda: value != self.value,
            "=~": lambda: re.fullmatch(self.value, value) is not None,
            "!~": lambda: re.fullmatch(self.value, value) is None,
        }
        return tests[self.operator]()


class TimeSeries:
    """All series, by metric name and labels.

    Args:
        kept_s: the farthest back that any query looks. Older series and samples may be dropped.
    """

    def __init__(self, kept_s: float = math.inf) -> None:
        self.kept_s = kept_s
        self._by_name: dict[str, dict[Labels, Series]] = {}
        self._chosen: dict[tuple[str, tuple[Matcher, ...]], list[Series]] = {}

    def append(
        self, name: str, labels: Labels, at_s: float, value: float, age_s: float = 0.0
    ) -> None:
        """Adds a sample. A series' samples must be added in chronological order."""
        of_name = self._by_name.setdefault(name, {})
        series = of_name.get(labels)
        if series is None:
            series = of_name[labels] = Series(labels, age_s=age_s)
            self._chosen.clear()
        series.ended_s = math.inf
        if series.values and value < series.values[-1]:
            series.has_fallen = True
        series.times_s.append(at_s)
        series.values.append(value)
        half = TRIMMED_AT // 2
        if len(series.times_s) > TRIMMED_AT and series.times_s[half] < at_s - self.kept_s:
            del series.times_s[:half], series.values[:half]

    def end(self, name: str, labels: Labels, at_s: float) -> None:
        """Marks a series as stale because its target is gone."""
        series = self._by_name.get(name, {}).get(labels)
        if series is not None:
            series.ended_s = at_s

    def select(self, name: str, matchers: tuple[Matcher, ...]) -> list[Series]:
        """Returns a metric's series that match all matchers."""
        key = (name, matchers)
        if key not in self._chosen:
            self._chosen[key] = [
                series
                for series in self._by_name.get(name, {}).values()
                if all(matcher.fits(series.labels) for matcher in matchers)
            ]
        return self._chosen[key]

    def forget(self, now_s: float) -> None:
        """Drops series that queries no longer see."""
        for of_name in self._by_name.values():
            oldest_s = now_s - self.kept_s
            for key in [key for key, series in of_name.items() if series.times_s[-1] < oldest_s]:
                del of_name[key]
        self._chosen.clear()


def newest(series: Series, at_s: float, now_s: float, lookback_s: float) -> float | None:
    """Returns the newest value up to a time, as seen by a query at `now_s`.

    None beyond the lookback.
    """
    seen_s = min(at_s, now_s - series.age_s)
    index = bisect_right(series.times_s, seen_s) - 1
    if index < 0 or series.times_s[index] <= at_s - lookback_s or series.ended_s <= seen_s:
        return None
    return series.values[index]


def window(series: Series, from_s: float, to_s: float, now_s: float) -> tuple[int, int]:
    """Returns the indices of samples after `from_s`, up to `to_s`, seen by a query at `now_s`."""
    last = bisect_right(series.times_s, min(to_s, now_s - series.age_s))
    return min(bisect_left(series.times_s, from_s), last), last
