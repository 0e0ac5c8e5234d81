"""GPU benchmark baselines: the card's matrix multiplication rate and the seconds per call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.scale import Scale

_PRODUCTS = 20
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def matrix_tflops(device: str, precision: str, size: int) -> float:
    """Returns the TFLOP/s of multiplying `size` x `size` matrices, an upper bound for any model."""
    left, right = (
        torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2)
    )

    def multiply() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right)

    seconds(device, multiply)
    return _PRODUCTS * 2 * size**3 / seconds(device, multiply) / 1e12


def seconds(device: str, work: Callable[[], Any]) -> float:
    """Returns the wall-clock seconds until everything that `work` starts on the device is done."""
    _finish(device)
    began_s = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - began_s


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def card_name(device: str) -> str:
    return device if device == "cpu" else torch.cuda.get_device_name()


def in_turns(scale: Scale, contenders: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Returns the seconds that each takes in every round, with a first round to warm up."""
    taken_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + scale.rounds):
        for name, work in contenders.items():
            taken_s[name].append(seconds(scale.device, work))
    return taken_s


def medians(taken_s: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median of each contender's rounds, without the first one."""
    return {name: statistics.median(times_s[1:]) for name, times_s in taken_s.items()}
