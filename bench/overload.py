"""Ten times the capacity for a minute: refusals, answers in time, and costs.

Capacity is what a closed loop gets out of the same requests beforehand. A request has ITEMS texts
of a page: a refusal costs about the same for any request, and generator and API share the
model's cores, so that ten times as many requests of one short text would measure nothing but those
two. What they take is among the figures.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from bench.load.generator import LoadOrder, LoadReport, drive, percentiles
from bench.pipeline import MODEL, Pipeline, running
from bench.report import Figure, Outcome, table
from infra.load.exchange import LOST, UNCONNECTED

SECONDS = 60.0
BROKEN = (LOST, UNCONNECTED)
CAPACITY_SECONDS = 15.0
IN_FLIGHT = 32
CONNECTIONS = 4000
DRAIN_S = 10.0
ITEMS = 2
BODIES = 64
TIMES = 10.0
DEADLINE_S = 4.0
"""Several times the duration of a full batch. Below twice that, workers idle between batches."""
REFUSED, LATE = 429, 504
UNCACHED = {"cache-control": "no-store"}
MIB = 1 << 20


def run(seconds: float = SECONDS) -> Outcome:
    """Measures capacity, then overloads for `seconds`."""
    with running() as pipeline:
        bodies = _bodies(pipeline)
        asked = LoadOrder(
            pipeline.api.port,
            bodies,
            IN_FLIGHT,
            headers=UNCACHED,
            send_s=min(seconds, CAPACITY_SECONDS),
            is_cycled=True,
            limit_s=DRAIN_S,
        )
        closed, shares = _drive(pipeline, asked)
        capacity, before = _rate(closed, asked.send_s), _memory(pipeline)
        overload = msgspec.structs.replace(
            asked,
            in_flight=CONNECTIONS,
            headers=UNCACHED | {"x-penstock-deadline-ms": f"{1000 * DEADLINE_S:.0f}"},
            send_s=seconds,
            rate_per_s=TIMES * capacity,
        )
        report, taken = _drive(pipeline, overload)
        after = _memory(pipeline)
    goodput = _rate(report, seconds)
    figures = _figures(report, seconds, capacity, goodput)
    figures += [
        Figure(f"{name}, growth", (after[name] - before[name]) / MIB, "MiB") for name in before
    ]
    figures += [Figure(f"CPU, {name}", share, "%") for name, share in taken.items()]
    figures.append(Figure("CPU, worker, model, at capacity", shares["worker, model"], "%"))
    statuses = [one.status for one in report.exchanges]
    details: dict[str, Any] = {
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "memory_before_mib": {name: value / MIB for name, value in before.items()},
        "lag_ms": percentiles(report.lag_ms),
        "answers_by_second": _by_second(report, seconds),
    }
    return Outcome(figures, details)


def _bodies(pipeline: Pipeline) -> list[str]:
    pages = [pipeline.texts.pages(ITEMS) for _ in range(BODIES)]
    bodies = [{"model": MODEL, "input": texts, "encoding_format": "base64"} for texts in pages]
    return [msgspec.json.encode(body).decode() for body in bodies]


def _drive(pipeline: Pipeline, order: LoadOrder) -> tuple[LoadReport, dict[str, float]]:
    """Returns the results of `order`, and the part of all cores that each used, in percent."""
    before_s = pipeline.cpu_s()
    report = drive(order)
    after_s, cores_s = pipeline.cpu_s(), len(os.sched_getaffinity(0)) * report.wall_s
    taken = {name: 100 * (after_s[name] - before_s[name]) / cores_s for name in after_s}
    return report, taken | {"load generator": 100 * report.cpu_s / cores_s}


def _rate(report: LoadReport, seconds: float) -> float:
    """Answers in time per second, of those that came while requests were sent."""
    answered = [one for one in report.exchanges if one.status == 200 and one.ended_s <= seconds]
    return len(answered) / seconds


def _figures(report: LoadReport, seconds: float, capacity: float, goodput: float) -> list[Figure]:
    admitted = [one for one in report.exchanges if one.status not in (REFUSED, *BROKEN)]
    refused = [one for one in report.exchanges if one.status == REFUSED]
    of_admitted = percentiles([one.round_trip_ms for one in admitted])
    of_refused = percentiles([one.round_trip_ms for one in refused])
    return [
        Figure("capacity, closed loop", capacity, "/s"),
        Figure("offered", report.sent / seconds, "/s"),
        Figure("goodput over capacity", 100 * goodput / capacity, "%", ">=", 90.0),
        Figure("admitted and late or failed", sum(one.status != 200 for one in admitted), ""),
        Figure("admitted, p50", of_admitted["p50"], "ms"),
        Figure("admitted, p99", of_admitted["p99"], "ms", "<=", 1000 * DEADLINE_S),
        Figure("refused, p50", of_refused["p50"], "ms"),
        Figure("refused, p99", of_refused["p99"], "ms", "<=", 50.0),
        Figure(
            "refused, p99 by the API's clock",
            percentiles([one.total_ms for one in refused])["p99"],
            "ms",
        ),
        Figure(
            "connections lost", sum(one.status in BROKEN for one in report.exchanges), "", "<=", 0
        ),
        Figure("sent late by the generator, p99", percentiles(report.lag_ms)["p99"], "ms"),
    ]


def _memory(pipeline: Pipeline) -> dict[str, float]:
    return {
        "memory of the API": pipeline.api.rss_bytes(),
        "memory of the worker": pipeline.worker.rss_bytes(),
        "memory of its model processes": sum(pipeline.worker.children_rss_bytes()),
    }


def _by_second(report: LoadReport, seconds: float) -> list[int]:
    answered = [0] * (int(seconds) + 1)
    for one in report.exchanges:
        if one.status == 200 and one.ended_s <= seconds:
            answered[int(one.ended_s)] += 1
    return answered


if __name__ == "__main__":
    print(table({"overload": run(float(sys.argv[1]) if sys.argv[1:] else SECONDS)}))
