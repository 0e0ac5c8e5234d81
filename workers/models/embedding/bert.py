"""BERT and related models on a CPU, operator by operator, without the modules of transformers.

The overhead of modules, keywords, and three casts of the same rows took 40 % of the CPU time of a
single text of 12 tokens in bf16. Texts are concatenated, as in workers/models/embedding/varlen.py,
which computes other families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, layer_norm, linear, pad

from workers.models.embedding.cpu_bf16 import Product, packed_product
from workers.models.embedding.varlen import Trial, attend_text_by_text

FAMILIES = frozenset({"bert", "camembert", "roberta", "xlm-roberta"})
"""Families whose modules have the names that are used here.

A trial checks that they compute the same.
"""

_STEP_TOKENS = 16
"""In bf16 the number of rows is filled up to a multiple of this.

oneDNN compiles a product for each number of rows, which takes a millisecond and about 100 KiB, and
concatenated texts have any number. Measured with MiniLM over thousands of batches: 3 to 6 % less
time, and a process grows by 0.3 GiB instead of 0.6.
"""
_ANY_COUNT_TOKENS = 64
"""Not filled up to here.

With seven more rows a single text of nine tokens took 4.2 ms instead of 3.4.
"""


class _Layer(NamedTuple):
    heads: Product
    """Query, key and value in one product."""
    mix: Product
    mix_norm: Product
    widen: Product
    activate: Product
    narrow: Product
    norm: Product


class BertEncoder:
    """The encoder of a model of FAMILIES, with its own weights.

    The model can be dropped afterwards.

    Args:
        model: a model of transformers, in fp32.
        first_position: the position of the first token of a text.
        in_bf16: whether to compute products and attention in bf16. The rest is fp32.
    """

    def __init__(self, model: Any, first_position: int, *, in_bf16: bool) -> None:
        given = model.embeddings
        self._words = given.word_embeddings.weight
        self._types = given.token_type_embeddings.weight
        self._places = given.position_embeddings.weight[first_position:]
        self._untyped_places = self._places + self._types[0]
        self._norm = _norm(given.LayerNorm)
        self._heads = int(model.config.num_attention_heads)
        self._dtype = torch.bfloat16 if in_bf16 else torch.float32
        make = packed_product if in_bf16 else _product
        self._layers = [_layer(one, make) for one in model.encoder.layer]

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """How many rows are computed for texts of these lengths, filler included."""
        tokens = sum(lengths)
        steps = self._dtype == torch.bfloat16 and tokens > _ANY_COUNT_TOKENS
        return -(-tokens // _STEP_TOKENS) * _STEP_TOKENS if steps else tokens

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        """The last hidden states of concatenated texts, float32 [tokens, width].

        As varlen.run_unpadded.
        """
        tokens = len(ids)
        filler = self.computed_tokens(lengths) - tokens
        if filler:
            ids = pad(ids, (0, filler))
            types = None if types is None else pad(types, (0, filler))
        table = self._untyped_places if types is None else self._places
        places = torch.cat([*(table[:length] for length in lengths), table[:1].expand(filler, -1)])
        rows = embedding(ids, self._words) + places
        if types is not None:
            rows = rows + embedding(types, self._types)
        rows = self._norm(rows)
        for layer in self._layers:
            heads = layer.heads(rows.to(self._dtype)).view(1, len(ids), 3, self._heads, -1)
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = (
                attend_text_by_text(query, key, value, lengths)
                .transpose(1, 2)
                .reshape(len(ids), -1)
            )
            rows = layer.mix_norm(layer.mix(mixed) + rows)
            rows = layer.norm(
                layer.narrow(layer.activate(layer.widen(rows.to(self._dtype)))) + rows
            )
        return rows[:tokens]


def bert_encoder(model: Any, *, in_bf16: bool) -> BertEncoder | None:
    """The encoder of `model` (of transformers, fp32, on a CPU).

    None if it is not of these families.
    """
    if model.config.model_type not in FAMILIES:
        return None
    trial = Trial(model)
    for first_position in trial.first_positions:
        try:
            encoder = BertEncoder(model, first_position, in_bf16=in_bf16)
            found = encoder.states(trial.ids, None, trial.lengths)
        except (AttributeError, RuntimeError, IndexError):
            continue  # unexpected modules, or too few positions
        if trial.is_right(found):
            return encoder
    return None


def _layer(given: Any, make: Callable[[torch.Tensor, torch.Tensor], Product]) -> _Layer:
    attention = given.attention.self
    parts = (attention.query, attention.key, attention.value)
    return _Layer(
        heads=make(
            torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        ),
        mix=make(given.attention.output.dense.weight, given.attention.output.dense.bias),
        mix_norm=_norm(given.attention.output.LayerNorm),
        widen=make(given.intermediate.dense.weight, given.intermediate.dense.bias),
        activate=given.intermediate.intermediate_act_fn,
        narrow=make(given.output.dense.weight, given.output.dense.bias),
        norm=_norm(given.output.LayerNorm),
    )


def _product(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    return partial(linear, weight=weight, bias=bias)


def _norm(given: Any) -> Product:
    return partial(
        layer_norm,
        normalized_shape=given.normalized_shape,
        weight=given.weight,
        bias=given.bias,
        eps=given.eps,
    )
