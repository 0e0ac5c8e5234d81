"""Texts end to end instead of padded: a transformer on a CPU computes each token once, and nothing for padding.

All of an encoder but its attention works token by token, so the texts of a batch go through it as one row of tokens,
each with the position it has in its own text, and attention is computed text by text. transformers lets attention be
replaced by name, and hands it what the model was called with.

Whether a model of the hub bears that is not looked up but tried, see `runs_unpadded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "penstock_text_by_text"
"""Our attention's name for transformers' registry."""
_LENGTHS = "penstock_lengths"
"""The keyword by which the texts' lengths reach it."""
_PRODUCTS_FROM_TOKENS = 128
"""From here on two products are quicker than torch's flash attention in bf16 (MiniLM's heads, 32 wide; on 230 tokens
1.2 ms instead of 1.6 a layer); in fp32 they never are."""
_TRIED_LENGTHS = (3, 11, 6)
_TRIED_APART = 0.02
"""Twice what bf16 rounds differently for another batch; a model that mixes its texts up is off by far more."""


class Trial:
    """Three short texts, and what `model` (of transformers, on a CPU) makes of them padded.

    `ids` are those of all texts, one after the other, `lengths` their tokens; `first_positions`: where texts may begin.
    """

    def __init__(self, model: Any) -> None:
        self.lengths = _TRIED_LENGTHS
        # BERT counts from 0, RoBERTa from behind the number of its padding token.
        self.first_positions = (0, 1 + (model.config.pad_token_id or 0))
        # From 5 on tokenizers have words; before it are their special tokens.
        self.ids = 5 + torch.arange(sum(self.lengths)) % max(1, model.config.vocab_size - 5)
        padded = torch.nn.utils.rnn.pad_sequence(list(torch.split(self.ids, list(self.lengths))), batch_first=True)
        mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        self._wanted = model(input_ids=padded, attention_mask=mask.long()).last_hidden_state[mask]

    def is_right(self, found: torch.Tensor) -> bool:
        """Whether these states, float32 [tokens, width], are those of the padded texts."""
        return torch.allclose(found, self._wanted, rtol=0, atol=_TRIED_APART * float(self._wanted.abs().max()))


def runs_unpadded(model: Any) -> int | None:
    """Sets `model` up to be run by `run_unpadded`, where that gives what padding gives.

    Args:
        model: of transformers, on a CPU. Padded batches give what they gave before.

    Returns:
        The position that its first token has, which `run_unpadded` needs; None: it can't, leave it padded.
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
                continue  # it takes no positions, or no keywords for its attention
            if trial.is_right(found):
                return first
    model.set_attn_implementation("sdpa")
    return None


def run_unpadded(
    model: Any, ids: torch.Tensor, types: torch.Tensor | None, lengths: Sequence[int], first_position: int
) -> torch.Tensor:
    """The last hidden states of texts end to end, [tokens, width].

    Args:
        model: that `runs_unpadded` has set up.
        ids: token ids of all texts, one after the other, int64 [tokens].
        types: token type ids in the same form; None: all 0.
        lengths: tokens of each text.
        first_position: as `runs_unpadded` says.
    """
    positions = torch.cat([torch.arange(first_position, first_position + length) for length in lengths])
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
    """Attention of [1, heads, tokens, width] to [1, tokens, heads, width], as transformers calls it; else torch's."""
    lengths = rest.pop(_LENGTHS, None)
    if lengths is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
        return out, None
    narrowing = (attention_mask, rest.get("position_bias"), rest.get("sliding_window"))
    if key.shape != query.shape or getattr(module, "is_causal", False) or any(one is not None for one in narrowing):
        raise ValueError("only plain attention, to all tokens of a text, can be computed text by text")
    return attend_text_by_text(query, key, value, lengths, scaling).transpose(1, 2), None


def attend_text_by_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scaling: float | None = None
) -> torch.Tensor:
    """Attention of texts end to end, [1, heads, tokens, width] throughout; `scaling` None: 1 / sqrt(width).

    Tokens after the last text are seen by none, and come out as their values.
    """
    filler = query.shape[2] - sum(lengths)
    if len(lengths) == 1 and not filler:
        return _attend_one(query, key, value, scaling)
    queries, keys, values = (torch.split(one, [*lengths, filler], dim=2) for one in (query, key, value))
    texts = zip(queries[:-1], keys[:-1], values[:-1], strict=True)
    return torch.cat([*(_attend_one(q, k, v, scaling) for q, k, v in texts), values[-1]], dim=2)


def _attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """One text, [1, heads, tokens, width] throughout."""
    if query.dtype != torch.bfloat16 or query.shape[2] < _PRODUCTS_FROM_TOKENS:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query[0], key[0].mT, beta=0, alpha=scale)
    return torch.bmm(scores.softmax(-1), value[0])[None]
