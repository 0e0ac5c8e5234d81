"""Fixed memory for adapters (LoRA) inside a compiled graph.

Compiled code can't contain adapters, because they come and go. Instead, each layer in a UNet's
attention blocks has slots for a few adapters' projections, padded with zeros to a fixed rank. The
compiled code reads each row's projections from the row's slot, and multiplies the result by the
row's scale. Using other adapters changes only the contents of the slots, so nothing is compiled
again. Slot 0 stays empty, for rows without an adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workers.models.image.low_rank import Layers, Row

_EMPTY = 0
_WITHIN = "attentions"
"""Layers whose name contains this part are the ones that almost all adapters change."""


class AdapterSlots:
    """The slots in a UNet's layers.

    Args:
        layers: the UNet's layers, by name. Linear layers and 1 x 1 convolutions in attention blocks
            get slots.
        count: maximum number of different adapters in a call.
        rows: maximum number of rows in a call.
        rank: maximum rank of an adapter.
    """

    def __init__(
        self, layers: Mapping[str, torch.nn.Module], *, count: int, rows: int, rank: int
    ) -> None:
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in layers.items()
            if _WITHIN in name.split(".") and _is_per_pixel(layer)
        }
        self._rank = rank
        self._is_used = False
        first = next(iter(self._layers.values()))
        options = {"dtype": first.weight.dtype, "device": first.weight.device}
        for layer in self._layers.values():
            inner, outer = _sizes_of(layer)
            # As buffers, they are at addresses that CUDA graphs may rely on.
            for name, shape in (("lora_down", (rank, inner)), ("lora_up", (outer, rank))):
                slots = torch.zeros(count + 1, *shape, **options)
                layer.register_buffer(name, slots, persistent=False)
            # It must be the first hook, so that other hooks see the sum.
            layer.register_forward_hook(self._add, prepend=True)
        self._numbers = torch.zeros(rows, dtype=torch.int64, device=first.weight.device)
        """Each row's slot."""
        self._scales = torch.zeros(rows, **options)
        self._chosen: tuple[tuple[int, float], ...] = ()
        """The slots and scales of the last call's rows."""
        self._contents: OrderedDict[int, Layers | None] = OrderedDict.fromkeys(range(1, count + 1))
        """The adapter in each slot. Least recently used first."""

    @property
    def nbytes(self) -> int:
        return sum(layer.lora_down.nbytes + layer.lora_up.nbytes for layer in self._layers.values())

    def place(self, rows: Sequence[Row]) -> bool:
        """Prepares the slots for a call. A single row applies to the whole batch.

        Returns:
            False if there are too many rows or adapters, an adapter's rank is too high, or an
            adapter changes a layer without slots.
        """
        if len(rows) == 1:
            rows = [*rows] * len(self._numbers)
        adapters = {id(row[0]): row[0] for row in rows if row is not None}
        if len(rows) > len(self._numbers) or len(adapters) > len(self._contents):
            return False
        slots = {id(layers): slot for slot, layers in self._contents.items() if layers is not None}
        missing = [layers for key, layers in adapters.items() if key not in slots]
        if not all(self._fits(layers) for layers in missing):
            return False
        for key in adapters.keys() & slots.keys():
            self._contents.move_to_end(slots[key])
        for layers in missing:
            slots[id(layers)] = self._fill(layers)
        self._choose(
            tuple((_EMPTY, 0.0) if row is None else (slots[id(row[0])], row[1]) for row in rows)
        )
        return True

    def forget(self, layers: Layers) -> None:
        """Empties the adapter's slot, if it has one."""
        for slot, content in list(self._contents.items()):
            if content is layers:
                self._contents[slot] = None
                self._contents.move_to_end(slot, last=False)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Within this context, the UNet computes the rows that were placed last."""
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False

    def _add(self, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        """Returns a layer's output W x + s B (A x). None leaves it as it is."""
        if not self._is_used:
            return None
        rows = len(output)
        numbers, scales = self._numbers[:rows], self._scales[:rows]
        down, up = layer.lora_down[numbers], layer.lora_up[numbers]
        is_image = isinstance(layer, torch.nn.Conv2d)
        flat, whole = (
            tensor.flatten(2).mT if is_image else tensor.reshape(rows, -1, tensor.shape[-1])
            for tensor in (inputs[0], output)
        )
        low = torch.bmm(flat, down.mT) * scales.view(-1, 1, 1)
        changed = torch.baddbmm(whole, low, up.mT)
        return (changed.mT if is_image else changed).reshape(output.shape)

    def _fits(self, layers: Layers) -> bool:
        return layers.keys() <= self._layers.keys() and all(
            len(pair.down) <= self._rank for pair in layers.values()
        )

    def _fill(self, layers: Layers) -> int:
        """Copies an adapter to the least recently used slot, and returns the slot's number."""
        slot = next(iter(self._contents))
        self._contents[slot] = layers
        self._contents.move_to_end(slot)
        every = [part for own in self._layers.values() for part in (own.lora_down, own.lora_up)]
        torch._foreach_zero_([part[slot] for part in every])
        targets, sources = [], []
        for name, pair in layers.items():
            layer, rank = self._layers[name], len(pair.down)
            targets += [layer.lora_down[slot, :rank], layer.lora_up[slot, :, :rank]]
            sources += [pair.down.flatten(1), pair.up]
        if targets:
            torch._foreach_copy_(targets, sources)
        return slot

    def _choose(self, chosen: tuple[tuple[int, float], ...]) -> None:
        """Stores each row's slot and scale where compiled code reads them."""
        if chosen == self._chosen:
            return
        self._chosen = chosen
        numbers = torch.tensor([slot for slot, _ in chosen])
        self._numbers[: len(chosen)].copy_(numbers, non_blocking=True)
        scales = torch.tensor([scale for _, scale in chosen], dtype=self._scales.dtype)
        self._scales[: len(chosen)].copy_(scales, non_blocking=True)


def _is_per_pixel(layer: torch.nn.Module) -> bool:
    if isinstance(layer, torch.nn.Conv2d):
        return layer.kernel_size == (1, 1) and layer.stride == (1, 1) and layer.groups == 1
    return isinstance(layer, torch.nn.Linear)


def _sizes_of(layer: Any) -> tuple[int, int]:
    """Returns the numbers of a layer's inputs and outputs."""
    if isinstance(layer, torch.nn.Conv2d):
        return layer.in_channels, layer.out_channels
    return layer.in_features, layer.out_features
