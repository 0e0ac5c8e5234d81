"""Similarity models: cross-encoders, and encoders whose vectors are compared by cosine."""

from __future__ import annotations

from pathlib import Path

from shared.models.catalog import Model
from workers.models.base import InferenceModel, Preparer
from workers.tasks.base import Resources
from workers.tasks.embedding import EmbeddingWorker, check_window, encoder_model


class SimilarityWorker(EmbeddingWorker):
    """Encoders are measured and optimized like embedding models.

    Cross-encoders run in torch unchanged. Only their layout and batch size are measured.
    """

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        from workers.models.embedding.similarity import CrossPreparer, PairPreparer

        if entry.rerank == "cross-encoder":
            preparer = CrossPreparer(folder)
            check_window(entry, preparer.max_length)
            return preparer
        return PairPreparer(super().preparer(entry, folder))

    def model(self, entry: Model, folder: Path, resources: Resources) -> InferenceModel:
        """Returns an encoder that also computes the cosines of its vectors, or a cross-encoder."""
        if entry.rerank == "cosine":
            from workers.models.embedding.similarity import SimilarityModel

            return SimilarityModel(encoder_model(entry, folder, resources))
        from workers.models.device import Device
        from workers.models.embedding.cross_encoder import CrossEncoderModel

        device = Device(resources.device, resources.threads, resources.memory_fraction)
        return CrossEncoderModel(entry, folder, device)


TASK = SimilarityWorker()
