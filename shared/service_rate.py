"""Estimates the service rate of a model from the items that completed. Admission uses the estimate.

After BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): the
service rate can be measured only while there is a queue. At low load items complete as slowly as
they arrive, which says nothing about the rate. So without a queue a measurement counts only if it
is faster than the estimate. Little's law shows whether there is a queue: the time that an item
stays is the number of items in flight times the seconds per item.
"""

from __future__ import annotations

import math

from shared.tasks.base import FirstGuesses

PRIOR_ITEMS = 4.0
"""The weight of the previous estimate against new measurements, in items."""
MIN_WINDOW_S, WINDOW_TURNS = 2.0, 8.0
"""Measurements fade within a window of this many seconds, or this many service times."""
QUEUED_FROM = 2.5
"""An item that stays this many service times was in a queue: one batch runs while another waits."""
IDLE_FADE_S = 120.0
"""After this idle time a measurement counts for a third, since workers come and go."""
NEWEST_WEIGHT = 0.1
"""The weight of the newest value in the moving average `service_s`."""

MIN_MARGIN, MAX_MARGIN, MARGIN_STEP = 1.25, 2.0, 1.2
"""Estimated waits are multiplied by a margin, which grows while answers come late. On shared cores
the rate changes within one deadline, and a late answer is wasted work."""
MARGIN_FADE_S = 30.0


class ServiceRate:
    """The service rate of one model. Pure: callers pass the time, in monotonic seconds.

    Args:
        guesses: the first guesses of the model's task.
    """

    def __init__(self, guesses: FirstGuesses) -> None:
        self._guess_s = guesses.gap_s
        self.item_s = self._guess_s
        """Seconds per item while there is a queue."""
        self.is_guess = True
        """True if `item_s` was not measured, or too long ago to be useful."""
        self.service_s = guesses.batch_s
        """The service time: seconds that the model takes for an item and its batch."""
        self.margin = MIN_MARGIN
        """The factor for estimated waits."""
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._last_s = self._updated_s = 0.0
        self._late_s = -math.inf

    def start_busy_period(self, now_s: float) -> None:
        """Call this when an item arrives and no other is in flight."""
        self._update(in_flight=0)
        idle_s = max(0.0, now_s - self._last_s)
        self.item_s = self._guess_s + (self.item_s - self._guess_s) * math.exp(
            -idle_s / IDLE_FADE_S
        )
        self.is_guess |= idle_s > IDLE_FADE_S
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._last_s = self._updated_s = now_s

    def record_completed(
        self, now_s: float, items: int, in_flight: int, took_s: float | None
    ) -> None:
        """Records that `items` of `in_flight` completed together. The model took `took_s`."""
        if took_s is not None:
            self.service_s += NEWEST_WEIGHT * (took_s - self.service_s)
        # Items complete a batch at a time, and the first of a batch carries the time of all.
        if now_s - self._updated_s >= self.service_s / 2:
            self._update(in_flight)
            self._updated_s = now_s
        gap_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        fade = math.exp(-gap_s / max(MIN_WINDOW_S, WINDOW_TURNS * self.service_s))
        self._busy_s = self._busy_s * fade + gap_s
        self._items = self._items * fade + items
        self.margin = MIN_MARGIN + (self.margin - MIN_MARGIN) * math.exp(-gap_s / MARGIN_FADE_S)

    def record_late(self, now_s: float) -> None:
        """Records items that missed their deadline. If several are late together, one counts."""
        if now_s - self._late_s >= self.service_s:
            self._late_s = now_s
            self.margin = min(self.margin * MARGIN_STEP, MAX_MARGIN)

    def _update(self, in_flight: int) -> None:
        measured_s = self._busy_s / self._items
        if measured_s < self.item_s or in_flight * measured_s > QUEUED_FROM * self.service_s:
            self.item_s, self.is_guess = measured_s, False

    def stalled_s(self, now_s: float) -> float:
        """Returns how much longer than normal the current pause is, at least 0, in seconds."""
        return max(0.0, now_s - self._last_s - QUEUED_FROM * self.service_s)
