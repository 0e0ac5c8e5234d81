"""Similarity models: the encoders of embedding models, and the cosines of what they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.catalog import Model
from shared.errors import BadInput, PenstockError
from shared.tasks import Input, Result
from shared.tasks.embedding import EmbeddingResult, TextInput, Truncate
from shared.tasks.similarity import SimilarityInput, SimilarityResult
from workers.models.base import (
    InferenceModel,
    OnStep,
    PreparedItem,
    PreparedOutcome,
    PreparedPair,
    PreparedText,
    Preparer,
)
from workers.models.embedding.model import EmbeddingModel
from workers.tasks.base import Resources
from workers.tasks.embedding import EmbeddingWorker, encoder_model

_CutText = tuple[str, Truncate]


class PairPreparer:
    """Makes PreparedPair of SimilarityInput. A text that comes several times is tokenized once."""

    def __init__(self, texts: Preparer) -> None:
        self._texts = texts

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedPair | BadInput]:
        """One outcome per input, in order."""
        pairs = [value for value in inputs if isinstance(value, SimilarityInput)]
        wanted = [(text, one.truncate) for one in pairs for text in (one.text, one.query)]
        distinct = list(dict.fromkeys(wanted))
        outcomes = self._texts.prepare([TextInput(text, truncate) for text, truncate in distinct])
        prepared = dict(zip(distinct, outcomes, strict=True))
        return [self._pair(value, prepared) for value in inputs]

    def _pair(
        self, value: Input, prepared: dict[tuple[str, Truncate], PreparedOutcome]
    ) -> PreparedPair | BadInput:
        if not isinstance(value, SimilarityInput):
            return BadInput("a similarity model takes pairs of texts", field="input")
        text, query = (prepared[one, value.truncate] for one in (value.text, value.query))
        for one in (text, query):
            if isinstance(one, BadInput):
                return one
        assert isinstance(text, PreparedText)
        assert isinstance(query, PreparedText)
        return PreparedPair(key="", length=text.length + query.length, text=text, query=query)


class SimilarityModel:
    """Runs batches of pairs. Each distinct text of a batch is computed once."""

    device_name = ""
    pads = False

    def __init__(self, encoder: EmbeddingModel) -> None:
        self._encoder = encoder

    def setup(self) -> None:
        """Loads the weights."""
        self._encoder.setup()
        self.device_name = self._encoder.device_name

    def warmup(self) -> None:
        """Warms the encoder up."""
        self._encoder.warmup()

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """All pairs together. `predict` groups their texts."""
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        """In tokens, without padding."""
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[Result | PenstockError]:
        """One SimilarityResult per pair, in order."""
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
        """The vectors of texts, scaled to length 1, by their token ids."""
        units: dict[bytes, np.ndarray] = {}
        for indices in self._encoder.groups(texts):
            group = [texts[index] for index in indices]
            for text, result in zip(group, self._encoder.predict(group, on_step), strict=True):
                assert isinstance(result, EmbeddingResult), "an encoder fails as a whole"
                vector = np.frombuffer(result.vector, "<f4").astype(np.float64)
                units[text.ids] = vector / (np.linalg.norm(vector) or 1.0)
        return units


class SimilarityWorker(EmbeddingWorker):
    """Encoders are measured and optimized as those of embedding models are."""

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """A tokenizer for pairs."""
        return PairPreparer(super().preparer(entry, folder))

    def model(self, entry: Model, folder: Path, resources: Resources) -> InferenceModel:
        """An encoder, and the cosines of its vectors."""
        return SimilarityModel(encoder_model(entry, folder, resources))


TASK = SimilarityWorker()
