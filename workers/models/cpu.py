"""The name of this CPU, and its instruction sets that affect speed."""

from __future__ import annotations

import os
from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of /proc/cpuinfo, on x86 and on ARM."""
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""With one of them, x86 adds 8-bit products in 32 bits instead of 16, where they saturate."""
_BEYOND_AVX2 = ("avx512", "amx", "avx_vnni")
"""Prefixes of the flags that oneDNN ignores if ONEDNN_MAX_CPU_ISA limits it to AVX2 or less."""
SPEED_FLAGS = BF16_FLAGS | VNNI_FLAGS | {"avx2", "avx512f", "amx_int8", "asimddp", "i8mm"}


def this_cpu() -> tuple[str, tuple[str, ...]]:
    """The name of the CPU, and its flags among SPEED_FLAGS."""
    facts = read_facts(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX", "AVX2"):
        flags = [flag for flag in flags if not flag.startswith(_BEYOND_AVX2)]
    name = facts.get("model name") or " ".join(
        facts.get(key, "") for key in ("CPU implementer", "CPU part")
    )
    return name, tuple(sorted(SPEED_FLAGS & set(flags)))


def has_vnni() -> bool:
    """Whether this CPU has VNNI."""
    return bool(VNNI_FLAGS & set(this_cpu()[1]))


def read_facts(path: Path) -> dict[str, str]:
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
