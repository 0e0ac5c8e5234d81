"""The pipeline's overhead for short texts, by requests in flight: round trip minus model time."""

from __future__ import annotations

from typing import Any

from bench.load.generator import LoadReport, percentiles
from bench.pipeline import running
from bench.report import Figure, Outcome

REQUESTS = {1: 400, 8: 800, 32: 1600, 128: 2560}
ROUNDS = 3
"""The fastest round is reported, because disturbances on a machine can only add time."""


def run() -> Outcome:
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    with running() as pipeline:
        for in_flight, count in REQUESTS.items():
            rounds = [pipeline.ask(pipeline.texts.short(count), in_flight) for _ in range(ROUNDS)]
            report = min(rounds, key=lambda one: one.overhead()["p50"])
            name = f"overhead at {in_flight} in flight"
            for part, value in report.overhead().items():
                is_asked = (in_flight, part) == (1, "p50")
                figures.append(
                    Figure(f"{name}, {part}", value, "ms", *(("<=", 5.0) if is_asked else ()))
                )
            figures.append(Figure(f"rate at {in_flight} in flight", report.rate, "/s"))
            details[str(in_flight)] = _split(report) | {
                "p50_of_rounds_ms": [r.overhead()["p50"] for r in rounds]
            }
    return Outcome(figures, details)


def _split(report: LoadReport) -> dict[str, Any]:
    """Returns the components of a round trip, taken from the response headers."""
    exchanges = report.exchanges
    return {
        "round_trip_ms": report.round_trip(),
        "queue_ms": percentiles([exchange.queue_ms for exchange in exchanges]),
        "batch_wait_ms": percentiles([exchange.batch_ms for exchange in exchanges]),
        "inference_ms": percentiles([exchange.inference_ms for exchange in exchanges]),
        "outside_the_api_ms": percentiles(
            [exchange.round_trip_ms - exchange.total_ms for exchange in exchanges]
        ),
    }
