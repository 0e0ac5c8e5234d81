"""Runs a transformer on concatenated texts, so a CPU computes no padding.

All parts of an encoder except attention work token by token. So the texts of a batch pass through
as one row of tokens, each with its position in its own text, and attention is computed text by
text. transformers lets us replace attention by name, and passes it the keywords that the model is
called with.

Whether a model supports this is found by a trial (see `runs_unpadded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "penstock_text_by_text"
"""The name of our attention in the registry of transformers."""
_LENGTHS = "penstock_lengths"
"""The keyword that passes it the lengths of the texts."""
_PRODUCTS_FROM_TOKENS = 128
"""From this length on, two products are faster than torch's flash attention in bf16.

With MiniLM's heads, 32 wide, and 230 tokens: 1.2 ms instead of 1.6 per layer."""
_TRIED_LENGTHS = (3, 11, 6)
_TRIED_APART = 0.02
"""Twice the difference that bf16 rounding makes between batches.

A model that mixes up texts is much further off.
"""


class Trial:
    """Three short texts, with the states that `model` computes for them with padding.

    `ids` has all texts in a row, and `lengths` their tokens. `first_positions` are the candidates
    for the position of the first token.
    """

    def __init__(self, model: Any) -> None:
        self.lengths = _TRIED_LENGTHS
        # BERT counts from 0, RoBERTa from the id of its padding token plus 1.
        self.first_positions = (0, 1 + (model.config.pad_token_id or 0))
        # Ids below 5 are special tokens.
        self.ids = 5 + torch.arange(sum(self.lengths)) % max(1, model.config.vocab_size - 5)
        padded = torch.nn.utils.rnn.pad_sequence(
            list(torch.split(self.ids, list(self.lengths))), batch_first=True
        )
        mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        self._wanted = model(input_ids=padded, attention_mask=mask.long()).last_hidden_state[mask]

    def is_right(self, found: torch.Tensor) -> bool:
        """Returns whether these states, float32 [tokens, width], equal those with padding."""
        return torch.allclose(
            found, self._wanted, rtol=0, atol=_TRIED_APART * float(self._wanted.abs().max())
        )


def runs_unpadded(model: Any) -> int | None:
    """Sets up `model` for `run_unpadded`, if that computes the same as padding.

    Args:
        model: a model of transformers, on a CPU. Results with padding do not change.

    Returns:
        The position of the first token, which `run_unpadded` needs. None if the model needs
        padding.
    """
    if model.config._attn_implementation != "sdpa":
        return None
    with torch.inference_mode():
        trial = Trial(model)
        AttentionInterface.register(ATTENTION, _attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
        for first in trial.first_positions:
            try:
                found = run_unpadded(model, trial.ids, None, trial.lengths, first)
            except (TypeError, ValueError, RuntimeError, IndexError):
                continue  # it does not support positions, or keywords for its attention
            if trial.is_right(found):
                return first
    model.set_attn_implementation("sdpa")
    return None


def run_unpadded(
    model: Any,
    ids: torch.Tensor,
    types: torch.Tensor | None,
    lengths: Sequence[int],
    first_position: int,
) -> torch.Tensor:
    """The last hidden states of concatenated texts, [tokens, width].

    Args:
        model: a model that `runs_unpadded` has set up.
        ids: token ids of all texts in a row, int64 [tokens].
        types: token type ids in the same form. None means all 0.
        lengths: tokens of each text.
        first_position: as `runs_unpadded` says.
    """
    positions = torch.cat(
        [torch.arange(first_position, first_position + length) for length in lengths]
    )
    given = {"input_ids": ids[None], "position_ids": positions[None], _LENGTHS: tuple(lengths)}
    if types is not None:
        given["token_type_ids"] = types[None]
    states: torch.Tensor = model(**given).last_hidden_state
    return states[0]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, [1, heads, tokens, width] to [1, tokens, heads, width].

    Calls torch's attention if there are no lengths.
    """
    lengths = rest.pop(_LENGTHS, None)
    if lengths is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return out, None
    narrowing = (attention_mask, rest.get("position_bias"), rest.get("sliding_window"))
    if (
        key.shape != query.shape
        or getattr(module, "is_causal", False)
        or any(one is not None for one in narrowing)
    ):
        raise ValueError(
            "only plain attention, to all tokens of a text, can be computed text by text"
        )
    return attend_text_by_text(query, key, value, lengths, scaling).transpose(1, 2), None


def attend_text_by_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention of concatenated texts, [1, heads, tokens, width].

    The default of `scaling` is 1 / sqrt(width).

    Filler tokens after the last text are returned as their values.
    """
    filler = query.shape[2] - sum(lengths)
    if len(lengths) == 1 and not filler:
        return _attend_one(query, key, value, scaling)
    queries, keys, values = (
        torch.split(one, [*lengths, filler], dim=2) for one in (query, key, value)
    )
    texts = zip(queries[:-1], keys[:-1], values[:-1], strict=True)
    return torch.cat([*(_attend_one(q, k, v, scaling) for q, k, v in texts), values[-1]], dim=2)


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one text, [1, heads, tokens, width]."""
    if query.dtype != torch.bfloat16 or query.shape[2] < _PRODUCTS_FROM_TOKENS:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query[0], key[0].mT, beta=0, alpha=scale)
    return torch.bmm(scores.softmax(-1), value[0])[None]
