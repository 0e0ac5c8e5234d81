"""One reply subscription per request in flight (80 slots) compared with one per instance."""

from __future__ import annotations

import statistics
from typing import Any

from bench.pipeline import Part, Pipeline, running
from bench.report import Figure, Outcome

SLOTS = (80, 1)
REQUESTS = {1: 300, 64: 1280}
ROUNDS = 3


def run() -> Outcome:
    """Alternates between two APIs on one pipeline, round by round."""
    seen: dict[tuple[int, int], list[dict[str, float]]] = {}
    with (
        running(reply_slots=SLOTS[0]) as pipeline,
        pipeline.another_api(reply_slots=SLOTS[1]) as shared,
    ):
        for _ in range(ROUNDS):
            for in_flight, count in REQUESTS.items():
                for slots, api in zip(SLOTS, (pipeline.api, shared), strict=True):
                    seen.setdefault((in_flight, slots), []).append(
                        _measure(pipeline, api, in_flight, count)
                    )
    figures: list[Figure] = []
    for (in_flight, slots), rounds in seen.items():
        for figure, unit in (
            ("overhead p50", "ms"),
            ("overhead p99", "ms"),
            ("rate", "/s"),
            ("CPU per request", "ms"),
        ):
            value = statistics.median(one[figure] for one in rounds)
            figures.append(Figure(f"{slots} slots, {in_flight} in flight, {figure}", value, unit))
    details: dict[str, Any] = {
        f"{slots} slots at {in_flight}": rounds for (in_flight, slots), rounds in seen.items()
    }
    return Outcome(figures, details)


def _measure(pipeline: Pipeline, api: Part, in_flight: int, count: int) -> dict[str, float]:
    texts = pipeline.texts.short(count)
    before_s = api.cpu_s() + pipeline.cpu_s()["Pub/Sub"]
    report = pipeline.ask(texts, in_flight, cache="miss", port=api.port)
    after_s = api.cpu_s() + pipeline.cpu_s()["Pub/Sub"]
    overhead = report.overhead()
    return {
        "overhead p50": overhead["p50"],
        "overhead p99": overhead["p99"],
        "rate": report.rate,
        "CPU per request": 1000 * (after_s - before_s) / count,
    }
