"""What a cache hit costs: answered from the API's memory, and from Redis by an API that keeps nothing in memory."""

from __future__ import annotations

from bench.load.closed_loop import Order, Report, drive
from bench.pipeline import MODEL, Pipeline, running
from bench.report import Figure, Outcome

TEXTS = 400
REPEATS = 10
IN_FLIGHT = (1, 32)
ROUNDS = 3


def run() -> Outcome:
    """Fills the cache, then asks for the same texts again and again at both levels."""
    figures = []
    with running() as pipeline, pipeline.another_api(memory_cache_bytes=0) as forgetful:
        texts = pipeline.texts.short(TEXTS)
        drive(Order(pipeline.api.port, MODEL, texts, 32))
        for level, port in (("memory", pipeline.api.port), ("Redis", forgetful.port)):
            for in_flight in IN_FLIGHT:
                report = max((_measure(pipeline, port, texts, in_flight) for _ in range(ROUNDS)), key=lambda r: r.rate)
                name = f"{level} hits at {in_flight} in flight"
                bound = ("<=", 3.0) if in_flight == 1 else ()
                figures.append(Figure(f"{name}, p50", report.round_trip()["p50"], "ms", *bound))
                figures.append(Figure(f"{name}, p99", report.round_trip()["p99"], "ms"))
                figures.append(Figure(f"{name}, rate", report.rate, "/s"))
    return Outcome(figures)


def _measure(pipeline: Pipeline, port: int, texts: list[str], in_flight: int) -> Report:
    report = drive(Order(port, MODEL, texts * REPEATS, in_flight))
    if report.statuses() != {200: TEXTS * REPEATS} or report.hits() != {"hit": TEXTS * REPEATS}:
        raise RuntimeError(f"only hits were expected, not {report.statuses()} {report.hits()}")
    return report
