"""Job timers: each fires at the job's queue limit and at its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from workers.scheduling.job import JobTimer, PulledJob

JobCallback = Callable[[PulledJob], None]


class Clock(Protocol):
    """The clock used for deadlines. Tests use a clock that they advance themselves."""

    def now_s(self) -> float:
        """Returns Unix seconds."""
        ...

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job after this many seconds, unless the timer is canceled first."""
        ...


class SystemClock:
    """The system clock, with the running event loop's timers."""

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # makes a system call

    def now_s(self) -> float:
        """Returns Unix seconds."""
        return time.time()

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job after this many seconds, unless the timer is canceled first."""
        return self._loop.call_later(delay_s, act, pulled)


class Deadlines:
    """Watches jobs until they end.

    Args:
        on_start_expired: called at a job's queue limit, if that is before its deadline.
        on_expired: called at a job's deadline.
        part: fraction of the remaining time after which a limit is considered passed.
    """

    def __init__(
        self,
        on_start_expired: JobCallback,
        on_expired: JobCallback,
        clock: Clock,
        part: float = 1.0,
    ) -> None:
        self._clock = clock
        self._part = part
        self._on_start_expired = on_start_expired
        self._on_expired = on_expired

    def watch(self, pulled: PulledJob) -> None:
        """Starts the timer for a job that was just pulled."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = self._at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)
        self._on_start_expired(pulled)

    def _at(self, unix_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        left_s = max(0.0, unix_s - self._clock.now_s())
        return self._clock.call_later(left_s * self._part, act, pulled)
