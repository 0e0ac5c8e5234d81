"""How fast items of one model leave an instance, told from those that left; what admission reckons with.

As in BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): how fast a path can go
shows only while something waits in line. While little is asked for, items leave as slowly as they come, which says
nothing; so without a line a measurement counts only where it is faster than what was believed. Whether there is a line
tells Little's law: items in flight times seconds per item is how long one stays.
"""

from __future__ import annotations

import math

from shared.tasks.base import FirstGuesses

PRIOR_ITEMS = 4.0
"""What the belief from before weighs against new measurements, in items."""
SHORTEST_WINDOW_S, WINDOW_TURNS = 2.0, 8.0
"""Measurements fade within a window: this long, or so many times what one item takes."""
IN_LINE = 2.5
"""From a stay of so many times the usual on, items stand in line: one batch is computed, another waits, in any case."""
IDLE_FADE_S = 120.0
"""What was measured so long ago counts for a third: workers come and go meanwhile."""
WEIGHT = 0.1
"""Of the newest in the moving average of `usual_s`."""

LEAST_MARGIN, MOST_MARGIN, MARGIN_STEP = 1.25, 2.0, 1.2
"""Waits are taken for longer than estimated, and for longer still while answers come late: on cores that others use too
the pace changes within one deadline, and a late answer is work for nothing."""
MARGIN_FADE_S = 30.0


class Pace:
    """Pure: the caller brings the clock, in monotonic seconds.

    Args:
        guesses: of the model's task, until something was measured.
    """

    def __init__(self, guesses: FirstGuesses) -> None:
        self._guess_s = guesses.gap_s
        self.item_s = self._guess_s
        """Seconds between two items that leave while others wait."""
        self.usual_s = guesses.batch_s
        """Seconds that the model takes for an item, with what is in its batch."""
        self.margin = LEAST_MARGIN
        """What an estimated wait is multiplied by."""
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._last_s = self._judged_s = 0.0
        self._late_s = -math.inf

    def start(self, now_s: float) -> None:
        """The first item comes after a time without any."""
        self._judge(in_flight=0)
        idle_s = max(0.0, now_s - self._last_s)
        self.item_s = self._guess_s + (self.item_s - self._guess_s) * math.exp(-idle_s / IDLE_FADE_S)
        self._busy_s, self._items = PRIOR_ITEMS * self.item_s, PRIOR_ITEMS
        self._last_s = self._judged_s = now_s

    def end(self, now_s: float, items: int, in_flight: int, took_s: float | None) -> None:
        """`items` leave together, of `in_flight`; the model took `took_s` for them."""
        if took_s is not None:
            self.usual_s += WEIGHT * (took_s - self.usual_s)
        # Items leave a batch at a time: the first one of a batch has the time of all of them on it.
        if now_s - self._judged_s >= self.usual_s / 2:
            self._judge(in_flight)
            self._judged_s = now_s
        gap_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        fade = math.exp(-gap_s / max(SHORTEST_WINDOW_S, WINDOW_TURNS * self.usual_s))
        self._busy_s = self._busy_s * fade + gap_s
        self._items = self._items * fade + items
        self.margin = LEAST_MARGIN + (self.margin - LEAST_MARGIN) * math.exp(-gap_s / MARGIN_FADE_S)

    def end_late(self, now_s: float) -> None:
        """Items did not end before their deadline; of those that are late together the first counts."""
        if now_s - self._late_s >= self.usual_s:
            self._late_s = now_s
            self.margin = min(self.margin * MARGIN_STEP, MOST_MARGIN)

    def _judge(self, in_flight: int) -> None:
        measured_s = self._busy_s / self._items
        if measured_s < self.item_s or in_flight * measured_s > IN_LINE * self.usual_s:
            self.item_s = measured_s

    def stalled_s(self, now_s: float) -> float:
        """For how much longer than usual nothing has left; 0 where items leave as they do."""
        return max(0.0, now_s - self._last_s - IN_LINE * self.usual_s)
