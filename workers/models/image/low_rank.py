"""Low-rank layers (LoRA) alongside a module's layers, with one adapter per row of a batch.

For a layer W, a row's output is W x + s B (A x), where A and B are the down and up projections in
the row's adapter and s is the row's scale (https://arxiv.org/abs/2106.09685). The rows of all
adapters are computed in the same few matrix products, as in S-LoRA
(https://arxiv.org/abs/2311.03285), so a batch with many adapters costs little more than one with a
single adapter.

A forward hook on the layer adds the result. The layer itself is not replaced and may be quantized,
and for rows without an adapter, it returns bit-for-bit the same results as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import conv2d, pad


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """One layer's two projections. The second includes the adapter's own scaling.

    `down`: [rank, in], or [rank, in, height, width] for a convolution. `up`: [out, rank].
    """

    down: torch.Tensor
    up: torch.Tensor


Layers = Mapping[str, LowRankPair]
"""A module's low-rank layers, by layer name."""
Row = tuple[Layers, float] | None
"""The low-rank layers and the scale for one row in the batch. None if the row has no adapter."""


class LowRankModule:
    """A module whose layers may have low-rank layers alongside them.

    Args:
        module: any module. Its layers are the instances of `torch.nn.Linear` and `torch.nn.Conv2d`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
        }
        self._hooked_names: set[str] = set()
        self._batch: _Batch | None = None

    def prepare(self, names: Sequence[str]) -> None:
        """Prepares the named layers for adding low-rank layers. Takes negligible time."""
        for name in set(names) - self._hooked_names:
            self._hooked_names.add(name)
            # It must be the first hook, so that other hooks see the sum.
            self.layers[name].register_forward_hook(self._hook(name), prepend=True)

    @contextmanager
    def apply(self, rows: Sequence[Row]) -> Iterator[None]:
        """Within this context, the module computes these rows.

        A single row applies to the whole batch.
        """
        before, self._batch = self._batch, _Batch(rows) if any(rows) else None
        try:
            yield
        finally:
            self._batch = before

    def _hook(self, name: str) -> Any:
        def add(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            return None if self._batch is None else self._batch.add(name, layer, inputs[0], output)

        return add


@dataclass(slots=True)
class _Batch:
    """The rows of a batch."""

    rows: Sequence[Row]
    _scales: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Scales of selected rows, [rows]."""

    def add(
        self, name: str, layer: Any, inputs: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Returns a layer's output plus the contribution of the rows' adapters, [rows, …]."""
        rows = self.rows if len(self.rows) > 1 else [*self.rows] * len(inputs)
        assert len(rows) == len(inputs), (
            "a module received a batch of a different size; this is a bug"
        )
        slots = tuple(slot for slot, row in enumerate(rows) if row is not None and row[0].get(name))
        if not slots:
            return output
        ours = [row[0][name] for slot in slots if (row := rows[slot]) is not None]
        scales = self._scales_of(slots, rows, output)
        chosen = inputs
        if is_part := len(slots) < len(rows):
            where = torch.tensor(slots, device=inputs.device)
            chosen = inputs.index_select(0, where)
        unchanged = output.index_select(0, where) if is_part else output
        added = _convolve if isinstance(layer, torch.nn.Conv2d) else _project
        changed = added(layer, ours, chosen, scales, unchanged)
        return output.index_copy(0, where, changed) if is_part else changed

    def _scales_of(
        self, slots: tuple[int, ...], rows: Sequence[Row], like: torch.Tensor
    ) -> torch.Tensor:
        if (scales := self._scales.get(slots)) is None:
            values = [row[1] for slot in slots if (row := rows[slot]) is not None]
            scales = torch.tensor(values, dtype=like.dtype, device=like.device)
            self._scales[slots] = scales
        return scales


def _project(
    layer: Any,
    pairs: Sequence[LowRankPair],
    inputs: torch.Tensor,
    scales: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Returns a linear layer's output W x + s B (A x), [rows, …, out], from W x and x."""
    rank = max(len(pair.down) for pair in pairs)
    down = torch.stack([_with_rank(rank, pair.down, dim=0) for pair in pairs])
    up = torch.stack([_with_rank(rank, pair.up, dim=1) for pair in pairs])
    rows = len(pairs)
    low = torch.bmm(inputs.reshape(rows, -1, inputs.shape[-1]), down.transpose(1, 2))
    low *= scales.view(-1, 1, 1)
    flat = output.reshape(rows, -1, output.shape[-1])
    return torch.baddbmm(flat, low, up.transpose(1, 2)).view(output.shape)


def _with_rank(rank: int, projection: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Pads a projection with zeros up to a rank, which is its size along `dim`."""
    missing = rank - projection.shape[dim]
    return pad(projection, (0, missing) if dim else (0, 0, 0, missing)) if missing else projection


def _convolve(
    layer: Any,
    pairs: Sequence[LowRankPair],
    inputs: torch.Tensor,
    scales: torch.Tensor,
    output: torch.Tensor,
) -> torch.Tensor:
    """Returns a convolution's output W x + s B (A x), [rows, out, height, width], from W x and x.

    Computed one adapter at a time, because few adapters have convolutions and their kernels can't
    be stacked.
    """
    adapted = output.clone()
    for pair in dict.fromkeys(pairs):
        rows = [row for row, other in enumerate(pairs) if other is pair]
        rows_of_pair = torch.tensor(rows, device=inputs.device)
        inputs_of_pair = inputs.index_select(0, rows_of_pair)
        low = conv2d(inputs_of_pair, pair.down, None, layer.stride, layer.padding, layer.dilation)
        low *= scales[rows_of_pair].view(-1, 1, 1, 1)
        adapted.index_add_(0, rows_of_pair, conv2d(low, pair.up[:, :, None, None]))
    return adapted
