"""Waits until the cores are idle, so that other programs do not distort measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

QUIET_LIMIT_S = 10.0
"""Longer than the other workers of a local stack need to start on two cores.

After it we measure anyway.
"""
_SAMPLE_S = 0.3
_SAMPLES = 2
"""How many quiet samples in a row are needed, because a starting process pauses at times."""
_QUIET_SHARE = 0.85


def idle_core_s() -> float | None:
    """Total idle seconds of the cores that this process may use.

    None if the system does not report them.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    fields = [line.split() for line in lines if line.partition(" ")[0] in ours]
    return sum(int(one[4]) + int(one[5]) for one in fields) / ticks


def await_quiet(
    cores: int,
    *,
    limit_s: float = QUIET_LIMIT_S,
    idle_s: Callable[[], float | None] = idle_core_s,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until `cores` are idle.

    Returns True then or if that is unknown, and False after `limit_s`.

    Args:
        cores: how many will be used.
        limit_s: the longest wait.
        idle_s: as idle_core_s.
        clock: seconds.
        sleep: waits for a number of seconds.
    """
    began_s = before_s = clock()
    before = idle_s()
    quiet = 0
    while before is not None:
        sleep(_SAMPLE_S)
        now_s, now = clock(), idle_s()
        if now is None:
            break
        is_quiet = now - before >= _QUIET_SHARE * cores * (now_s - before_s)
        quiet = quiet + 1 if is_quiet else 0
        if quiet == _SAMPLES:
            return True
        if now_s - began_s >= limit_s:
            return False
        before, before_s = now, now_s
    return True
