"""BERT and related models on a GPU, as packed 16-bit texts.

Weights, states, and products are 16-bit. Products and layer norms accumulate in fp32, and pooling
and normalization are computed in fp32.

Because small batches are limited by the number of operators, each layer has only eleven:

- Query, key, and value are a single product.
- A residual connection is the initial value of a product (`addmm_`). The product's bias is already
in the residual: the preceding layer norm adds the bias to its own, and the product that reads the
same rows subtracts it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, layer_norm

from workers.models.device import Product
from workers.models.embedding.bert_weights import BertWeights
from workers.models.embedding.packed_encoder import (
    Attend,
    PackedEncoder,
    attend_packed,
    has_packed_attention,
)

MAX_HEAD_WIDTH, HEAD_WIDTH_STEP = 256, 8
"""Head widths that Flash Attention supports."""


class _Layer(NamedTuple):
    """Product weights are [in, out]."""

    heads: torch.Tensor
    heads_bias: torch.Tensor
    mix: torch.Tensor
    mix_norm: Product
    widen: torch.Tensor
    widen_bias: torch.Tensor
    narrow: torch.Tensor
    norm: Product


class PackedBert(PackedEncoder):
    """Computes the vectors of packed texts.

    Args:
        weights: fp32 weights, which can be dropped afterwards.
        first_position: position of a text's first token.
        pooling: modes whose vectors are concatenated, as in SentenceFolder.
        normalize: True if vectors are scaled to length 1.
        dtype: precision of weights, states, and products.
        attend: computes attention between the tokens of each text.
    """

    def __init__(
        self,
        weights: BertWeights,
        first_position: int,
        pooling: Sequence[str],
        *,
        normalize: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        attend: Attend = attend_packed,
    ) -> None:
        super().__init__(device, pooling, normalize=normalize)
        self._dtype, self._attend = dtype, attend
        self._heads, self._activate = weights.heads, weights.activate
        self._weights = torch.nn.Module()
        """All weights, for eviction to host memory (workers/runtime/resident_models.py)."""
        words, types, positions = (
            weights.tensors[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "token_type", "position")
        )
        self._words, self._types = self._move(words), self._move(types - types[0])
        # Nearly all tokens have type 0, so it is folded into the positions.
        self._positions = self._move(positions[first_position:] + types[0])
        names = [f"encoder.layer.{number}" for number in range(weights.layers)]
        shifts = [_bias(weights, f"{name}.attention.output.dense") for name in names]
        nothing = words.new_zeros(words.shape[1])
        self._norm = self._move_norm(weights, "embeddings.LayerNorm", [*shifts, nothing][0])
        self._layers = [
            self._layer(weights, name, shift, after)
            for name, shift, after in zip(names, shifts, [*shifts[1:], nothing], strict=True)
        ]
        self.dimensions = len(self._pooling) * words.shape[1]

    def states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        borders: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        rows = embedding(ids, self._words).add_(embedding(positions, self._positions))
        if types is not None:
            rows.add_(embedding(types, self._types))
        rows = self._norm(rows)
        for layer in self._layers:
            heads = torch.addmm(layer.heads_bias, rows, layer.heads)
            query, key, value = heads.view(len(rows), 3, self._heads, -1).unbind(1)
            mixed = self._attend(query, key, value, borders, longest)
            rows = layer.mix_norm(rows.addmm_(mixed.view(len(rows), -1), layer.mix))
            wide = self._activate(torch.addmm(layer.widen_bias, rows, layer.widen))
            rows = layer.norm(rows.addmm_(wide, layer.narrow))
        return rows

    def _layer(
        self, weights: BertWeights, name: str, shift: torch.Tensor, after: torch.Tensor
    ) -> _Layer:
        """Returns one layer's weights, on the device.

        Its input rows include `shift`, and its output rows include `after`.
        """
        own = f"{name}.attention.self"
        heads, heads_bias = weights.dense(f"{own}.query", f"{own}.key", f"{own}.value")
        mix, _ = weights.dense(f"{name}.attention.output.dense")
        widen, widen_bias = weights.dense(f"{name}.intermediate.dense")
        narrow, narrow_bias = weights.dense(f"{name}.output.dense")
        return _Layer(
            heads=self._move(heads.t()),
            heads_bias=self._move(heads_bias - heads @ shift),
            mix=self._move(mix.t()),
            mix_norm=self._move_norm(weights, f"{name}.attention.output.LayerNorm", narrow_bias),
            widen=self._move(widen.t()),
            widen_bias=self._move(widen_bias - widen @ narrow_bias),
            narrow=self._move(narrow.t()),
            norm=self._move_norm(weights, f"{name}.output.LayerNorm", after),
        )

    def _move_norm(self, weights: BertWeights, name: str, shift: torch.Tensor) -> Product:
        weight = self._move(weights.tensors[f"{name}.weight"])
        bias = self._move(weights.tensors[f"{name}.bias"] + shift)
        shape, epsilon = weight.shape, weights.epsilon
        return lambda rows: layer_norm(rows, shape, weight, bias, epsilon)

    def _move(self, weight: torch.Tensor) -> torch.Tensor:
        moved = weight.to(self._device, self._dtype)
        self._weights.register_buffer(str(len(self._weights._buffers)), moved)
        return moved


def can_pack(weights: BertWeights, device: torch.device) -> bool:
    """Returns whether `varlen_attn` can compute these heads on this device."""
    heads = weights.tensors["encoder.layer.0.attention.self.query.weight"].shape[0]
    width = heads // weights.heads
    return has_packed_attention(device) and width % HEAD_WIDTH_STEP == 0 and width <= MAX_HEAD_WIDTH


def _bias(weights: BertWeights, name: str) -> torch.Tensor:
    return weights.dense(name)[1]
