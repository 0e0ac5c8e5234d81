"""One timer for each job in hand. It fires when it is too late to begin the job, and when it is too late to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from workers.job import PulledJob

Act = Callable[[PulledJob], None]


class Deadlines:
    """Watches jobs until they are over.

    Args:
        on_unstartable: told of a job whose queue limit passed, if that is before its deadline.
        on_late: told of a job whose deadline passed.
    """

    def __init__(self, on_unstartable: Act, on_late: Act) -> None:
        self._on_unstartable = on_unstartable
        self._on_late = on_late

    def watch(self, pulled: PulledJob) -> None:
        """Begins to watch a job that was just taken in hand."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = _at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = _at(pulled.envelope.deadline_s, self._on_late, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = _at(pulled.envelope.deadline_s, self._on_late, pulled)
        self._on_unstartable(pulled)


def _at(unix_s: float, act: Act, pulled: PulledJob) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(max(0.0, unix_s - time.time()), act, pulled)
