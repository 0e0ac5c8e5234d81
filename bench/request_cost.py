"""CPU time per request with one short text, excluding the model and broker, with 128 in flight.

The CPU time of the API, the worker's I/O process, and Redis is what a deployment pays for per
request on machines without a GPU. The load generator, broker, and model share the cores, so their
load increases this number through CPU cache contention. The result is the median of the rounds.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from bench.pipeline import Pipeline, running
from bench.report import Figure, Outcome

IN_FLIGHT = 128
TEXTS = 3000
ROUNDS = 5
MAX_MS = 0.8
COUNTED = ("API", "worker, I/O", "Redis")


def run() -> Outcome:
    load_before = os.getloadavg()[0]
    with running() as pipeline:
        backend = pipeline.backend().name
        rounds = [_round(pipeline) for _ in range(ROUNDS)]
    middle = {name: statistics.median(costs[name] for costs in rounds) for name in rounds[0]}
    together = [sum(costs[name] for name in COUNTED) for costs in rounds]
    figures = [
        *(Figure(f"CPU per request, {name}", middle[name], "ms") for name in COUNTED),
        Figure("CPU per request, together", statistics.median(together), "ms", "<=", MAX_MS),
        Figure("requests", middle["requests_per_s"], "/s"),
    ]
    details: dict[str, Any] = {"backend": backend, "load_before": load_before, "rounds": rounds}
    return Outcome(figures, details)


def _round(pipeline: Pipeline) -> dict[str, float]:
    """Returns each component's CPU milliseconds per request, and the requests per second."""
    texts = pipeline.texts.short(TEXTS)
    report, spent_s = pipeline.spend(lambda: pipeline.ask(texts, IN_FLIGHT))
    costs = {name: 1000 * cpu_s / TEXTS for name, cpu_s in spent_s.items()}
    return {"requests_per_s": report.rate, **costs}
