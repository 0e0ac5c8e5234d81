"""Selects and sets up the torch device of a model process."""

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
    """The name of a device as in WorkerSettings.device, CPU threads, and a share of GPU memory."""

    requested: str
    threads: int
    memory_fraction: float

    def open(self) -> tuple[torch.device, str]:
        """Sets up the device. Returns it with its name.

        Raises:
            ConfigurationError: this machine does not have the device.
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
            raise ConfigurationError(f"device {kind!r} is unknown", field="device") from error
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
            return device, "cpu"
        if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(
                f"device {kind!r}: this machine has no such GPU", field="device"
            )
        torch.cuda.set_per_process_memory_fraction(self.memory_fraction, device)
        return device, torch.cuda.get_device_name(device)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Translates torch's out-of-memory errors into OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        # The CPU allocator has no error class for this.
        if "can't allocate memory" in str(error):
            raise OutOfMemory(str(error)) from error
        raise
