"""Encoders on a GPU that compute packed 16-bit texts, without padding or waiting.

A batch's texts form one row of tokens. Attention receives the positions where texts start, and
processes all texts in one call per layer (`torch.nn.attention.varlen`, Flash Attention). Padded
attention would also process the filler. On GPUs with compute capability 9 and 10, it would also
build a plan for each new combination of text count and length, and that takes tens of milliseconds
(decision 4).

A GPU computes while the host prepares the next call, so nothing here waits for the GPU's results.
The host knows the lengths, and the shapes follow from them. One buffer goes to the device, and one
array comes back.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import normalize

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability for Flash Attention in torch: A100, L4, H100."""
UNLIMITED = (-1, -1)


class Attend(Protocol):
    """Computes attention within each of the packed texts, like `varlen_attn`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        borders: torch.Tensor,
        longest: int,
        *,
        scale: float | None = None,
        window: tuple[int, int] = UNLIMITED,
    ) -> torch.Tensor:
        """Returns the mixed values, [tokens, heads, width].

        Args:
            query: [tokens, heads, width], as are `key` and `value`.
            borders: where each text starts, and where the last one ends, int32 [texts + 1].
            longest: number of tokens in the longest text.
            scale: factor for the scores. None means 1 / sqrt(width).
            window: how many tokens before and after a token it attends to. -1 means all.
        """
        ...


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] = UNLIMITED,
) -> torch.Tensor:
    """Computes `varlen_attn` in 16-bit precision on a GPU."""
    mixed = varlen_attn(
        query, key, value, borders, borders, longest, longest, scale=scale, window_size=window
    )
    assert isinstance(mixed, torch.Tensor), "nothing else was requested; this is a bug"
    return mixed


class _HostCopy(NamedTuple):
    vectors: torch.Tensor
    copied: torch.cuda.Event | None
    """None on a CPU, where the copy is already complete."""

    def wait(self) -> np.ndarray:
        if self.copied is not None:
            self.copied.synchronize()
        return self.vectors.numpy()


class PackedEncoder(ABC):
    """Computes the vectors of packed texts.

    Args:
        pooling: modes whose vectors are concatenated, as in SentenceFolder.
        normalize: True if vectors are scaled to length 1.
    """

    def __init__(self, device: torch.device, pooling: Sequence[str], *, normalize: bool) -> None:
        self._device = device
        self._pooling, self._normalize = tuple(pooling), normalize
        self._launching = threading.Lock()

    @abstractmethod
    def states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        borders: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Returns the last hidden states, [tokens, width].

        Args:
            ids: token IDs, int32 [tokens], on the device.
            positions: positions of the tokens in their texts, in the same form.
            types: token type IDs in the same form. None means all 0.
            borders: where each text starts, and where the last one ends, int32 [texts + 1].
            longest: number of tokens in the longest text.
        """

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
        types = inputs[2] if has_types else None
        rows = self.states(inputs[0], inputs[1], types, borders, longest)
        return self._pool(rows, borders)

    def _start_copy(self, vectors: torch.Tensor) -> _HostCopy:
        on_host = torch.empty(vectors.shape, dtype=torch.float32, pin_memory=self._is_gpu)
        on_host.copy_(vectors, non_blocking=True)
        if not self._is_gpu:
            return _HostCopy(on_host, None)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        return _HostCopy(on_host, copied)

    def _pool(self, rows: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
        """Pools states [tokens, width] to float32 [texts, dimensions]."""
        wide = rows.float()
        pooled = [_pool(mode, wide, borders) for mode in self._pooling]
        vectors = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return normalize(vectors, p=2.0, dim=1) if self._normalize else vectors

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


def has_packed_attention(device: torch.device) -> bool:
    """Returns whether a device is a GPU that `varlen_attn` supports."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def _pool(mode: str, rows: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Pools states, float32 [tokens, width], to [texts, width]."""
    if mode == "cls":
        return rows.index_select(0, borders.narrow(0, 0, len(borders) - 1))
    lengths = borders.diff()
    reduce = mode if mode in ("mean", "max") else "sum"
    # With `unsafe`, it skips checking the lengths, because that check would wait for the device.
    pooled = torch.segment_reduce(rows, reduce, lengths=lengths, axis=0, unsafe=True)
    return pooled / lengths.unsqueeze(1).sqrt() if reduce == "sum" else pooled
