"""The pipeline's rate as a fraction of the raw model's, with 128 in flight on the same cores.

The load generator, API, broker, Redis, and worker share the cores with the model. Each round times
the raw model and the pipeline on the same texts, one after the other, so other load on the machine
affects both. This is done for torch fp32, for ONNX Runtime fp32, and for the worker's own choice if
that is something else.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import Any

import msgspec

from bench.pipeline import Pipeline, running
from bench.raw_model import WAYS, RawModel
from bench.report import Figure, Outcome
from workers.models.backend import Backend

IN_FLIGHT = 128
TEXTS = 600
CHOICE_TEXTS = 240
ROUNDS = 3
Layout = tuple[int, int]
LAYOUTS: tuple[Layout, ...] = ((2, 1), (1, 2))
"""Number of processes and threads in each layout: ways to run the model on two cores."""
LIMITS_PERCENT = {"torch-fp32": 75.0, "onnx-fp32": 65.0}
"""Minimum rate as a fraction of the raw model's. The faster the model, the more the pipeline's
overhead matters.
"""


def run() -> Outcome:
    figures: list[Figure] = []
    details: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    chosen = _measure({}, figures, details)
    for backend in ("torch", "onnx"):
        if chosen != f"{backend}-fp32":
            _measure({"backend": backend, "precision": "fp32"}, figures, details)
    return Outcome(figures, {**details, "chosen": chosen})


def _measure(changes: dict[str, object], figures: list[Figure], details: dict[str, Any]) -> str:
    """Finds the best way of batching for the raw model, then measures that and the pipeline.

    Returns the backend.
    """
    with ExitStack() as stack:
        pipeline = stack.enter_context(running(changes))
        backend = pipeline.backend()
        raw = {
            layout: stack.enter_context(RawModel(pipeline.model_folder, *layout, backend))
            for layout in LAYOUTS
        }
        rates = _rates(raw, pipeline)
        ways = {layout: max(WAYS, key=lambda way: rates[layout, way]) for layout in LAYOUTS}
        rounds = [_round(raw, ways, pipeline) for _ in range(ROUNDS)]
    figures += _figures(backend, rounds)
    tried = {
        f"{processes} x {threads}, {way}": round(rate, 1)
        for ((processes, threads), way), rate in rates.items()
    }
    details[backend.name] = {"rounds": rounds, "raw_texts_per_s": tried}
    return backend.name


def _figures(backend: Backend, rounds: list[dict[str, Any]]) -> list[Figure]:
    middle = {name: statistics.median(costs[name] for costs in rounds) for name in rounds[0]}
    limit = LIMITS_PERCENT.get(backend.name)
    ratio = "pipeline over raw model", middle["ratio_percent"], "%"
    figures = [
        Figure(*ratio) if limit is None else Figure(*ratio, ">=", limit),
        Figure("the same in CPU seconds per text", middle["cpu_ratio_percent"], "%"),
        Figure("pipeline", middle["pipeline_rate"], "texts/s"),
        Figure("raw model, the better layout", middle["raw_rate"], "texts/s"),
        Figure("round trip p50", middle["p50_ms"], "ms"),
        Figure("round trip p99", middle["p99_ms"], "ms"),
        Figure("padding efficiency", middle["padding_percent"], "%", ">=", 95.0),
    ]
    figures += [
        Figure(f"CPU per request, {name.removeprefix('cpu_ms ')}", value, "ms")
        for name, value in middle.items()
        if name.startswith("cpu_ms ")
    ]
    return [
        msgspec.structs.replace(figure, name=f"{backend.name}: {figure.name}") for figure in figures
    ]


def _rates(raw: dict[Layout, RawModel], pipeline: Pipeline) -> dict[tuple[Layout, str], float]:
    """Returns texts per second for each layout and way of batching, after a warm-up run."""
    ids = pipeline.texts.token_ids(pipeline.texts.mixed(CHOICE_TEXTS))
    for model in raw.values():
        model.seconds(ids[: CHOICE_TEXTS // 4], WAYS[0])
    return {
        (layout, way): CHOICE_TEXTS / model.seconds(ids, way)
        for layout, model in raw.items()
        for way in WAYS
    }


def _round(
    raw: dict[Layout, RawModel], ways: dict[Layout, str], pipeline: Pipeline
) -> dict[str, Any]:
    texts = pipeline.texts.mixed(TEXTS)
    ids = pipeline.texts.token_ids(texts)
    alone = [_raw(model, ids, ways[layout]) for layout, model in raw.items()]
    cpu_before, work_before = pipeline.cpu_s(), pipeline.work()
    report = pipeline.ask(texts, IN_FLIGHT)
    cpu_after, work_after = pipeline.cpu_s(), pipeline.work()
    # Measured again, so that a machine that has slowed down in between doesn't favor the pipeline.
    alone += [_raw(model, ids, ways[layout]) for layout, model in raw.items()]
    raw_rate, raw_cpu_ms = max(rate for rate, _ in alone), min(cpu_ms for _, cpu_ms in alone)
    round_trip = report.round_trip()
    real, padded = (now - then for now, then in zip(work_after, work_before, strict=True))
    costs = {
        f"cpu_ms {name}": 1000 * (cpu_after[name] - cpu_before[name]) / TEXTS for name in cpu_after
    }
    costs["cpu_ms load generator"] = 1000 * report.cpu_s / TEXTS
    return {
        "ratio_percent": 100 * report.rate / raw_rate,
        "cpu_ratio_percent": 100 * raw_cpu_ms / sum(costs.values()),
        "pipeline_rate": report.rate,
        "raw_rate": raw_rate,
        "p50_ms": round_trip["p50"],
        "p99_ms": round_trip["p99"],
        "padding_percent": 100 * real / padded,
        **costs,
        "cpu_ms raw model": raw_cpu_ms,
    }


def _raw(model: RawModel, ids: list[list[int]], way: str) -> tuple[float, float]:
    """Returns texts per second, and CPU milliseconds per text."""
    before_s, took_s = model.cpu_s(), model.seconds(ids, way)
    return len(ids) / took_s, 1000 * (model.cpu_s() - before_s) / len(ids)
