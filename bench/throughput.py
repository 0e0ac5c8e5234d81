"""How much of the raw model's speed is left in the pipeline: 128 in flight, texts of mixed length, on the same cores.

Load generator, API, broker, Redis and worker share the cores with the model. Each round times the raw model and the
pipeline on the same texts, one after the other, so that what the machine does meanwhile weighs on both.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

from bench.load import Order, drive
from bench.pipeline import MODEL, Pipeline, running
from bench.raw_model import WAYS, RawModel
from bench.report import Figure, Outcome

IN_FLIGHT = 128
TEXTS = 1200
CHOICE_TEXTS = 400
ROUNDS = 3
LAYOUTS = ((2, 1), (1, 2))
"""Processes and threads of each: the ways to put the model on two cores."""


def run() -> Outcome:
    """Finds the raw model's best way, then measures it and the pipeline side by side."""
    with ExitStack() as stack:
        pipeline = stack.enter_context(running())
        folder = pipeline.model_folder
        raw = {layout: stack.enter_context(RawModel(folder, *layout)) for layout in LAYOUTS}
        rates = _rates(raw, pipeline)
        layout, way = max(rates, key=lambda pair: rates[pair])
        rounds = [_round(raw[layout], way, pipeline) for _ in range(ROUNDS)]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    figures = [
        Figure("pipeline over raw model", middle["ratio_percent"], "%", ">=", 75.0),
        Figure("pipeline", middle["pipeline_rate"], "texts/s"),
        Figure(f"raw model ({layout[0]} processes, {layout[1]} threads, {way})", middle["raw_rate"], "texts/s"),
        Figure("round trip p50", middle["p50_ms"], "ms"),
        Figure("round trip p99", middle["p99_ms"], "ms"),
        Figure("padding efficiency", middle["padding_percent"], "%"),
    ]
    figures += [
        Figure(f"CPU per request, {name.removeprefix('cpu_ms ')}", value, "ms")
        for name, value in middle.items()
        if name.startswith("cpu_ms ")
    ]
    ways = {f"{pair[0][0]}x{pair[0][1]} {pair[1]}": round(rate, 1) for pair, rate in rates.items()}
    return Outcome(figures, {"rounds": rounds, "raw_texts_per_s": ways})


def _rates(raw: dict[tuple[int, int], RawModel], pipeline: Pipeline) -> dict[tuple[tuple[int, int], str], float]:
    """Texts per second of each layout in each way, the better of two tries."""
    ids = pipeline.texts.token_ids(pipeline.texts.mixed(CHOICE_TEXTS))
    return {
        (layout, way): max(CHOICE_TEXTS / model.seconds(ids, way) for _ in range(2))
        for layout, model in raw.items()
        for way in WAYS
    }


def _round(raw: RawModel, way: str, pipeline: Pipeline) -> dict[str, Any]:
    texts = pipeline.texts.mixed(TEXTS)
    # Before and after: a machine that slows down meanwhile would else count for or against the pipeline.
    ids = pipeline.texts.token_ids(texts)
    before_s = raw.seconds(ids, way)
    cpu_before, work_before = pipeline.cpu_s(), pipeline.work()
    report = drive(Order(pipeline.api.port, MODEL, texts, IN_FLIGHT))
    cpu_after, work_after = pipeline.cpu_s(), pipeline.work()
    after_s = raw.seconds(ids, way)
    if report.statuses() != {200: TEXTS} or report.hits() != {"miss": TEXTS}:
        raise RuntimeError(f"{TEXTS} misses were expected, not {report.statuses()} {report.hits()}")
    raw_rate = TEXTS / ((before_s + after_s) / 2)
    round_trip = report.round_trip()
    return {
        "ratio_percent": 100 * report.rate / raw_rate,
        "pipeline_rate": report.rate,
        "raw_rate": raw_rate,
        "p50_ms": round_trip["p50"],
        "p99_ms": round_trip["p99"],
        "padding_percent": 100 * (work_after.real - work_before.real) / (work_after.padded - work_before.padded),
        **{f"cpu_ms {name}": 1000 * (cpu_after[name] - cpu_before[name]) / TEXTS for name in cpu_after},
        "cpu_ms load generator": 1000 * report.cpu_s / TEXTS,
    }
