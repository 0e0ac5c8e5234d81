"""The whole stack on a GPU: texts/s of `penstock up`, and of transformers alone on the same texts.

Callers send one text a request. The plain model gets them all at once, tokenized and sorted by
length, so it has no server, no queue and no padding to speak of.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from bench.gpu.card import DTYPES, seconds
from bench.gpu.scale import Scale
from bench.load.generator import percentiles
from bench.pipeline import Pipeline, running
from workers.models.embedding.model_folder import read_sentence_folder

OF_A_BATCH = 64


def measure(scale: Scale) -> list[dict[str, Any]]:
    """A row for each number of requests in flight: texts/s plain and served, CPU, latencies."""
    changes = {"backend": "torch", "precision": scale.precision, "tolerance": {"cosine": 0.999}}
    with running(changes, is_alone=True) as pipeline:
        plain = _Plain(pipeline.model_folder, scale)
        return [_row(pipeline, plain, scale, count) for count in scale.in_flight]


def _row(pipeline: Pipeline, plain: _Plain, scale: Scale, in_flight: int) -> dict[str, Any]:
    count = scale.served_texts if in_flight > 1 else max(8, scale.served_texts // 40)
    alone, served, cpu = [], [], []
    report = None
    for number in range(1 + scale.rounds):
        texts = pipeline.texts.mixed(count)
        ids = pipeline.texts.token_ids(texts)
        alone_s = seconds(scale.device, partial(plain.embed, ids))
        before, began_s = pipeline.cpu_s(), time.perf_counter()
        report = pipeline.ask(texts, in_flight, cache="miss")
        served_s, after = time.perf_counter() - began_s, pipeline.cpu_s()
        if number:
            alone.append(alone_s)
            served.append(served_s)
            cpu.append({name: 1000 * (after[name] - before[name]) / count for name in after})
    assert report is not None, "there is at least one round"
    return {
        "in_flight": in_flight,
        "texts": count,
        "plain_per_s": count / statistics.median(alone),
        "served_per_s": count / statistics.median(served),
        "round_trip_ms": percentiles([one.round_trip_ms for one in report.exchanges]),
        "cpu_ms": {name: statistics.median(one[name] for one in cpu) for name in cpu[0]},
    }


class _Plain:
    def __init__(self, folder: Path, scale: Scale) -> None:
        model = AutoModel.from_pretrained(
            read_sentence_folder(folder).transformer, dtype=DTYPES[scale.precision]
        )
        self._model = model.to(scale.device).eval()
        self._device = scale.device

    def embed(self, texts: list[list[int]]) -> None:
        ordered = sorted(texts, key=len)
        for first in range(0, len(ordered), OF_A_BATCH):
            batch = ordered[first : first + OF_A_BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([one + [0] * (longest - len(one)) for one in batch])
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in batch])
            ids, mask = ids.to(self._device), mask.to(self._device)
            with torch.inference_mode():
                states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask[..., None].to(states.dtype)
                pooled = (states * weights).sum(1) / weights.sum(1)
                torch.nn.functional.normalize(pooled, dim=1).cpu()
