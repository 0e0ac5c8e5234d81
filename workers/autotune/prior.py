"""The likely fastest backend for embeddings on this hardware, before any measurement.

This prior orders the candidates, leaves out those that never won, and decides if measurements
disagree. Its sources are in docs/measurements/embeddings.md.
"""

from __future__ import annotations

from workers.autotune.hardware import Machine
from workers.models.backend import Backend

_ON_GPU = ("torch-bf16", "torch-fp16", "onnx-int8", "onnx-fp16", "onnx-fp32", "torch-fp32")
_WITH_BF16 = ("onnx-int8", "torch-bf16", "onnx-fp32", "torch-fp32")
_WITH_VNNI = ("onnx-int8", "onnx-fp32", "torch-fp32", "torch-bf16")
_PLAIN = ("onnx-fp32", "onnx-int8", "torch-fp32", "torch-bf16")
_VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})


def prior_rank(backend: Backend, machine: Machine, *, is_gpu: bool) -> int:
    """The rank of `backend` on this hardware. 0 is the likely fastest."""
    if is_gpu:
        order: tuple[str, ...] = _ON_GPU
    elif machine.has_bf16:
        order = _WITH_BF16
    else:
        order = _WITH_VNNI if _VNNI_FLAGS & set(machine.flags) else _PLAIN
    kind = f"{backend.backend}-{backend.precision}"
    return order.index(kind) if kind in order else len(order)
