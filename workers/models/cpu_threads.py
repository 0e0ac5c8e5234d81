"""How many threads a model on a CPU computes with: as many as cores are free.

The threads of one computation wait for one another, awake. So a thread without a core holds up the
others, and their waiting holds up whoever has that core: two workers with two threads each on the
same two cores wrote 114 tokens/s together, and 364 with one thread each (decision 71).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_WINDOW_S = 0.3
"""Computing that is judged together."""
_FREE = 0.75
"""The least part of its time that a thread has a core, unless there are too many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 4.0, 64.0
"""Until all threads are tried again. It doubles when they are still too many."""


class CpuThreads:
    """Follows what this process gets of the cores, by the CPU time of its threads.

    The most threads are those that torch has: a forked process gets its own number after the fork.

    Args:
        now_s: the time.
        cpu_s: the CPU time of this process.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._now_s, self._cpu_s = now_s, cpu_s
        self._free: int | None = None
        """Cores that were free when there were fewer than threads. None: there were enough."""
        self._wall_s = self._used_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at_s = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Gives torch its threads for one computation, and sees what came of them."""
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        began_s, cpu_s = self._now_s(), self._cpu_s()
        if self._free is not None and began_s >= self._retry_at_s:
            self._free = None
            self._wall_s = self._used_s = 0.0
        count = most if self._free is None else min(most, self._free)
        if count < most:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if count < most:  # the number is that of the whole process, with its other models
                torch.set_num_threads(most)
        self._wall_s += self._now_s() - began_s
        self._used_s += self._cpu_s() - cpu_s
        if self._wall_s >= _WINDOW_S:
            self._judge(count)

    def _judge(self, count: int) -> None:
        cores = self._used_s / self._wall_s
        self._wall_s = self._used_s = 0.0
        if cores < _FREE * count:
            self._free = max(1, int(cores + 1 - _FREE))
            self._retry_at_s = self._now_s() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif self._free is None:
            self._pause_s = _FIRST_PAUSE_S
