"""A model process whose embedding model runs on a simulated asynchronous device.

    python -m bench.async_device CALL_S BATCHES [options of workers.runtime.server]

Like a GPU, the device accepts calls immediately, computes them one after another, and doesn't need
the interpreter. Unlike on a GPU, each call takes CALL_S seconds, and the vectors contain all ones.
BATCHES: `one` or `two` batches at a time. Only benchmarks and tests start it; workers start
workers.runtime.server.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.models.catalog import Model
from workers.models.embedding.model import EmbeddingModel
from workers.runtime import server


class AsyncDevice:
    """Runs calls in the order they are queued. Each takes `call_s` seconds."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def queue(self) -> float:
        """Queues a call. Returns the time when the call will be done, in monotonic seconds."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + self._call_s
            return self._free_at_s


class AsyncEncoder:
    """An Encoder on an AsyncDevice."""

    device_name, pads = "asynchronous", False

    def __init__(self, device: AsyncDevice, dimensions: int, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._device = device
        self._dimensions = dimensions

    def open(self) -> int:
        return self._dimensions

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        time.sleep(max(0.0, self._device.queue() - time.monotonic()))
        return np.ones((len(lengths), self._dimensions), np.float32)


def command(call_s: float, *, overlaps: bool) -> tuple[str, ...]:
    """Returns the command that starts a model process for ModelPool."""
    return sys.executable, "-m", __name__, str(call_s), "two" if overlaps else "one"


def main() -> int:
    call_s, overlaps = float(sys.argv.pop(1)), sys.argv.pop(1) == "two"

    def make(entry: Model, folder: Path, device: str, **options: Any) -> EmbeddingModel:
        dimensions = entry.dimensions or 1
        return EmbeddingModel(
            entry, AsyncEncoder(AsyncDevice(call_s), dimensions, overlaps=overlaps)
        )

    vars(server)["model_for"] = make
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
