"""Names of the CPU and GPU, and instruction sets that affect speed. Uses no model library."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from shared.models.entry import GpuTypeName

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo, on x86 and ARM."""
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""With either flag, x86 accumulates 8-bit products in 32 bits rather than 16, which would saturate.
"""
_BEYOND_AVX2 = ("avx512", "amx", "avx_vnni")
"""Prefixes of the flags that oneDNN ignores if ONEDNN_MAX_CPU_ISA limits it to AVX2 or below."""
SPEED_FLAGS = BF16_FLAGS | VNNI_FLAGS | {"avx2", "avx512f", "amx_int8", "asimddp", "i8mm"}

_NAMES: tuple[tuple[str, GpuTypeName], ...] = (
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"\bA100\b.*\b80GB\b", "a100-80gb"),
    (r"\bA100\b", "a100"),
    (r"\bH100\b", "h100"),
    (r"\bRTX PRO 6000\b", "rtx-pro-6000"),
)
"""Names as reported by `torch.cuda.get_device_name`, such as `NVIDIA A100-SXM4-40GB`."""


class Cpu(NamedTuple):
    """A CPU's model name and speed-related instruction sets."""

    name: str
    flags: tuple[str, ...]
    """The SPEED_FLAGS that the CPU has, sorted."""


def detect_cpu() -> Cpu:
    """Returns this machine's CPU, without the flags that ONEDNN_MAX_CPU_ISA rules out."""
    facts = read_facts(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX", "AVX2"):
        flags = [flag for flag in flags if not flag.startswith(_BEYOND_AVX2)]
    name = facts.get("model name") or " ".join(
        facts.get(key, "") for key in ("CPU implementer", "CPU part")
    )
    return Cpu(name, tuple(sorted(SPEED_FLAGS & set(flags))))


def has_vnni() -> bool:
    return bool(VNNI_FLAGS & set(detect_cpu().flags))


def read_facts(path: Path) -> dict[str, str]:
    """Returns the first value of each `key: value` line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def gpu_type_of(device: str) -> GpuTypeName | None:
    """Returns the GPU type in infra/kubernetes/gpus.yaml for a name reported by the driver.

    The device decides the type, not the catalog, because a larger type may replace one that is out
    of stock. Returns None for a CPU, and for types without a price.
    """
    return next((type_ for name, type_ in _NAMES if re.search(name, device)), None)
