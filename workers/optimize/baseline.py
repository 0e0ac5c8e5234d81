"""Compares an embedding variant with the original: speed, and quality on unseen texts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shared.catalog import Model
from shared.tasks.embedding import EmbeddingResult
from workers.models.base import PreparedText
from workers.models.device import Device
from workers.models.embedding.encoder_torch import TorchEncoder
from workers.models.embedding.model import EmbeddingModel, Encoder
from workers.models.embedding.model_folder import SentenceFolder
from workers.optimize.quality import VectorQuality, compare_vectors

_JUDGED_TOGETHER = 8
_TIMED_EVERY = 4
"""Every n-th text is timed, in the batches of a worker: a tenth of a second per round.
"""
_ROUNDS = 3


class Baseline:
    """Torch fp32 of a model, the texts to judge by, and the vectors that it gives them."""

    def __init__(
        self, entry: Model, settings: SentenceFolder, texts: Sequence[PreparedText], threads: int
    ) -> None:
        self.texts = texts
        self._entry = entry
        self._original = self._open(TorchEncoder(settings, Device("cpu", threads, 1.0), "fp32"))
        self.vectors = self._alone(self._original)

    def _open(self, encoder: Encoder) -> EmbeddingModel:
        model = EmbeddingModel(self._entry, encoder)
        model.setup()
        model.warmup()
        return model

    def _alone(self, model: EmbeddingModel) -> np.ndarray:
        """The vectors of all texts, float32 [texts, dimensions], each computed by itself."""
        return np.concatenate([_vectors(model, [text]) for text in self.texts])

    def measure(self, encoder: Encoder) -> tuple[VectorQuality, float, float]:
        """The worse of a variant's qualities alone and in batches, its texts/s, and the original's.

        In a batch because padding and the scaling of INT8 activations tell only there. Best of some
        rounds each, by turns, so that whatever else the machine does disturbs both alike.

        Raises:
            ConfigurationError: the variant can't be loaded.
        """
        model = self._open(encoder)
        alone = compare_vectors(self._alone(model), self.vectors)
        batched = compare_vectors(self._together(model), self.vectors)
        times_s = [(self._time_s(self._original), self._time_s(model)) for _ in range(_ROUNDS)]
        original_s, variant_s = (min(column) for column in zip(*times_s, strict=True))
        count = len(self.texts[::_TIMED_EVERY])
        return (
            min(alone, batched, key=lambda quality: quality.cosine_min),
            count / variant_s,
            count / original_s,
        )

    def _together(self, model: EmbeddingModel) -> np.ndarray:
        order = np.argsort([text.length for text in self.texts], kind="stable")
        vectors = np.empty_like(self.vectors)
        for at in range(0, len(order), _JUDGED_TOGETHER):
            places = order[at : at + _JUDGED_TOGETHER]
            vectors[places] = _vectors(model, [self.texts[place] for place in places])
        return vectors

    def _time_s(self, model: EmbeddingModel) -> float:
        texts = self.texts[::_TIMED_EVERY]
        groups = [[texts[place] for place in places] for places in model.groups(texts)]
        began_s = time.perf_counter()
        for group in groups:
            _vectors(model, group)
        return time.perf_counter() - began_s


def _vectors(model: EmbeddingModel, texts: Sequence[PreparedText]) -> np.ndarray:
    results = model.predict(texts, lambda step, steps: None)
    return np.array(
        [
            np.frombuffer(result.vector, "<f4")
            for result in results
            if isinstance(result, EmbeddingResult)
        ]
    )
