"""Attention for packed texts on any device, one text at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
    longest: int,
    longest_key: int,
) -> torch.Tensor:
    """Computes each text's attention separately.

    Checks the conditions that `varlen_attn` relies on.
    """
    lengths = borders.diff().tolist()
    assert borders.dtype == torch.int32
    assert torch.equal(borders, key_borders)
    assert longest == longest_key == max(lengths)
    assert sum(lengths) == len(query)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    texts = zip(*(torch.split(heads, lengths) for heads in (query, key, value)), strict=True)
    parts = (
        scaled_dot_product_attention(*(heads.transpose(0, 1) for heads in text)).transpose(0, 1)
        for text in texts
    )
    return torch.cat(list(parts))
