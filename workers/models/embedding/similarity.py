"""Text pairs: their preparation, and the cosine similarity of their vectors.

This module is separate from the task, which every worker imports, so workers for other models don't
need numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.errors import BadInput, PenstockError
from shared.models.tasks import Input, Result
from shared.models.tasks.embedding import EmbeddingResult, TextInput, Truncate
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult
from workers.models.base import (
    OnStep,
    PreparedItem,
    PreparedOutcome,
    PreparedPair,
    PreparedText,
    Preparer,
)
from workers.models.embedding.model import EmbeddingModel
from workers.models.embedding.model_folder import longest_text
from workers.models.embedding.tokenization import open_tokenizer, too_long

_CutText = tuple[str, Truncate, int]
"""A text, the side to truncate it on, and its limit in tokens (0 for none)."""


class PairPreparer:
    """Creates PreparedPair from SimilarityInput. Repeated texts are tokenized once."""

    def __init__(self, texts: Preparer) -> None:
        self._texts = texts

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedPair | BadInput]:
        """Returns one outcome per input, in order."""
        pairs = [value for value in inputs if isinstance(value, SimilarityInput)]
        wanted = [text for pair in pairs for text in _texts_of(pair)]
        distinct = list(dict.fromkeys(wanted))
        outcomes = self._texts.prepare([TextInput(*text) for text in distinct])
        prepared = dict(zip(distinct, outcomes, strict=True))
        return [self._pair(value, prepared) for value in inputs]

    def _pair(
        self, value: Input, prepared: dict[_CutText, PreparedOutcome]
    ) -> PreparedPair | BadInput:
        if not isinstance(value, SimilarityInput):
            return BadInput("the input to a similarity model must be pairs of texts", field="input")
        text, query = (prepared[cut_text] for cut_text in _texts_of(value))
        for part in (text, query):
            if isinstance(part, BadInput):
                return part
        assert isinstance(text, PreparedText)
        assert isinstance(query, PreparedText)
        return PreparedPair(key="", length=text.length + query.length, text=text, query=query)


def _texts_of(pair: SimilarityInput) -> tuple[_CutText, _CutText]:
    return (pair.text, pair.truncate, pair.max_tokens), (pair.query, pair.truncate, 0)


class CrossPreparer:
    """Joins the query and text of each SimilarityInput according to the tokenizer's template.

    A query takes up at most half of the tokens that the model reads, unless nothing may be
    truncated.

    Raises:
        ConfigurationError: the folder's tokenizer.json is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = open_tokenizer(folder)
        self.max_length = longest_text(folder)
        self._special_tokens = self._tokenizer.num_special_tokens_to_add(is_pair=True)

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        """Returns one outcome per input, in order."""
        return [
            self._join_pair(value)
            if isinstance(value, SimilarityInput)
            else BadInput("the input to a similarity model must be pairs of texts", field="input")
            for value in inputs
        ]

    def _join_pair(self, value: SimilarityInput) -> PreparedText | BadInput:
        try:
            query, text = (
                self._tokenizer.encode(part, add_special_tokens=False)
                for part in (value.query, value.text)
            )
        except (TypeError, ValueError) as error:  # a lone surrogate
            return BadInput(f"the text can't be tokenized: {error}", field="input")
        total = len(query) + len(text) + self._special_tokens
        if value.truncate == "none" and total > self.max_length:
            return too_long(total, self.max_length)
        side = "right" if value.truncate == "end" else "left"
        if value.truncate != "none":
            query.truncate(self.max_length // 2)
        room = self.max_length - self._special_tokens - len(query)
        text.truncate(min(room, value.max_tokens or room), direction=side)
        pair = self._tokenizer.post_process(query, text)
        return PreparedText(
            key="",
            length=len(pair.ids),
            ids=np.array(pair.ids, "<u4").tobytes(),
            type_ids=np.array(pair.type_ids, "<u4").tobytes(),
            truncated_tokens=total - len(pair.ids),
        )


class SimilarityModel:
    """Runs batches of pairs. Each distinct text in a batch is computed once."""

    device_name = ""
    pads = False

    def __init__(self, encoder: EmbeddingModel) -> None:
        self._encoder = encoder

    def setup(self) -> None:
        self._encoder.setup()
        self.device_name = self._encoder.device_name

    def warmup(self) -> None:
        self._encoder.warmup()

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """Returns all pairs as one group. `predict` groups their texts."""
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens, without padding."""
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """Returns one SimilarityResult per pair, in order."""
        pairs = [item for item in batch if isinstance(item, PreparedPair)]
        texts = {text.ids: text for pair in pairs for text in (pair.text, pair.query)}
        units = self._units(list(texts.values()), on_step)
        return [
            SimilarityResult(
                score=float(np.clip(units[pair.text.ids] @ units[pair.query.ids], -1.0, 1.0)),
                tokens=pair.length,
                truncated_tokens=pair.text.truncated_tokens + pair.query.truncated_tokens,
            )
            for pair in pairs
        ]

    def _units(self, texts: Sequence[PreparedText], on_step: OnStep) -> dict[bytes, np.ndarray]:
        """Returns the vectors of texts, scaled to length 1 and keyed by the texts' token IDs.

        A vector without a direction becomes NaN, and so does its score, which is then rejected.
        """
        units: dict[bytes, np.ndarray] = {}
        for indices in self._encoder.groups(texts):
            group = [texts[index] for index in indices]
            for text, result in zip(group, self._encoder.predict(group, on_step), strict=True):
                assert isinstance(result, EmbeddingResult), "an encoder fails as a whole"
                vector = np.frombuffer(result.vector, "<f4").astype(np.float64)
                with np.errstate(divide="ignore", invalid="ignore"):
                    units[text.ids] = vector / np.linalg.norm(vector)
        return units
