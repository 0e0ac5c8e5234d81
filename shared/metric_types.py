"""Prometheus metrics that take less CPU time per request or item than prometheus_client's."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Gauge, Histogram


class Level:
    """A gauge that changes with every request and is read when it is scraped.

    `Gauge.inc` takes ten times as long as an addition.
    """

    def __init__(self, gauge: Gauge) -> None:
        self.value = 0
        gauge.set_function(lambda: self.value)


class CountingHistogram(Histogram):
    """A histogram that can record several equal observations at once."""

    def observe_equal(self, amount: float, times: int) -> None:
        """Records `amount` this many times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)
