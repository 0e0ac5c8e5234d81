"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
"""`<quota> <period>` in microseconds, or `max <period>`: cgroup v2, as seen inside a container."""


def usable_cores(quota_file: Path = QUOTA_FILE) -> int:
    """Returns the number of cores that this process may use.

    The number is based on the process's CPU affinity, or on its control group's quota if that is
    lower. Kubernetes sets quotas.

    Args:
        quota_file: the control group's `cpu.max` file, which doesn't need to exist.

    Returns:
        At least 1. A fractional quota is rounded up to a whole core.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
