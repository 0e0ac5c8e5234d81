"""The keys and values of several generations, one row each, and attention over them.

Also tracks which cache row has keys and values for which tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from shared.errors import ConfigurationError
from workers.models.generation.prefixes import count_common

MIN_SHARED_TOKENS = 8
"""Copying fewer tokens than this costs more than reading them."""

ATTENTION = "penstock_slots"
"""The name of the attention function below in transformers' AttentionInterface."""
_STEP_TOKENS = 64
"""Attention covers the longest generation, rounded up to a multiple of this."""


@dataclass(eq=False, slots=True)
class KvRow:
    """A row, and the tokens whose keys and values it contains.

    The tokens stay after the generation leaves.
    """

    number: int
    ids: list[int] = field(default_factory=list)
    owner: str = ""
    """Only generations with the same owner may use the row's tokens. Empty if none may."""
    is_taken: bool = False
    freed: int = 0
    """Increases each time a row becomes free."""


class KvRows:
    """All rows in a cache."""

    def __init__(self, rows: int) -> None:
        self.all = [KvRow(number) for number in range(rows)]
        self._clock = count(1)

    def find(self, ids: Sequence[int], owner: str) -> tuple[KvRow, KvRow | None, int]:
        """Returns a free row for a generation that begins with `ids`.

        Returns:
            The row, the row from which to copy its first tokens (None if it already has them), and
            their number.
        """
        free = [row for row in self.all if not row.is_taken]
        assert free, "no row is free; this is a bug"
        oldest = min(free, key=lambda row: (row.freed, row.number))
        mine = [row for row in self.all if row.owner and row.owner == owner]
        shared, best = max(
            ((count_common(row.ids, ids), row) for row in mine),
            key=lambda pair: (pair[0], not pair[1].is_taken, -pair[1].number),
            default=(0, oldest),
        )
        if shared < MIN_SHARED_TOKENS:
            return oldest, None, 0
        # A much longer row may be useful to others later, so its tokens are copied instead.
        if not best.is_taken and (best is oldest or len(best.ids) <= 2 * shared):
            return best, None, shared
        target = oldest if oldest is not best else best
        return target, (None if target is best else best), shared

    def take(self, row: KvRow, ids: list[int], owner: str) -> None:
        """Assigns to a generation a free row that has its first tokens."""
        row.ids, row.owner, row.is_taken = list(ids), owner, True

    def free(self, row: KvRow) -> None:
        """Frees a row. The row keeps its tokens until it is assigned again."""
        row.is_taken = False
        row.freed = next(self._clock)

    def gather(self, rows: Sequence[KvRow]) -> Iterator[tuple[int, int, int]]:
        """Moves `rows` to the front. Yields each swap: two row numbers and the number of tokens.

        Each swap must be carried out immediately.
        """
        wanted = set(map(id, rows))
        targets = [target for target in range(len(rows)) if id(self.all[target]) not in wanted]
        behind = [row for row in rows if row.number >= len(rows)]
        for target, row in zip(targets, behind, strict=True):
            other, number = self.all[target], row.number
            yield target, number, max(len(other.ids), len(row.ids))
            self.all[target], self.all[number] = row, other
            row.number, other.number = target, number


class ForwardPass:
    """One forward pass: the rows that get new tokens, and the tokens they can see.

    Either one row gets several tokens (a part of a prompt), or the first rows get one token each.

    Args:
        rows: the index of the first row, and of the row after the last one.
        starts: how many tokens each row already has, int64 [rows].
        tokens: how many tokens each row gets.
        capacity: maximum number of tokens in a row.
    """

    def __init__(
        self, rows: tuple[int, int], starts: torch.Tensor, tokens: int, capacity: int
    ) -> None:
        self.first, self.end = rows
        self.starts = starts
        self.tokens = tokens
        self.is_single = rows[1] - rows[0] == 1
        longest = int(starts.max()) + tokens  # waits for the device
        assert longest <= capacity, "a row is full; this is a bug"
        # A single row needs no padding, and batches of several rows use only a few different
        # lengths.
        padded = longest if self.is_single else -(-longest // _STEP_TOKENS) * _STEP_TOKENS
        self.length = min(padded, capacity)
        """How many tokens of each row are visible, including new tokens and any padding."""
        self._masks: dict[int | None, torch.Tensor | None] = {}

    @property
    def positions(self) -> torch.Tensor:
        """The position of each new token, int64 [rows, tokens]."""
        return self.starts[:, None] + torch.arange(self.tokens, device=self.starts.device)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns the attention mask, bool [rows, 1, tokens, length]. None if nothing is masked.

        Args:
            window: how many tokens back a token can see, counting itself. None means all.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self.is_single and self.tokens == 1 and (window is None or window >= self.length):
            return None
        key_positions = torch.arange(self.length, device=self.starts.device)
        positions = self.positions[:, :, None]
        seen = key_positions <= positions
        if window is not None:
            seen &= key_positions > positions - window
        return seen[:, None]


class SlotCache(Cache):  # type: ignore[misc]
    """A transformers cache whose rows are filled to various lengths by different generations.

    Args:
        rows: maximum number of generations.
        capacity: maximum number of tokens per generation.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self.capacity = capacity
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.reading: ForwardPass | None = None
        """The current pass."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a layer's keys and values [rows, heads, tokens, width].

        Returns the states of all tokens so far, [rows, heads, length, width].
        """
        if layer_idx == len(self._keys):
            self._keys.append(self._room(key_states))
            self._values.append(self._room(value_states))
        reading = self.reading
        assert reading is not None, "no pass is running; this is a bug"
        keys = self._keys[layer_idx][reading.first : reading.end]
        values = self._values[layer_idx][reading.first : reading.end]
        if reading.is_single:
            start = reading.length - reading.tokens
            keys[:, :, start : reading.length] = key_states
            values[:, :, start : reading.length] = value_states
        else:
            rows = torch.arange(len(keys), device=keys.device)
            keys[rows, :, reading.starts] = key_states[:, :, 0]
            values[rows, :, reading.starts] = value_states[:, :, 0]
        return keys[:, :, : reading.length], values[:, :, : reading.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used, because all callers specify positions."""
        return 0

    def _room(self, states: torch.Tensor) -> torch.Tensor:
        """Returns zeros for all rows.

        Attention multiplies masked values by 0, but NaN values stay NaN.
        """
        shape = (self._rows, states.shape[1], self.capacity, states.shape[3])
        if states.device.type != "cpu":
            return torch.zeros(shape, dtype=states.dtype, device=states.device)
        # The operating system allocates this memory only when it is written to.
        count = int(np.prod(shape)) * states.element_size()
        return torch.from_numpy(np.zeros(count, np.uint8)).view(states.dtype).view(shape)

    @torch.inference_mode()
    def exchange(self, slot: int, other: int, tokens: int) -> None:
        for layer in (*self._keys, *self._values):
            saved = layer[slot, :, :tokens].clone()
            layer[slot, :, :tokens] = layer[other, :, :tokens]
            layer[other, :, :tokens] = saved

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies a row's first tokens to another row."""
        for layer in (*self._keys, *self._values):
            layer[target, :, :tokens] = layer[source, :, :tokens]

    @torch.inference_mode()
    def clear(self, row: int, start: int = 0) -> None:
        """Clears a row, including NaN, from token `start` on."""
        for layer in (*self._keys, *self._values):
            layer[row, :, start:].zero_()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slots: SlotCache | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes one layer's attention for transformers, from [rows, heads, tokens, width].

    Returns [rows, tokens, heads, width]. The mask comes from the pass in `slots`.
    """
    if options.get("s_aux") is not None or slots is None or slots.reading is None:
        raise ConfigurationError("this model's attention is not supported", field="source")
    mask = slots.reading.mask(sliding_window)
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    if tokens == 1:
        # A group's heads become rows in a single product, so keys are read only once.
        query = query.reshape(rows, key.shape[1], groups, width)
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None:
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        mixed = _attend_with_cap(query, key, value, mask, scaling or width**-0.5, softcap)
    if tokens == 1:
        return mixed.reshape(rows, 1, heads, -1), None
    return mixed.transpose(1, 2).contiguous(), None


def _attend_with_cap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.tanh(query @ key.transpose(2, 3) * scaling / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


AttentionInterface.register(ATTENTION, attend)
