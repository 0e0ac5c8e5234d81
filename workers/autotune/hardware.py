"""The machine properties that affect the choice of backend. Uses no model library."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.process.cores import usable_cores
from workers.models.processors import BF16_FLAGS, detect_cpu, read_facts

KEPT_OPEN_MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of the weights, in bytes, for a process to keep several candidates loaded."""
LIBRARIES = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "numpy")


@dataclass(frozen=True)
class Machine:
    """The machine's CPU and GPUs.

    `flags`: CPU flags that affect speed. `libraries`: versions of LIBRARIES.
    """

    cpu: str
    flags: tuple[str, ...]
    cores: int
    gpus: tuple[str, ...]
    libraries: tuple[tuple[str, str], ...]

    @property
    def has_bf16(self) -> bool:
        """True if the CPU supports bfloat16. Emulation is slower than fp32."""
        return bool(BF16_FLAGS & set(self.flags))

    def computes_on_gpu(self, device: str) -> bool:
        """Returns whether a model with this `device` (as WorkerSettings.device) runs on a GPU."""
        return device.startswith("cuda") or (device == "auto" and bool(self.gpus))

    def facts(self) -> dict[str, object]:
        return asdict(self)


def detect_machine() -> Machine:
    cpu, flags = detect_cpu()
    return Machine(
        cpu, flags, usable_cores(), _gpus(), tuple((name, _version(name)) for name in LIBRARIES)
    )


def _gpus() -> tuple[str, ...]:
    """Returns the name of each NVIDIA GPU, from the driver's files."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    models = [
        read_facts(path).get("Model", "")
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
    ]
    return tuple(models) if len(models) == len(devices) else ("NVIDIA GPU",) * len(devices)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
