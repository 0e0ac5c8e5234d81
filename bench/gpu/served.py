"""The whole stack on a GPU: texts/s and images/s of `penstock up`, and of the models alone.

Callers send one text per request. The plain text model gets all of them at once, tokenized and
sorted by length, so it has no server, no queue and hardly any padding. Images are drawn without
compiling by both; alone, in batches as large as the worker's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoModel

from bench.gpu.card import DTYPES, seconds
from bench.gpu.company import drawn
from bench.gpu.images import image_entry, image_item
from bench.gpu.scale import Scale
from bench.load.generator import LoadOrder, LoadReport, drive, percentiles
from bench.pipeline import Part, Pipeline, running, say_nothing
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.models.catalog import Model
from workers.models.device import Device
from workers.models.embedding.model_folder import read_sentence_folder
from workers.models.image.model import ImageModel
from workers.runtime.template import MODEL_PROCESS_NAME, TEMPLATE_NAME

OF_A_BATCH = 64


def measure(scale: Scale) -> list[dict[str, Any]]:
    """Returns a row per number of requests in flight: texts/s plain and served, CPU, latencies."""
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
        before = pipeline.cpu_s()
        report = pipeline.ask(texts, in_flight)
        after = pipeline.cpu_s()
        if number:
            alone.append(alone_s)
            served.append(report.rate)
            cpu.append({name: 1000 * (after[name] - before[name]) / count for name in after})
    assert report is not None, "there is at least one round"
    return {
        "in_flight": in_flight,
        "texts": count,
        "plain_per_s": count / statistics.median(alone),
        "served_per_s": statistics.median(served),
        "round_trip_ms": percentiles([one.round_trip_ms for one in report.exchanges]),
        "cpu_ms": {name: statistics.median(one[name] for one in cpu) for name in cpu[0]},
    }


IMAGES_LIMIT_S = 300.0


def measure_images(scale: Scale, folder: Path) -> dict[str, Any]:
    """Returns the images/s of a worker behind the API, and of its model alone.

    `is_forked`: True if the model process is a fork of the template.
    """
    largest = max(scale.batches)
    entry = image_entry(folder, scale)
    entry = entry.model_copy(
        update={"image": entry.image.model_copy(update={"compile": "never"})}, deep=True
    )
    model = ImageModel(entry, folder, Device(scale.device, threads=1, memory_fraction=0.5))
    model.setup()
    batch = [image_item("text-to-image", seed, scale) for seed in range(largest)]
    drawn(model, batch)
    alone_s = seconds(scale.device, partial(drawn, model, batch))
    del model
    bodies = [_image_body(seed, scale) for seed in range(largest + scale.served_images)]
    with tempfile.TemporaryDirectory() as name, _image_stack(Path(name), entry) as stack:
        is_forked = _is_forked(stack.ports.health[0])
        _ask_images(stack, bodies[:largest], largest)
        report = _ask_images(stack, bodies[largest:], 2 * largest)
    return {
        "in_flight": 2 * largest,
        "alone_per_s": largest / alone_s,
        "served_per_s": report.rate,
        "round_trip_ms": report.round_trip(),
        "is_forked": is_forked,
    }


def _image_body(seed: int, scale: Scale) -> str:
    asked = {"prompt": f"a red circle, number {seed}", "seed": seed, "response_format": "b64_json"}
    return json.dumps(asked | {"size": f"{scale.side}x{scale.side}"})


@contextmanager
def _image_stack(folder: Path, entry: Model) -> Iterator[Stack]:
    catalog = folder / "models.yaml"
    catalog.write_text(
        yaml.safe_dump({"models": [entry.model_dump(mode="json", exclude_defaults=True)]}),
        encoding="utf-8",
    )
    settings = {"PENSTOCK_MODELS_FILE": str(catalog), "PENSTOCK_PROCESSES": "1"}
    with Stack(folder, ports=Ports.free(1), settings=settings, say=say_nothing) as stack:
        yield stack


def _is_forked(worker_port: int) -> bool:
    """True if the model process is a fork that did not have to re-execute its program."""
    worker = Part(worker_port).pid
    children = psutil.Process(worker).children(recursive=True)
    model = next(one for one in children if one.name() == MODEL_PROCESS_NAME)
    template = next(one for one in children if one.name() == TEMPLATE_NAME)
    # A fork that re-executed its program no longer has the template's command line.
    return model.ppid() == template.pid and model.cmdline() == template.cmdline()


def _ask_images(stack: Stack, bodies: list[str], in_flight: int) -> LoadReport:
    report = drive(
        LoadOrder(
            stack.ports.api,
            bodies,
            in_flight,
            path="/v1/images/generations",
            headers={"x-penstock-deadline-ms": str(int(IMAGES_LIMIT_S * 1000))},
            limit_s=IMAGES_LIMIT_S,
        )
    )
    if report.statuses() != {200: len(bodies)}:
        raise RuntimeError(f"{len(bodies)} images were expected, not {report.statuses()}")
    return report


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
