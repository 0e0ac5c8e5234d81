"""Where a model computes: picks and sets up the torch device of a model process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shared.errors import ConfigurationError
from workers.models.base import OutOfMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """The settings of a device: `wanted` as in WorkerSettings.device, CPU threads, and the share of a GPU's memory."""

    wanted: str
    threads: int
    memory_fraction: float

    def open(self) -> tuple[torch.device, str]:
        """The device, ready to use, and its name.

        Raises:
            ConfigurationError: there is no such device on this machine.
        """
        kind = self.wanted if self.wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(kind)
        except RuntimeError as error:
            raise ConfigurationError(f"device {kind!r} is unknown", field="device") from error
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
            return device, "cpu"
        if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(f"device {kind!r}: this machine has no such GPU", field="device")
        torch.cuda.set_per_process_memory_fraction(self.memory_fraction, device)
        return device, torch.cuda.get_device_name(device)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns torch's ways to say that memory is out into OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        # The CPU allocator has no class of its own for this.
        if "can't allocate memory" in str(error):
            raise OutOfMemory(str(error)) from error
        raise
