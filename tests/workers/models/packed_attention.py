"""Attention for packed texts on any device, one text at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Computes each text's attention separately.

    Checks the conditions that `varlen_attn` relies on.
    """
    lengths = borders.diff().tolist()
    assert borders.dtype == torch.int32
    assert longest == max(lengths)
    assert sum(lengths) == len(query)
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    splits = (torch.split(heads.transpose(0, 1), lengths, 1) for heads in (query, key, value))
    parts = (
        scaled_dot_product_attention(
            queries, keys, values, attn_mask=_mask(queries.shape[1], window), scale=scale
        ).transpose(0, 1)
        for queries, keys, values in zip(*splits, strict=True)
    )
    return torch.cat(list(parts))


def _mask(length: int, window: tuple[int, int]) -> torch.Tensor | None:
    """True where a token (row) attends to another one (column). None if it attends to all."""
    if window == (-1, -1):
        return None
    before, after = window
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    return (ahead >= -before) & (ahead <= after)
