"""Estimates how long a model process takes for a batch. Pure: no clock, no I/O."""

from __future__ import annotations

from math import inf

FADE = 0.9
"""Each batch reduces the weight of earlier ones to this share."""
LEAST_SLOPE = 0.25
"""The marginal time of work is at least this share of its average time.

So where it can't be told from noise, batches grow by small factors until it can.
"""


class BatchTime:
    """A line through the batches that ran: a fixed time for each, and the time of its work.

    Fitted by least squares (weights fade with age).
    """

    def __init__(self) -> None:
        self._n = self._w = self._t = self._ww = self._wt = 0.0

    def observe(self, work: int, seconds: float) -> None:
        """Takes note of a batch."""
        self._n = FADE * self._n + 1
        self._w = FADE * self._w + work
        self._t = FADE * self._t + seconds
        self._ww = FADE * self._ww + work * work
        self._wt = FADE * self._wt + work * seconds

    def seconds_for(self, work: float) -> float:
        """How long a batch of `work` takes. 0 if no batch was observed."""
        return self._fixed_s + work * self._slope

    def work_in(self, seconds: float) -> float:
        """How much work a batch of `seconds` has, at least 0. Infinite if none was observed."""
        return max(0.0, seconds - self._fixed_s) / self._slope if self._slope else inf

    def more_work_in(self, seconds: float) -> float:
        """How much work makes a batch longer by `seconds`. Infinite if none was observed."""
        return seconds / self._slope if self._slope else inf

    @property
    def _slope(self) -> float:
        if not self._w:
            return 0.0
        average = self._t / self._w
        spread = self._n * self._ww - self._w * self._w
        if spread <= 1e-9 * self._ww:  # all batches are alike
            return average
        slope = (self._n * self._wt - self._w * self._t) / spread
        return min(max(slope, LEAST_SLOPE * average), average)

    @property
    def _fixed_s(self) -> float:
        return (self._t - self._slope * self._w) / self._n if self._n else 0.0
