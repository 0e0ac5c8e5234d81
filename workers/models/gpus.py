"""The GPUs that CUDA shows to a process: how many there are, how to choose some, and their names.

Uses neither torch nor nvidia-smi, because not every process may import torch, and not every image
has that program.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus(devices: Path = _DEVICES) -> int:
    """Returns the number of GPUs that CUDA shows to this process.

    Args:
        devices: the folder that contains one device file per GPU.
    """
    count = len(list(devices.glob("nvidia[0-9]*")))
    listed = _list_gpus()
    if listed is None:
        return count
    # CUDA ignores the rest of the list after the first number that no GPU has.
    valid = itertools.takewhile(lambda gpu: not gpu.isdigit() or int(gpu) < count, listed)
    return min(count, len(list(valid)))


def gpu_variables(device: str, count: int = 1) -> dict[str, str]:
    """Returns the variables that make CUDA show only some GPUs to a process.

    Args:
        device: `cuda:N`, the first GPU to show. N counts only the GPUs that this process can see.
            With any other value, the process sees the same GPUs as this process does.
        count: number of GPUs to show.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return {}
    listed = _list_gpus() or []
    numbers = range(int(number), int(number) + count)
    return {VARIABLE: ",".join(listed[n] if n < len(listed) else str(n) for n in numbers)}


def gpu_name(device: str, driver: Path = _DRIVER) -> str:
    """Returns the driver's name for a GPU, `cpu`, or the device if there is no driver.

    Args:
        device: `cpu`, `cuda`, `cuda:N`, or `auto`.
        driver: the folder that contains one folder per GPU (NVIDIA driver README, "The /proc
            interface").
    """
    if device in ("cpu", "auto"):
        return "cpu"
    number = int(device.partition(":")[2] or 0)
    listed = _list_gpus() or []
    gpu = listed[number] if number < len(listed) else str(number)
    facts = [_read_facts(folder) for folder in sorted(driver.glob("*"))]
    if gpu.isdigit():
        facts = facts[int(gpu) : int(gpu) + 1]
    else:
        facts = [fact for fact in facts if fact.get("GPU UUID", "").startswith(gpu)]
    return facts[0].get("Model", device) if facts else device


def _list_gpus() -> list[str] | None:
    """Returns the numbers or UUIDs in the variable, or None if it is not set.

    Any other value, such as -1 or an empty one, ends the list.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    names = (name.strip() for name in value.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def _read_facts(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / "information").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
