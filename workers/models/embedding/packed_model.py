"""Encoders other than BERT on a GPU: transformers' modules, with attention for packed texts.

transformers lets us replace attention by name, and passes the model call's keyword arguments to it.
A trial on the device determines whether a model's results are then the same as with padding. Local
attention, as in ModernBERT, is supported. Attention with position biases (MPNet), or only to
earlier tokens, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from workers.models.embedding.packed_encoder import (
    UNLIMITED,
    Attend,
    PackedEncoder,
    attend_packed,
    pack_texts,
)
from workers.models.embedding.trial import Trial

ATTENTION = "penstock_packed"
"""The name of our attention in transformers' registry."""
_TEXTS = "penstock_texts"
"""The keyword argument that passes the texts' borders to it."""
_MAX_WINDOW = 1024
"""A trial text is twice as long as the window, and the trial shouldn't take long."""


class _Texts(NamedTuple):
    borders: torch.Tensor
    longest: int
    attend: Attend


class PackedModel(PackedEncoder):
    """A transformers model whose attention is ours.

    Args:
        first_position: position of a text's first token.
    """

    def __init__(
        self,
        model: Any,
        first_position: int,
        pooling: Sequence[str],
        *,
        normalize: bool,
        device: torch.device,
        attend: Attend = attend_packed,
    ) -> None:
        super().__init__(device, pooling, normalize=normalize)
        self._model, self._first_position, self._attend = model, first_position, attend

    def states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        borders: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": (positions + self._first_position)[None],
            _TEXTS: _Texts(borders, longest, self._attend),
        }
        if types is not None:
            arguments["token_type_ids"] = types[None]
        states: torch.Tensor = self._model(**arguments).last_hidden_state
        return states[0]


def pack_model(
    model: Any,
    pooling: Sequence[str],
    *,
    normalize: bool,
    device: torch.device,
    attend: Attend = attend_packed,
) -> PackedModel | None:
    """Replaces the attention of `model`, if that produces the same results as padding.

    Returns None if it doesn't. The model is then unchanged.

    Args:
        model: a transformers model on `device`, with 16-bit attention.
    """
    window = getattr(model.config, "sliding_window", None) or 0
    if model.config._attn_implementation != "sdpa" or window > _MAX_WINDOW:
        return None
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # there is no mask
    with torch.inference_mode():
        trial = Trial(model, window)
        model.set_attn_implementation(ATTENTION)
        for first in trial.first_positions:
            packed = PackedModel(
                model, first, pooling, normalize=normalize, device=device, attend=attend
            )
            try:
                states = _try_texts(packed, trial, device)
            except (TypeError, ValueError, RuntimeError, IndexError):
                continue  # it doesn't support positions, or keyword arguments for its attention
            if trial.is_right(states):
                return packed
    model.set_attn_implementation("sdpa")
    return None


def _try_texts(packed: PackedModel, trial: Trial, device: torch.device) -> torch.Tensor:
    packed_texts = pack_texts(trial.ids.cpu().numpy(), None, np.array(trial.lengths))
    texts = torch.from_numpy(packed_texts).to(device)
    tokens = len(trial.ids)
    ids, positions, borders = torch.split(texts, [tokens, tokens, len(texts) - 2 * tokens])
    return packed.states(ids, positions, None, borders, max(trial.lengths))


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers, [1, heads, tokens, width] to [1, tokens, heads, width]."""
    texts: _Texts | None = rest.get(_TEXTS)
    if (
        texts is None
        or key.shape != query.shape
        or getattr(module, "is_causal", False)
        or attention_mask is not None
        or rest.get("position_bias") is not None
    ):
        raise ValueError("only attention to a text's own tokens can be packed")
    # As in transformers' `flash_attention_forward`, a token's own position counts.
    window = (sliding_window - 1, sliding_window - 1) if sliding_window else UNLIMITED
    # Rotating them may have converted the queries and keys to fp32.
    heads = [tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)]
    mixed = texts.attend(
        heads[0], heads[1], heads[2], texts.borders, texts.longest, scale=scaling, window=window
    )
    return mixed[None], None
