"""One timer per job in hand, which fires at the queue limit and at the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from workers.job import PulledJob

JobCallback = Callable[[PulledJob], None]


class Deadlines:
    """Watches jobs until they are over.

    Args:
        on_start_expired: called at a job's queue limit, if that is before its deadline.
        on_expired: called at a job's deadline.
        part: of the time that is left, after which a limit counts as passed.
    """

    def __init__(
        self, on_start_expired: JobCallback, on_expired: JobCallback, part: float = 1.0
    ) -> None:
        self._part = part
        self._on_start_expired = on_start_expired
        self._on_expired = on_expired

    def watch(self, pulled: PulledJob) -> None:
        """Starts the timer of a job that was just pulled."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = self._at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)
        self._on_start_expired(pulled)

    def _at(self, unix_s: float, act: JobCallback, pulled: PulledJob) -> asyncio.TimerHandle:
        left_s = max(0.0, unix_s - time.time())
        return asyncio.get_running_loop().call_later(left_s * self._part, act, pulled)
