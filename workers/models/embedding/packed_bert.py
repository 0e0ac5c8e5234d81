"""BERT and related models on a GPU: packed 16-bit texts, without padding or waiting.

A batch's texts form one row of tokens. Attention receives the positions where texts start, and
processes all texts in one call per layer (`torch.nn.attention.varlen`, Flash Attention). Padded
attention would also process the filler. On GPUs with compute capability 9 and 10, it would also
build a plan for each new combination of text count and length, and that takes tens of milliseconds
(decision 4).

Weights, states, and products are 16-bit. Products and layer norms accumulate in fp32, and pooling
and normalization are computed in fp32.

A GPU computes while the host prepares the next call, so nothing here waits for the GPU's results.
The host knows the lengths, and the shapes follow from them. One buffer goes to the device, and one
array comes back. Because small batches are limited by the number of operators, each layer has only
eleven:

- Query, key, and value are a single product.
- A residual connection is the initial value of a product (`addmm_`). The product's bias is already
in the residual: the preceding layer norm adds the bias to its own, and the product that reads the
same rows subtracts it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, layer_norm, normalize

from workers.models.device import Product
from workers.models.embedding.bert_weights import BertWeights

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor
]
"""The interface of `varlen_attn`: query, key, and value [tokens, heads, width]; then, once for
queries and once for keys, the boundaries of the texts in them (int32 [texts + 1]) and the token
count of the longest text.
"""

MAX_HEAD_WIDTH, HEAD_WIDTH_STEP = 256, 8
"""Head widths that Flash Attention supports."""
MIN_CAPABILITY = (8, 0)
"""Minimum compute capability for Flash Attention in torch: A100, L4, H100."""


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
    longest: int,
    longest_key: int,
) -> torch.Tensor:
    """Computes `varlen_attn` in 16-bit precision on a GPU."""
    mixed = varlen_attn(query, key, value, borders, key_borders, longest, longest_key)
    assert isinstance(mixed, torch.Tensor), "nothing else was requested; this is a bug"
    return mixed


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


class _HostCopy(NamedTuple):
    vectors: torch.Tensor
    copied: torch.cuda.Event | None
    """None on a CPU, where the copy is already complete."""

    def wait(self) -> np.ndarray:
        if self.copied is not None:
            self.copied.synchronize()
        return self.vectors.numpy()


class PackedBert:
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
        self._device, self._dtype, self._attend = device, dtype, attend
        self._pooling, self._normalize = tuple(pooling), normalize
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
        self._launching = threading.Lock()
        self.dimensions = len(self._pooling) * words.shape[1]

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """Encodes the token IDs of joined texts to float32 [items, dimensions].

        See Encoder in model.py.

        May be called on several threads. The device computes one call while the other threads wait.
        """
        packed = pack_texts(ids, types, lengths)
        # A batch's copy to the device is queued behind the previous batch's copies and kernels.
        with self._launching, torch.inference_mode(), self._current_device():
            buffer = torch.empty(len(packed), dtype=torch.int32, pin_memory=self._is_gpu)
            buffer.numpy()[:] = packed
            vectors = self.vectors(
                buffer.to(self._device, non_blocking=True),
                int(lengths.sum()),
                int(lengths.max()),
                has_types=types is not None,
            )
            result = self._start_copy(vectors)
        # The next call may launch its kernels while this one waits.
        return result.wait()

    def _start_copy(self, vectors: torch.Tensor) -> _HostCopy:
        on_host = torch.empty(vectors.shape, dtype=torch.float32, pin_memory=self._is_gpu)
        on_host.copy_(vectors, non_blocking=True)
        if not self._is_gpu:
            return _HostCopy(on_host, None)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        return _HostCopy(on_host, copied)

    def vectors(
        self, packed: torch.Tensor, tokens: int, longest: int, *, has_types: bool = False
    ) -> torch.Tensor:
        """Returns the vectors of packed texts, float32 [texts, dimensions] on the device.

        Args:
            packed: array from `pack_texts`, on the device.
            tokens: number of tokens in `packed`.
            longest: number of tokens in the longest text.
        """
        parts = [tokens] * (3 if has_types else 2)
        *inputs, borders = torch.split(packed, [*parts, len(packed) - sum(parts)])
        rows = embedding(inputs[0], self._words).add_(embedding(inputs[1], self._positions))
        if has_types:
            rows.add_(embedding(inputs[2], self._types))
        rows = self._norm(rows)
        for layer in self._layers:
            heads = torch.addmm(layer.heads_bias, rows, layer.heads)
            query, key, value = heads.view(tokens, 3, self._heads, -1).unbind(1)
            mixed = self._attend(query, key, value, borders, borders, longest, longest)
            rows = layer.mix_norm(rows.addmm_(mixed.view(tokens, -1), layer.mix))
            wide = self._activate(torch.addmm(layer.widen_bias, rows, layer.widen))
            rows = layer.norm(rows.addmm_(wide, layer.narrow))
        return self._pool(rows, borders)

    def _pool(self, rows: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
        """Pools states [tokens, width] to float32 [texts, dimensions]."""
        wide = rows.float()
        pooled = [_pool(mode, wide, borders) for mode in self._pooling]
        vectors = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return normalize(vectors, p=2.0, dim=1) if self._normalize else vectors

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

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _current_device(self) -> AbstractContextManager[object]:
        """Makes the device current for this thread, so that events record its stream."""
        return torch.cuda.device(self._device) if self._is_gpu else nullcontext()


def pack_texts(ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    """Packs joined texts into one array: int32 [2 or 3 x tokens + items + 1].

    It contains the IDs of all tokens, their positions in their texts, their types if there are any,
    and the start of each text, followed by the end of the last one.

    Args:
        ids: token IDs of all items, one after another [tokens].
        types: token type IDs in the same form. None means all 0.
        lengths: number of tokens in each item [items], at least 1.
    """
    borders = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=borders[1:])
    positions = np.arange(len(ids), dtype=np.int32) - np.repeat(borders[:-1], lengths)
    inputs = [ids, positions, *([] if types is None else [types]), borders]
    return np.concatenate(inputs, dtype=np.int32, casting="unsafe")


def can_pack(weights: BertWeights, device: torch.device) -> bool:
    """Returns whether `varlen_attn` can compute these heads on this device."""
    heads = weights.tensors["encoder.layer.0.attention.self.query.weight"].shape[0]
    width = heads // weights.heads
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        and width % HEAD_WIDTH_STEP == 0
        and width <= MAX_HEAD_WIDTH
    )


def _bias(weights: BertWeights, name: str) -> torch.Tensor:
    return weights.dense(name)[1]


def _pool(mode: str, rows: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Pools states, float32 [tokens, width], to [texts, width]."""
    if mode == "cls":
        return rows.index_select(0, borders.narrow(0, 0, len(borders) - 1))
    lengths = borders.diff()
    reduce = mode if mode in ("mean", "max") else "sum"
    # With `unsafe`, it skips checking the lengths, because that check would wait for the device.
    pooled = torch.segment_reduce(rows, reduce, lengths=lengths, axis=0, unsafe=True)
    return pooled / lengths.unsqueeze(1).sqrt() if reduce == "sum" else pooled
