"""Sets up a model process's torch device, and CPU computation: threads and bf16.

A model on a CPU runs with as many threads as there are free cores. A computation's threads spin
while they wait for one another, so a thread without a core delays the others, and their spinning
delays whichever process has that core. For example, two workers with two threads each on the same
two cores generated a combined 114 tokens/s, compared to 364 with one thread each (decision 24).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.errors import ConfigurationError
from workers.models.base import GpuLost, OutOfMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WINDOW_S = 0.3
"""Length of a computation window that is evaluated as a whole."""
_FREE = 0.75
"""Minimum fraction of the time that a thread must have a core to itself. A lower value means there
are too many threads.
"""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 4.0, 64.0
"""Pause before trying more threads. It doubles each time the new thread count turns out to be too
high again.
"""


@dataclass(frozen=True)
class Device:
    """A device's name as in WorkerSettings.device, its CPU threads, and its share of GPU memory."""

    requested: str
    threads: int
    memory_fraction: float

    def open(self) -> tuple[torch.device, str]:
        """Sets up the device. Returns the device and its name.

        Raises:
            ConfigurationError: this machine doesn't have the device.
        """
        kind = (
            self.requested
            if self.requested != "auto"
            else "cuda"
            if torch.cuda.is_available()
            else "cpu"
        )
        try:
            device = torch.device(kind)
        except RuntimeError as error:
            raise ConfigurationError(f"unknown device {kind!r}", field="device") from error
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
            return device, "cpu"
        if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(
                f"device {kind!r}: this machine has no such GPU", field="device"
            )
        # torch requires the device number whenever a GPU setting is changed.
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_per_process_memory_fraction(self.memory_fraction, device)
        return device, torch.cuda.get_device_name(device)


@contextmanager
def attention_without_plans(device: torch.device) -> Iterator[None]:
    """Disables cuDNN's attention on a GPU, for calls whose shapes keep changing.

    torch prefers it on GPUs with compute capability 9 and 10. cuDNN builds a plan for each new
    combination of text count and length, which made steps take ten times as long in
    modelscope/FunASR#3704. Setting TORCH_CUDNN_SDPA_DEPRIORITIZED=1 in the environment would also
    affect this process's image models, whose shapes rarely change.
    """
    if device.type != "cuda":
        yield
        return
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        yield


@contextmanager
def memory_errors() -> Iterator[None]:
    """Translates torch's out-of-memory errors into OutOfMemory, and a lost GPU into GpuLost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemory(str(error)) from error
    except torch.AcceleratorError as error:
        # After an error such as an ECC error, an illegal address, or a GPU that fell off the bus,
        # this process's context can't compute anything.
        raise GpuLost(str(error)) from error
    except RuntimeError as error:
        # The CPU allocator has no dedicated error class for this.
        if "can't allocate memory" in str(error):
            raise OutOfMemory(str(error)) from error
        raise


def idle_s() -> float:
    """Returns the total idle seconds of all cores on this machine (man 5 proc_stat).

    If the system doesn't report idle time, returns the total time of all cores, so that more
    threads are tried after each pause.
    """
    try:
        ticks = int(Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=5)[4])
    except (OSError, IndexError, ValueError):
        return time.monotonic() * (os.cpu_count() or 1)
    return ticks / os.sysconf("SC_CLK_TCK")


class CpuThreads:
    """Adapts the thread count to the CPU: starts with one, and adds more if cores are idle.

    If threads get less CPU time than they would with a core each, there are too many of them. A
    computation like this may take seconds, so more threads are not tried until cores have been
    idle. The maximum is torch's thread count, because a forked process sets its own after the fork.

    Args:
        cpu_s: CPU time that this process has used.
        idle_s: total idle time of the machine's cores.
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
        """The time, and the cores' total idle time, at the start of this window."""
        self._pause_s = _FIRST_PAUSE_S
        self._more_at_s = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Sets torch's thread count for one computation, and observes the result."""
        max_threads = torch.get_num_threads()
        if max_threads == 1:
            yield
            return
        began_s, cpu_s = self._now_s(), self._cpu_s()
        if self._watched is None:
            self._watched = began_s, self._idle_s()
        count = min(max_threads, self._count)
        torch.set_num_threads(count)
        try:
            yield
        finally:  # the number applies to the whole process, including its other models
            torch.set_num_threads(max_threads)
        self._wall_s += self._now_s() - began_s
        self._used_s += self._cpu_s() - cpu_s
        if self._wall_s >= _WINDOW_S:
            self._judge(count, max_threads)

    def _judge(self, count: int, max_threads: int) -> None:
        assert self._watched is not None, "the window has no start; this is a bug"
        now_s, idle_s = self._now_s(), self._idle_s()
        cores = self._used_s / self._wall_s
        idle = (idle_s - self._watched[1]) / max(now_s - self._watched[0], self._wall_s)
        self._wall_s = self._used_s = 0.0
        self._watched = None
        if cores < _FREE * count and count > 1:
            self._count = max(1, int(cores + 1 - _FREE))
            self._more_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        elif count == max_threads:
            self._pause_s = _FIRST_PAUSE_S
        elif now_s >= self._more_at_s:
            self._count = min(max_threads, count + int(idle + 1 - _FREE))


Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def computes_bf16() -> bool:
    """Returns whether torch's oneDNN computes bf16 on this CPU."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linear_layers(model: torch.nn.Module) -> None:
    """Replaces every Linear in `model` with one that computes in bf16, for any input precision."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, _PackedLinear(child))


def pack_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Returns a function that computes a Linear, from bf16 [rows, in] to bf16 [rows, out].

    It uses the operators that torch.compile uses for a frozen Linear.
    """
    narrow_bias = None if bias is None else bias.detach().to(torch.bfloat16)
    # None: any number of rows.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(torch.bfloat16), None)
    compute = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compute(rows, packed, narrow_bias, "none", [], "")
        return out

    return product


class _PackedLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._out_features = linear.out_features
        self._product = pack_product(linear.weight, linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.to(torch.bfloat16).reshape(-1, inputs.shape[-1])
        return self._product(rows).view(*inputs.shape[:-1], self._out_features)
