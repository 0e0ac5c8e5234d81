"""The pipeline's rate as a fraction of the raw model's, with 128 in flight on the same cores.

The load generator, API, broker, Redis, and worker share the cores with the model. Each round times
the raw model and the pipeline on the same texts, one after the other, so other load on the machine
affects both. This is done for torch fp32, for ONNX Runtime fp32, and for the worker's own choice if
that is something else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from bench.pipeline import Pipeline, running
from bench.raw_model import RawModel
from bench.report import Figure, Outcome
from workers.models.backend import Backend

IN_FLIGHT = 128
TEXTS = 600
WARM_UP_TEXTS = 60
ROUNDS = 3
LAYOUTS = ((2, 1), (1, 2))
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
    """Measures the raw model in each layout, and the pipeline. Returns the backend."""
    with ExitStack() as stack:
        pipeline = stack.enter_context(running(changes))
        backend = pipeline.backend()
        raw = [
            stack.enter_context(RawModel(pipeline.model_folder, *layout, backend))
            for layout in LAYOUTS
        ]
        for model in raw:
            model.seconds(pipeline.texts.token_ids(pipeline.texts.mixed(WARM_UP_TEXTS)))
        rounds = [_round(raw, pipeline, backend) for _ in range(ROUNDS)]
    figures += _medians(backend, rounds)
    details[backend.name] = {"rounds": rounds}
    return backend.name


def _medians(backend: Backend, rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    return [
        msgspec.structs.replace(
            figure,
            name=f"{backend.name}: {figure.name}",
            value=statistics.median(of_round[place].value for of_round in rounds),
        )
        for place, figure in enumerate(rounds[0])
    ]


def _round(raw: Sequence[RawModel], pipeline: Pipeline, backend: Backend) -> list[Figure]:
    texts = pipeline.texts.mixed(TEXTS)
    ids = pipeline.texts.token_ids(texts)
    alone = [_raw(model, ids) for model in raw]
    work_before = pipeline.work()
    report, spent_s = pipeline.spend(lambda: pipeline.ask(texts, IN_FLIGHT))
    # Measured again, so that a machine that has slowed down in between doesn't favor the pipeline.
    alone += [_raw(model, ids) for model in raw]
    raw_rate, raw_cpu_ms = max(rate for rate, _ in alone), min(cpu_ms for _, cpu_ms in alone)
    round_trip = report.round_trip()
    real, padded = (now - then for now, then in zip(pipeline.work(), work_before, strict=True))
    costs_ms = {name: 1000 * cpu_s / TEXTS for name, cpu_s in spent_s.items()}
    costs_ms["load generator"] = 1000 * report.cpu_s / TEXTS
    own_cpu_ms, limit = sum(costs_ms.values()), LIMITS_PERCENT.get(backend.name)
    bound = () if limit is None else (">=", limit)
    return [
        Figure("pipeline over raw model", 100 * report.rate / raw_rate, "%", *bound),
        Figure("the same in CPU seconds per text", 100 * raw_cpu_ms / own_cpu_ms, "%"),
        Figure("pipeline", report.rate, "texts/s"),
        Figure("raw model, the better layout", raw_rate, "texts/s"),
        Figure("round trip p50", round_trip["p50"], "ms"),
        Figure("round trip p99", round_trip["p99"], "ms"),
        Figure("padding efficiency", 100 * real / padded, "%", ">=", 95.0),
        *(Figure(f"CPU per request, {name}", cost_ms, "ms") for name, cost_ms in costs_ms.items()),
        Figure("CPU per request, raw model", raw_cpu_ms, "ms"),
    ]


def _raw(model: RawModel, ids: list[list[int]]) -> tuple[float, float]:
    """Returns texts per second, and CPU milliseconds per text."""
    before_s, took_s = model.cpu_s(), model.seconds(ids)
    return len(ids) / took_s, 1000 * (model.cpu_s() - before_s) / len(ids)
