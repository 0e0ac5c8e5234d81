"""A heap of timers for leases, backoffs, retention and expirations.

This module does not use an event loop: the owner of the clock calls `run_due` at `next_due_s`, so
tests can advance time manually.
"""

import heapq
import itertools
from collections.abc import Callable

_COMPACT_FROM = 1024


class Timer:
    """An action at a given time. `cancel` drops its references immediately."""

    __slots__ = ("_owner", "action")

    def __init__(self, owner: "Timers", action: Callable[[], None]) -> None:
        self._owner = owner
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Cancel the action. Canceling has no effect once the action has run."""
        if self.action is not None:
            self.action = None
            self._owner.note_cancelled()


class Timers:
    """Actions ordered by due time (seconds since the epoch, like `now_s`)."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.on_earlier: Callable[[], None] = _nobody_waits
        self._heap: list[tuple[float, int, Timer]] = []
        self._tie = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_due_s(self) -> float | None:
        """Return when the next action is due, or None."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def at(self, due_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` at `due_s`. Calls `on_earlier` if this timer is now the earliest."""
        timer = Timer(self, action)
        is_earliest = not self._heap or due_s < self._heap[0][0]
        heapq.heappush(self._heap, (due_s, next(self._tie), timer))
        if is_earliest:
            self.on_earlier()
        return timer

    def run_due(self) -> None:
        """Run every action that is due, in order. Actions may schedule and cancel others."""
        while (due_s := self.next_due_s) is not None and due_s <= self.now_s():
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            if action is not None:
                action()

    def note_cancelled(self) -> None:
        """Count a canceled timer. The heap is rebuilt when most of its timers are canceled.

        Nearly every message is acked long before its lease is due, so otherwise a minute's worth of
        traffic would stay in memory.
        """
        self._cancelled += 1
        if self._cancelled > _COMPACT_FROM and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0


def _nobody_waits() -> None:
    """Used when there is no event loop, because virtual time is advanced rather than waited for."""
