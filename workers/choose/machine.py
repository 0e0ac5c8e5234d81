"""What this machine is, as far as a choice of backend depends on it; found without any model library."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.cores import usable_cores

KEPT_OPEN_MAX_BYTES = 256 * 1024 * 1024
"""Weights of a model of which several candidates may be open at once, in each of several processes."""
LIBRARIES = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "numpy")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of /proc/cpuinfo, on x86 and on ARM."""
_BEYOND_AVX2 = ("avx512", "amx", "avx_vnni")
"""How the flags begin that oneDNN leaves alone where ONEDNN_MAX_CPU_ISA keeps it to AVX2 or less."""
_TELLING_FLAGS = _BF16_FLAGS | {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


@dataclass(frozen=True)
class Machine:
    """CPU and GPUs; `flags` are those of the CPU that bear on speed, `libraries` the versions of LIBRARIES."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    gpus: tuple[str, ...]
    libraries: tuple[tuple[str, str], ...]

    @property
    def has_bf16(self) -> bool:
        """Whether the CPU multiplies bfloat16 itself; emulated it is slower than fp32."""
        return bool(_BF16_FLAGS & set(self.flags))

    def computes_on_gpu(self, device: str) -> bool:
        """Whether a model with this `device` (as WorkerSettings.device) runs on a GPU."""
        return device.startswith("cuda") or (device == "auto" and bool(self.gpus))

    def facts(self) -> dict[str, object]:
        """All of it as plain values."""
        return asdict(self)


def this_machine() -> Machine:
    """Where we run."""
    cpu, flags = _cpu()
    return Machine(cpu, flags, usable_cores(), _gpus(), tuple((name, _version(name)) for name in LIBRARIES))


def _cpu() -> tuple[str, tuple[str, ...]]:
    facts = _read_facts(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX", "AVX2"):
        flags = [flag for flag in flags if not flag.startswith(_BEYOND_AVX2)]
    name = facts.get("model name") or " ".join(facts.get(key, "") for key in ("CPU implementer", "CPU part"))
    return name, tuple(sorted(_TELLING_FLAGS & set(flags)))


def _gpus() -> tuple[str, ...]:
    """The name of each NVIDIA GPU, by the files its driver keeps."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    models = [_read_facts(path).get("Model", "") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return tuple(models) if len(models) == len(devices) else ("NVIDIA GPU",) * len(devices)


def _read_facts(path: Path) -> dict[str, str]:
    """The first value of each `key: value` line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
