"""The memory of a model process and of the machine, in bytes, and how to return unused memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import Any

_PAGE_BYTES = resource.getpagesize()
_SUFFIXES = (".safetensors", ".bin", ".pt", ".onnx")


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except FileNotFoundError:  # not Linux, which has only the peak
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def gpu_bytes() -> int:
    """GPU memory that torch allocated for tensors in this process."""
    torch = _torch_with_gpu()
    return (
        sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
        if torch
        else 0
    )


def weights_bytes(place: Path) -> int:
    """The size of weight files: `place`, or the files below it in one format."""
    files = [path for path in (place, *place.rglob("*")) if path.is_file()]
    sums = (
        sum(path.stat().st_size for path in files if path.suffix == suffix) for suffix in _SUFFIXES
    )
    return next(filter(None, sums), 0)


def free_host_bytes() -> int:
    """Free memory without swapping: of the machine, or less if a cgroup limits it."""
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(
            int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
        )
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # `max` means no limit
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    return max(0, min(free, default=0))


def give_back(*, is_empty: bool) -> None:
    """Returns freed memory to the machine.

    `is_empty`: no model is left, so all other objects are permanent.
    """
    gc.collect()
    if is_empty:
        # libraries have 300,000 objects; a collection of them takes a quarter of a second
        gc.freeze()
    torch = _torch_with_gpu()
    if torch is not None:
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _torch_with_gpu() -> Any:
    """torch, if it is imported and uses a GPU. Does not import it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
