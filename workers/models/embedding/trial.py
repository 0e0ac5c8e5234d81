"""A trial of an encoder: does it compute the same states without padding as with it?"""

from __future__ import annotations

from typing import Any

import torch

_LENGTHS = (3, 11, 6)
_APART = 0.02
"""Twice the difference that bf16 rounding causes between batches.

A model that mixes up texts produces far larger differences.
"""


class Trial:
    """Short texts, and the states that a transformers model computes for them with padding.

    `ids` has all texts in one row, and `lengths` has their token counts. `first_positions` are the
    candidates for the first token's position.

    Args:
        window: how many tokens before and after a token the model's local attention covers. One
            text is longer than that. 0 means it has no local attention.
    """

    def __init__(self, model: Any, window: int = 0) -> None:
        device = model.device
        self.lengths = (*_LENGTHS, 2 * window + 5) if window else _LENGTHS
        # Positions start at 0 in BERT, and at the padding token's ID plus 1 in RoBERTa.
        self.first_positions = (0, 1 + (model.config.pad_token_id or 0))
        # IDs below 5 are special tokens.
        tokens = torch.arange(sum(self.lengths), device=device)
        self.ids = 5 + tokens % max(1, model.config.vocab_size - 5)
        padded = torch.nn.utils.rnn.pad_sequence(
            list(torch.split(self.ids, list(self.lengths))), batch_first=True
        )
        lengths = torch.tensor(self.lengths, device=device)
        mask = torch.arange(max(self.lengths), device=device) < lengths[:, None]
        states = model(input_ids=padded, attention_mask=mask.long()).last_hidden_state[mask]
        self._expected: torch.Tensor = states.float()

    def is_right(self, states: torch.Tensor) -> bool:
        """Returns whether these states, [tokens, width], match the padded ones."""
        tolerance = _APART * float(self._expected.abs().max())
        return torch.allclose(states.float(), self._expected, rtol=0, atol=tolerance)
