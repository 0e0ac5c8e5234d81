"""The pipeline's overhead for short texts, by requests in flight: round trip minus model time."""

from __future__ import annotations

from bench.pipeline import running
from bench.report import Figure, Outcome

REQUESTS = {1: 400, 8: 800, 32: 1600, 128: 2560}
ROUNDS = 3
"""The fastest round is reported, because disturbances on a machine can only add time."""


def run() -> Outcome:
    figures: list[Figure] = []
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
    return Outcome(figures)
