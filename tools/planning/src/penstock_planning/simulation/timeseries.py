"""The time series that queries see: samples with their age, as a scrape brings them."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
"""Sorted pairs of name and value."""

TRIMMED_AT = 2048
"""Samples of a series. The older half is dropped then if no query looks so far back."""


@dataclass(slots=True)
class Series:
    """The samples of one series, by the time of the scrape."""

    labels: Labels
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    age_s: float = 0.0
    """Seconds after a scrape before a query sees its samples."""
    has_fallen: bool = False
    """True if a value was ever below the one before, as after a counter's reset."""
    ended_s: float = math.inf
    """The time its target disappeared, when Prometheus writes a staleness marker."""


@dataclass(frozen=True)
class Matcher:
    """One condition of a selector."""

    label: str
    operator: str
    value: str

    def fits(self, labels: Labels) -> bool:
        """Returns whether labels meet the condition. A missing label is empty, as in Prometheus."""
        value = dict(labels).get(self.label, "")
        tests: dict[str, Callable[[], bool]] = {
            "=": lambda: value == self.value,
            "!=": lambda: value != self.value,
            "=~": lambda: re.fullmatch(self.value, value) is not None,
            "!~": lambda: re.fullmatch(self.value, value) is None,
        }
        return tests[self.operator]()


class TimeSeries:
    """All series by metric name and labels.

    Args:
        kept_s: the longest lookback of queries. Older series and samples may be dropped.
    """

    def __init__(self, kept_s: float = math.inf) -> None:
        self.kept_s = kept_s
        self._by_name: dict[str, dict[Labels, Series]] = {}
        self._chosen: dict[tuple[str, tuple[Matcher, ...]], list[Series]] = {}

    def append(
        self, name: str, labels: Labels, at_s: float, value: float, age_s: float = 0.0
    ) -> None:
        """Adds a sample. Samples of a series come in order of time."""
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
        """Marks a series as stale: its target is gone."""
        series = self._by_name.get(name, {}).get(labels)
        if series is not None:
            series.ended_s = at_s

    def select(self, name: str, matchers: tuple[Matcher, ...]) -> list[Series]:
        """The series of a metric that fit all matchers."""
        key = (name, matchers)
        if key not in self._chosen:
            self._chosen[key] = [
                series
                for series in self._by_name.get(name, {}).values()
                if all(matcher.fits(series.labels) for matcher in matchers)
            ]
        return self._chosen[key]

    def forget(self, now_s: float) -> None:
        """Drops series that no query sees any more."""
        for of_name in self._by_name.values():
            oldest_s = now_s - self.kept_s
            for key in [key for key, one in of_name.items() if one.times_s[-1] < oldest_s]:
                del of_name[key]
        self._chosen.clear()


def newest(series: Series, at_s: float, now_s: float, lookback_s: float) -> float | None:
    """The newest value up to a time that a query at `now_s` sees. None beyond the lookback."""
    seen_s = min(at_s, now_s - series.age_s)
    index = bisect_right(series.times_s, seen_s) - 1
    if index < 0 or series.times_s[index] <= at_s - lookback_s or series.ended_s <= seen_s:
        return None
    return series.values[index]


def window(series: Series, from_s: float, to_s: float, now_s: float) -> tuple[int, int]:
    """The indices of the samples after `from_s`, up to `to_s`, that a query at `now_s` sees."""
    last = bisect_right(series.times_s, min(to_s, now_s - series.age_s))
    return min(bisect_left(series.times_s, from_s), last), last
