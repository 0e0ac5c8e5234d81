"""What a model process takes and what the machine has left, in bytes; and giving back what is not used any more."""

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
    except FileNotFoundError:  # not Linux; the peak is the nearest that is told
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def gpu_bytes() -> int:
    """What torch has taken of all GPUs for tensors; of its process's own, that is, for it uses one."""
    torch = _torch_with_gpu()
    return sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count())) if torch else 0


def weights_bytes(place: Path) -> int:
    """What weights take as files: `place`, or those below it in the first format of those that libraries look for."""
    files = [path for path in (place, *place.rglob("*")) if path.is_file()]
    sums = (sum(path.stat().st_size for path in files if path.suffix == suffix) for suffix in _SUFFIXES)
    return next(filter(None, sums), 0)


def free_host_bytes() -> int:
    """Memory that may still be taken without swapping: the machine's, or less where a cgroup says so."""
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # `max` is no number: there is no limit
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    return max(0, min(free, default=0))


def give_back(*, is_empty: bool) -> None:
    """Returns what was freed to the machine. `is_empty`: no model is left, so what lives now lives as long as we do."""
    gc.collect()
    if is_empty:
        gc.freeze()  # imported libraries are 300,000 objects: walking them at each drop takes a quarter of a second
    torch = _torch_with_gpu()
    if torch is not None:
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _torch_with_gpu() -> Any:
    """torch, where it was imported and has begun to use a GPU; a process that runs without torch must stay so."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
