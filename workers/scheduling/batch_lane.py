"""Decides how much of a model's time the lane `batch` gets besides interactive work.

Pure: no clock, no I/O. Times are unix seconds of one clock, durations are in seconds.
"""

from __future__ import annotations

from math import inf

from workers.scheduling.batch_time import BatchTime

FILL_S = 0.005
"""How much longer a batch may take for items that are not why it runs now.

On a GPU that is still free room in a batch of short items. On a CPU it is about one text.
"""
TURN_S = 0.02
"""The longest batch of the lane `batch` while there is interactive traffic, or one item.

An interactive item may have to wait for it.
"""
RECENT_S = 60.0
"""There is interactive traffic for so long after an interactive item came."""
BATCH_SHARE = 1 / 16
"""The share of the work that the lane `batch` gets while interactive items wait all the time.

Enough that it never stops. Each turn is one of TURN_S, so an interactive item waits for one more
short batch at most.
"""
URGENT_TURN = 4
"""At most one batch in so many is for the deadline of a batch job while interactive items wait.

Admission relies on the rest (api/dispatch/admission.py, INTERACTIVE_SHARE).
"""


class BatchLanePolicy:
    """Knows how long batches take, and the work that is owed to the lane `batch`."""

    def __init__(self) -> None:
        self._time = BatchTime()
        self._owed = 0.0
        self._interactive_s = -inf
        self._since_urgent = 0

    @property
    def fill_work(self) -> float:
        """How much work makes a batch longer by FILL_S. Infinite until a batch was measured."""
        return self._time.more_work_in(FILL_S)

    def observe_batch(self, work: int, seconds: float) -> None:
        """Takes note of how long a process took for a batch."""
        self._time.observe(work, seconds)

    def observe_interactive(self, now_s: float) -> None:
        """Takes note of an interactive item."""
        self._interactive_s = max(self._interactive_s, now_s)

    def is_interactive(self, now_s: float) -> bool:
        """Whether there is interactive traffic."""
        return now_s - self._interactive_s < RECENT_S

    def turn_work(self, now_s: float) -> float:
        """How much work a batch of the lane may have now, besides its first item."""
        return self._time.work_in(TURN_S) if self.is_interactive(now_s) else inf

    def is_owed(self, first: int, budget: int) -> bool:
        """Whether the lane is owed the work of a turn.

        Args:
            first: the work of an item that waits. A turn has at least one.
            budget: the work of a full batch.
        """
        return self._owed >= max(first, min(budget, self._time.work_in(TURN_S)))

    def is_urgent(self, now_s: float, earliest_s: float, budget: int) -> bool:
        """Whether a deadline would pass while one full batch runs, and then one with its item.

        Args:
            now_s: the time.
            earliest_s: the earliest deadline in the lane.
            budget: the work of a full batch.
        """
        if self._since_urgent < URGENT_TURN - 1:
            return False
        return now_s < earliest_s < now_s + 2 * self._time.seconds_for(budget)

    def observe_interactive_batch(self, interactive: int, filled: int) -> None:
        """Takes note of a batch while items of the lane wait, and of their part in it. In work."""
        self._since_urgent += 1
        self._owed += interactive * BATCH_SHARE / (1 - BATCH_SHARE) - filled

    def observe_turn(self, work: int, *, has_delayed: bool, is_urgent: bool) -> None:
        """Takes note of a batch of the lane.

        Args:
            work: of its items.
            has_delayed: whether interactive items wait.
            is_urgent: whether a deadline called for it.
        """
        self._since_urgent = 0 if is_urgent else self._since_urgent + 1
        if has_delayed:
            self._owed -= work
        elif self._owed > 0:
            self._owed = max(0.0, self._owed - work)
