"""Linear layers in bf16 on a CPU, with weights that oneDNN lays out once.

F.linear does so at each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def computes_bf16() -> bool:
    """Whether torch's oneDNN computes bf16 on this CPU."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linear_layers(model: torch.nn.Module) -> None:
    """Replaces every Linear of `model` by one that computes in bf16, for any input precision."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, _PackedLinear(child))


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A function that computes a Linear, from bf16 [rows, in] to bf16 [rows, out].

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
        self._product = packed_product(linear.weight, linear.bias)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        rows = given.to(torch.bfloat16).reshape(-1, given.shape[-1])
        return self._product(rows).view(*given.shape[:-1], self._out_features)
