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
    """

    def __init__(self, on_start_expired: JobCallback, on_expired: JobCallback) -> None:
        self._on_start_expired = on_start_expired
        self._on_expired = on_expired

    def watch(self, pulled: PulledJob) -> None:
        """Starts the timer of a job that was just pulled."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = _at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = _at(pulled.envelope.deadline_s, self._on_expired, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = _at(pulled.envelope.deadline_s, self._on_expired, pulled)
        self._on_start_expired(pulled)


def _at(unix_s: float, act: JobCallback, pulled: PulledJob) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(max(0.0, unix_s - time.time()), act, pulled)
