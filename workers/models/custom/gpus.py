"""The GPU for a class's process: which one the process sees, and the GPU's name."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_variables(device: str) -> dict[str, str]:
    """Returns the variables that make CUDA show only one GPU to a process.

    Args:
        device: `cuda:N`. With any other value, the process sees the same GPUs as this process does.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return {}
    visible = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    chosen = visible[int(number)] if int(number) < len(visible) else number
    return {"CUDA_VISIBLE_DEVICES": chosen}


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
    folders = sorted(driver.glob("*"))
    if number >= len(folders):
        return device
    try:
        lines = (folders[number] / "information").read_text(encoding="utf-8").splitlines()
    except OSError:
        return device
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return next(named, device)
