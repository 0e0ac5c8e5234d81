"""Linear layers with weights of 4 bits on a CPU, in groups with a scale and an offset each.

One text at a time is written as fast as its weights come out of memory, so a third of the bytes
of bf16 pays there. Many texts at a time share what was read, and are written faster in bf16.

The groups are those of GGUF's Q4_1, whose weights come out as they were, but for scales in bf16. A
layer whose shape has no such groups keeps its weights, and so do embeddings. The output layer gets
8 bits, one scale a row: an error there is an error of the logits.
"""

from __future__ import annotations

import torch

from shared.errors import ConfigurationError

GROUP = 32
_BLOCK_ROWS = 16
"""torch's kernel takes a multiple of these."""
_STEPS = 15
_MIDDLE = 8
"""What torch's kernel takes away from a number of 4 bits before it scales it."""
_LARGEST = 127
_TINY = 1e-9


def round_linear_layers(model: torch.nn.Module) -> None:
    """Replaces Linears of a causal language model of transformers by layers of 4 bits, or 8.

    Raises:
        ConfigurationError: none of its layers can be replaced.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, torch.nn.Linear) or child.out_features % _BLOCK_ROWS:
                continue
            if child is output:
                setattr(parent, name, _Linear8(child))
            elif child.in_features % GROUP == 0:
                setattr(parent, name, _Linear4(child))
                found += 1
    if not found:
        raise ConfigurationError(
            f"precision int4: no layer of {type(model).__name__} has groups of {GROUP} weights",
            field="precision",
        )


class _RoundedLinear(torch.nn.Module):
    """A Linear for any input, whose products take bf16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._out_features = linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        rows = given.reshape(-1, given.shape[-1]).to(torch.bfloat16)
        out = self._product(rows)
        if self._bias is not None:
            out = out + self._bias
        return out.to(given.dtype).view(*given.shape[:-1], self._out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Linear4(_RoundedLinear):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        groups = weight.view(len(weight), -1, GROUP)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = (high - low) / _STEPS
        numbers = ((groups - low) / scale.clamp(min=_TINY)).round().clamp(0, _STEPS)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            numbers.to(torch.int32).view(weight.shape), 1
        )
        # [groups, out, 2]: the scale, and the value of the middle.
        scales = torch.cat([scale, low + _MIDDLE * scale], dim=-1)
        self._scales = scales.transpose(0, 1).contiguous().to(torch.bfloat16)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._packed, GROUP, self._scales
        )
        return out


class _Linear8(_RoundedLinear):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1) / _LARGEST
        self._numbers = (weight / scale.clamp(min=_TINY)[:, None]).round().to(torch.int8)
        self._scales = scale.to(torch.bfloat16)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._numbers, self._scales)
        return out
