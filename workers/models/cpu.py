"""The CPU: its name, the instruction sets that affect speed, and the threads that a model uses.

A model computes with as many threads as cores are free. The threads of one computation wait for one
another, awake. So a thread without a core holds up the others, and their waiting holds up the
process that has that core: two workers with two threads each on the same two cores wrote 114
tokens/s together, and 364 with one thread each (decision 24).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_WINDOW_S = 0.3
"""Computing that is judged together."""
_FREE = 0.75
"""The least part of its time that a thread has a core, unless there are too many."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 4.0, 64.0
"""Until there may be more threads. It doubles when these are too many again."""


def idle_s() -> float:
    """Seconds that the cores of this machine had nothing to do, all together (man 5 proc_stat).

    If the system does not report it, all of them: then more threads are tried after each pause.
    """
    try:
        ticks = int(Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=5)[4])
    except (OSError, IndexError, ValueError):
        return time.monotonic() * (os.cpu_count() or 1)
    return ticks / os.sysconf("SC_CLK_TCK")


class CpuThreads:
    """Follows what this process gets of the cores: one thread at first, more if cores are idle.

    There are too many threads if they have less CPU time than cores. One such computation may
    take seconds, so more are not tried before cores were idle. The most threads are those that
    torch has: a forked process gets its own number after the fork.

    Args:
        now_s: the time.
        cpu_s: the CPU time of this process.
        idle_s: the time that cores of the machine were idle.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.process_time,
        idle_s: Callable[[], float] = idle_s,
    ) -> None:
        self._now_s, self._cpu_s, self._idle_s = now_s, cpu_s, idle_s
        self._count = 1
        self._wall_s = self._used_s = 0.0
        self._watched: tuple[float, float] | None = None
        """The time and the idle time when this window began."""
        self._pause_s = _FIRST_PAUSE_S
        self._more_at_s = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Gives torch its threads for one computation, and sees what came of them."""
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        began_s, cpu_s = self._now_s(), self._cpu_s()
        if self._watched is None:
            self._watched = began_s, self._idle_s()
        count = min(most, self._count)
        torch.set_num_threads(count)
        try:
            yield
        finally:  # the number is that of the whole process, with its other models
            torch.set_num_threads(most)
        self._wall_s += self._now_s() - began_s
        self._used_s += self._cpu_s() - cpu_s
        if self._wall_s >= _WINDOW_S:
            self._judge(count, most)

    def _judge(self, count: int, most: int) -> None:
        assert self._watched is not None, "a window has a beginning; this is a bug"
        now_s, idle_s = self._now_s(), self._idle_s()
        cores = self._used_s / self._wall_s
        idle = (idle_s - self._watched[1]) / max(now_s - self._watched[0], self._wall_s)
        self._wall_s = self._used_s = 0.0
        self._watched = None
        if cores < _FREE * count and count > 1:
            self._count = max(1, int(cores + 1 - _FREE))
            self._more_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        elif count == most:
            self._pause_s = _FIRST_PAUSE_S
        elif now_s >= self._more_at_s:
            self._count = min(most, count + int(idle + 1 - _FREE))


BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of /proc/cpuinfo, on x86 and on ARM."""
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""With one of them, x86 adds 8-bit products in 32 bits instead of 16, where they saturate."""
_BEYOND_AVX2 = ("avx512", "amx", "avx_vnni")
"""Prefixes of the flags that oneDNN ignores if ONEDNN_MAX_CPU_ISA limits it to AVX2 or less."""
SPEED_FLAGS = BF16_FLAGS | VNNI_FLAGS | {"avx2", "avx512f", "amx_int8", "asimddp", "i8mm"}


def this_cpu() -> tuple[str, tuple[str, ...]]:
    """The name of the CPU, and its flags among SPEED_FLAGS."""
    facts = read_facts(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX", "AVX2"):
        flags = [flag for flag in flags if not flag.startswith(_BEYOND_AVX2)]
    name = facts.get("model name") or " ".join(
        facts.get(key, "") for key in ("CPU implementer", "CPU part")
    )
    return name, tuple(sorted(SPEED_FLAGS & set(flags)))


def has_vnni() -> bool:
    """Returns whether this CPU has VNNI."""
    return bool(VNNI_FLAGS & set(this_cpu()[1]))


def read_facts(path: Path) -> dict[str, str]:
    """The first value of each `key: value` line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts
