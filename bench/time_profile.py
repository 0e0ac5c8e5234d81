"""The time of a request: phases and CPU of each process, by requests in flight.

Each phase is between two times in the request's row, so the phases of one request add
up to its round trip. Shown are means over the middle fifth of the requests by round trip: medians
of phases would not add up. All clocks are the same machine's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.pipeline import Pipeline, running
from bench.report import Figure, Outcome
from penstock_load.exchange import Exchange

REQUESTS = {1: 300, 32: 640, 128: 768}
MIDDLE = (0.4, 0.6)
OWN = ("API", "broker", "worker, I/O", "Redis")
"""The parts that count as the pipeline. Rows are written in the background."""
OWN_LIMIT_MS = 2.5
BUSY_LIMIT_PERCENT = 90.0
ROWS_LIMIT_S = 30.0
MOMENTS = ("received_at", "published_at", "pulled_at", "started_at", "finished_at", "replied_at")
PHASES = {
    "API: received to published": ("received_at", "published_at"),
    "jobs topic: published to pulled": ("published_at", "pulled_at"),
    "worker: pulled to model": ("pulled_at", "started_at"),
    "model": ("started_at", "finished_at"),
    "worker: model to reply": ("finished_at", "replied_at"),
    "inbox: reply to answer": ("replied_at", "answered_at"),
}
Row = dict[str, float]
"""The moments of one request, in unix seconds."""


def run() -> Outcome:
    """Profiles texts of mixed length at 1, 32 and 128 in flight, all of them misses."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    with running() as pipeline:
        for in_flight, count in REQUESTS.items():
            measured, detail = _profile(pipeline, in_flight, count)
            figures += measured
            details[str(in_flight)] = detail
    return Outcome(figures, details)


def _profile(pipeline: Pipeline, in_flight: int, count: int) -> tuple[list[Figure], dict[str, Any]]:
    texts = pipeline.texts.mixed(count)
    cpu_before = pipeline.cpu_s()
    report = pipeline.ask(texts, in_flight, cache="miss")
    cpu_after = pipeline.cpu_s()
    rows = moments(pipeline, {exchange.request_id for exchange in report.exchanges})
    where = f"at {in_flight} in flight"
    costs_ms = {name: 1000 * (cpu_after[name] - cpu_before[name]) / count for name in cpu_after}
    costs_ms["load generator"] = 1000 * report.cpu_s / count
    busy_percent = (
        100 * model_busy_s(rows) / report.wall_s / max(1, len(pipeline.worker.children_rss_bytes()))
    )
    figures = [
        Figure(f"{name}, {where}", value, "ms")
        for name, value in phases_ms(report.exchanges, rows).items()
    ]
    figures += [Figure(f"CPU of {name}, {where}", value, "ms") for name, value in costs_ms.items()]
    is_asked = in_flight == max(REQUESTS)
    own_ms = sum(costs_ms[name] for name in OWN)
    figures += [
        Figure(
            f"CPU of {', '.join(OWN)}, {where}",
            own_ms,
            "ms",
            *(("<=", OWN_LIMIT_MS) if is_asked else ()),
        ),
        Figure(
            f"model busy {where}",
            busy_percent,
            "%",
            *((">=", BUSY_LIMIT_PERCENT) if is_asked else ()),
        ),
    ]
    return figures, {
        "round_trip_ms": report.round_trip(),
        "rate": report.rate,
        "requests_with_rows": len(rows),
    }


def phases_ms(exchanges: Sequence[Exchange], rows: dict[str, Row]) -> dict[str, float]:
    """Milliseconds of each phase, the remainder and the round trip: means of the middle requests.

    Args:
        exchanges: as the load generator timed them.
        rows: their MOMENTS by request id. A request without them is left out.
    """
    known = sorted(
        (one for one in exchanges if one.request_id in rows), key=lambda one: one.round_trip_ms
    )
    low, high = (int(len(known) * share) for share in MIDDLE)
    middle = known[low : max(high, low + 1)]
    shares: dict[str, float] = {
        "HTTP outside the API": statistics.fmean(e.round_trip_ms - e.total_ms for e in middle)
    }
    for name, (begin, end) in PHASES.items():
        took_ms = []
        for exchange in middle:
            row = rows[exchange.request_id]
            row = {**row, "answered_at": row["received_at"] + exchange.total_ms / 1000}
            took_ms.append((row[end] - row[begin]) * 1000)
        shares[name] = statistics.fmean(took_ms)
    round_trip_ms = statistics.fmean(exchange.round_trip_ms for exchange in middle)
    return {
        **shares,
        "remainder": round_trip_ms - sum(shares.values()),
        "round trip": round_trip_ms,
    }


def model_busy_s(rows: dict[str, Row]) -> float:
    """Seconds that model processes ran in total. A batch counts once."""
    return sum(
        end - begin
        for begin, end in {(row["started_at"], row["finished_at"]) for row in rows.values()}
    )


def moments(pipeline: Pipeline, request_ids: set[str]) -> dict[str, Row]:
    """The MOMENTS of the requests that a worker ran, once BigQuery has all their rows.

    Raises:
        TimeoutError: it has not within ROWS_LIMIT_S.
    """
    rows = pipeline.usage_rows(MOMENTS, request_ids, ROWS_LIMIT_S)
    shares = {
        row["request_id"]: {moment: row[moment].timestamp() for moment in MOMENTS}
        for row in rows
        if row["started_at"] is not None
    }
    if len(shares) < len(request_ids):
        raise TimeoutError(
            f"BigQuery has {len(shares)} of {len(request_ids)} rows after {ROWS_LIMIT_S:g} s"
        )
    return shares
