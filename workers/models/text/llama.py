"""A pass of a Llama on a CPU in few operators.

A small operator takes a microsecond or more whatever it computes, and a token of one text goes
through transformers' own modules in about two thousand. Here one product gives queries, keys and
values, and one gives both halves of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.linalg import vector_norm
from torch.nn.functional import rms_norm
from transformers import LlamaForCausalLM

from workers.models.text.slots import Reading, SlotCache, attend

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS = ("gate_proj", "up_proj")
_JOINT = "joint"


def is_llama(model: torch.nn.Module) -> bool:
    """Whether the model is of the form that LlamaPass computes. Subclasses may differ from it."""
    return type(model) is LlamaForCausalLM


def join_linear_layers(model: Any) -> None:
    """Joins layers that have the same input. Afterwards transformers computes as before."""
    for layer in model.model.layers:
        _join(layer.self_attn, _ATTENTION_PARTS)
        _join(layer.mlp, _MLP_PARTS)


def _join(owner: torch.nn.Module, names: tuple[str, ...]) -> None:
    parts: list[Any] = [owner.get_submodule(name) for name in names]
    weights = torch.cat([part.weight.detach() for part in parts])
    has_bias = parts[0].bias is not None
    outputs, inputs = weights.shape
    joint = torch.nn.Linear(inputs, outputs, bias=has_bias, device="meta")
    joint.weight = torch.nn.Parameter(weights, requires_grad=False)
    if has_bias:
        biases = torch.cat([part.bias.detach() for part in parts])
        joint.bias = torch.nn.Parameter(biases, requires_grad=False)
    setattr(owner, _JOINT, joint)
    start = 0
    for name, part in zip(names, parts, strict=True):
        setattr(owner, name, _Part(owner, slice(start, start + part.out_features)))
        start += part.out_features


class _Part(torch.nn.Module):
    """Some outputs of the joint layer of `owner`, for transformers. It has no weights itself."""

    def __init__(self, owner: torch.nn.Module, outputs: slice) -> None:
        super().__init__()
        # The joint layer may be replaced by a rounded one. A tuple hides the module from torch.
        self._owner = (owner,)
        self._outputs = outputs

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._owner[0].get_submodule(_JOINT)(given)
        return out[..., self._outputs]


class LlamaPass:
    """Computes a model whose layers are joined.

    Args:
        model: as join_linear_layers leaves it, or with its Linears replaced since.
    """

    def __init__(self, model: Any) -> None:
        self._embed = model.model.embed_tokens
        self._positions = model.model.rotary_emb
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm)
        self._output = model.lm_head

    def __call__(
        self, ids: torch.Tensor, reading: Reading, slots: SlotCache, told: int
    ) -> torch.Tensor | None:
        """Adds tokens [rows, tokens] to the texts of a pass.

        Returns the logits after the last `told` tokens of each. None: after none of them.
        """
        hidden = self._embed(ids)
        cos, sin = self._positions(hidden, reading.positions)
        half = cos.shape[-1] // 2
        # Signs go with the sines, so that turning by half a head is all that is left to do.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        turns = cos[:, :, None], sin[:, :, None], half
        for layer in self._layers:
            hidden = layer.add_attention(hidden, turns, slots)
            hidden = layer.add_mlp(hidden)
        if not told:
            return None
        logits: torch.Tensor = self._output(self._norm(hidden[:, -told:]))
        return logits


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._shape = norm.weight.shape
        self._width = norm.weight.numel()
        self._epsilon = norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.numel() > self._width:
            return rms_norm(hidden, self._shape, self._weight, self._epsilon)
        # The root of one token as a number of Python saves five of eight operators.
        length = vector_norm(hidden, dtype=torch.float32).item()
        scale = (length * length / self._width + self._epsilon) ** -0.5
        out: torch.Tensor = (hidden * scale).mul_(self._weight)
        return out


class _Layer:
    def __init__(self, layer: Any) -> None:
        self._attention = layer.self_attn
        self._mlp = layer.mlp
        self._norm_attention = _Norm(layer.input_layernorm)
        self._norm_mlp = _Norm(layer.post_attention_layernorm)
        self._head = self._attention.head_dim
        self._key_heads = self._attention.config.num_key_value_heads
        self._query_heads = self._attention.config.num_attention_heads
        self._turned = self._query_heads + self._key_heads

    def add_attention(
        self,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor, int],
        slots: SlotCache,
    ) -> torch.Tensor:
        """`hidden` [rows, tokens, width] and its attention to the texts so far."""
        rows, tokens, _ = hidden.shape
        cos, sin, half = turns
        attention = self._attention
        joint = attention.joint(self._norm_attention(hidden)).view(rows, tokens, -1, self._head)
        both = joint[:, :, : self._turned]
        both = torch.addcmul(both * cos, both.roll(half, -1), sin).transpose(1, 2)
        keys, values = slots.update(
            both[:, self._query_heads :],
            joint[:, :, self._turned :].transpose(1, 2),
            attention.layer_idx,
        )
        queries = both[:, : self._query_heads]
        mixed, _ = attend(
            attention, queries, keys, values, None, scaling=attention.scaling, slots=slots
        )
        added: torch.Tensor = attention.o_proj(mixed.reshape(rows, tokens, -1))
        return hidden + added

    def add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` and its MLP."""
        mlp = self._mlp
        gate, up = mlp.joint(self._norm_mlp(hidden)).chunk(2, -1)
        added: torch.Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
        return hidden + added
