"""The name of this CPU, and which instruction sets it has that matter for speed."""

from __future__ import annotations

import os
from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of /proc/cpuinfo, on x86 and on ARM."""
VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""With one of them x86 adds products of 8 bits in 32, instead of 16, where they saturate."""
_BEYOND_AVX2 = ("avx512", "amx", "avx_vnni")
"""How the flags begin that oneDNN leaves alone where ONEDNN_MAX_CPU_ISA keeps it to AVX2 or less."""
TELLING_FLAGS = BF16_FLAGS | VNNI_FLAGS | {"avx2", "avx512f", "amx_int8", "asimddp", "i8mm"}


def this_cpu() -> tuple[str, tuple[str, ...]]:
    """Its name, and those of TELLING_FLAGS that it has."""
    facts = read_facts(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX", "AVX2"):
        flags = [flag for flag in flags if not flag.startswith(_BEYOND_AVX2)]
    name = facts.get("model name") or " ".join(facts.get(key, "") for key in ("CPU implementer", "CPU part"))
    return name, tuple(sorted(TELLING_FLAGS & set(flags)))


def has_vnni() -> bool:
    """Whether it has VNNI."""
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
