"""A batch's progress in one turn, used to decide whether to keep waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from api.batch_runner.lines import BatchLine
from api.errors import RateLimited
from shared.errors import Canceled, DeadlineExceeded, PenstockError

STALLED_S = 30.0
"""A batch in which no line has finished for STALLED_S yields to another waiting batch."""


class TurnProgress:
    """A batch's progress in one turn. Decides whether it is worth waiting for more lines.

    Args:
        should_yield: returns whether another batch could run in place of this one.
        attempts: number of failed attempts in lines' records, keyed by line number. These counts
            outlive the turn, because the next turn would otherwise run into the same failures
            again.
    """

    def __init__(self, should_yield: Callable[[], bool], attempts: dict[int, int]) -> None:
        self.attempts = attempts
        self._should_yield = should_yield
        self._moved_s = time.monotonic()
        self.ended_lines = 0
        self.is_stalled = False
        """True if the remaining lines are waiting for a later turn."""

    def note_end(self, line: BatchLine) -> None:
        self.attempts.pop(line.number, None)
        self._moved_s = time.monotonic()
        self.ended_lines += 1

    def note_failure(self, line: BatchLine, error: PenstockError, *, has_ended: bool) -> None:
        """Records that a line failed and may be retried.

        Args:
            has_ended: True if the line's items had outcomes, which are now in its records and rows.
        """
        # The job's record has this outcome, so the same ID would just return the outcome again.
        if has_ended or isinstance(error, DeadlineExceeded | Canceled):
            self.attempts[line.number] = self.attempts.get(line.number, 0) + 1

    def stall(self) -> None:
        """Leaves lines that have not started for a later turn."""
        self.is_stalled = True

    def is_worth_waiting(self, error: PenstockError) -> bool:
        """Returns whether to retry a line that failed with `error` in this turn.

        A spent budget holds up only this line, because other lines may cost less.
        """
        if isinstance(error, RateLimited) and error.is_final:
            return False
        if time.monotonic() - self._moved_s >= STALLED_S and self._should_yield():
            self.stall()
        return not self.is_stalled
