"""10,000 requests, 64 in flight: each answered once, each with exactly one row, in the order of their arrival."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from bench.load.closed_loop import Order, drive
from bench.pipeline import MODEL, Pipeline, running
from bench.report import Figure, Outcome
from shared.catalog import read_catalog

REQUESTS = 10_000
IN_FLIGHT = 64
LIMIT_S = 600.0
ROWS_LIMIT_S = 60.0
POLL_S = 0.5
SIDE_BY_SIDE_MS = 20.0
"""Two model processes get their batches one after the other, and the scheduler decides which starts first."""


def run() -> Outcome:
    """Sends all requests, waits for their rows, and counts what is missing, doubled or out of order."""
    with running() as pipeline:
        texts = pipeline.texts.short(REQUESTS)
        report = drive(Order(pipeline.api.port, MODEL, texts, IN_FLIGHT, limit_s=LIMIT_S))
        request_ids = {exchange.request_id for exchange in report.exchanges}
        rows = _rows(pipeline, request_ids)
        max_items = read_catalog(pipeline.stack.settings.models_file).find(MODEL).batch.max_items
    late_ms = overtaken_ms(rows, max_items)
    answered = report.statuses().get(200, 0)
    overtaken = sum(one > SIDE_BY_SIDE_MS for one in late_ms)
    figures = [
        Figure("requests answered with 200", answered, "", ">=", REQUESTS),
        Figure("answers to distinct requests", len(request_ids), "", ">=", REQUESTS),
        Figure("rows", len(rows), "", "<=", REQUESTS),
        Figure("distinct rows", len({row["row_id"] for row in rows}), "", ">=", REQUESTS),
        Figure("rows that did not succeed", sum(row["status"] != "succeeded" for row in rows), "", "<=", 0),
        Figure(f"items overtaken by one that came over {max_items} later", overtaken, "", "<=", 0),
        Figure("rate", report.rate, "/s"),
        Figure("round trip p50", report.round_trip()["p50"], "ms"),
        Figure("round trip p99", report.round_trip()["p99"], "ms"),
    ]
    return Outcome(figures, {"statuses": report.statuses(), "cache": report.hits(), "overtaken_ms": late_ms[:100]})


def _rows(pipeline: Pipeline, request_ids: set[str]) -> list[Any]:
    """The rows of the requests as BigQuery has them, once there are as many, or after the limit."""
    settings = pipeline.stack.settings
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    query = (
        f"SELECT row_id, request_id, worker, status, pulled_at, started_at FROM `{settings.dataset}.rows` "
        "WHERE received_at >= TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY)"
    )
    deadline_s = time.monotonic() + ROWS_LIMIT_S
    while True:
        result = client.query(query).result(timeout=ROWS_LIMIT_S)
        rows = [row for row in result if row["request_id"] in request_ids]
        if len(rows) >= len(request_ids) or time.monotonic() > deadline_s:
            return rows
        time.sleep(POLL_S)


def overtaken_ms(rows: list[Any], max_items: int) -> list[float]:
    """By how much each item started after one that its worker pulled more than `max_items` items later."""
    found = []
    for _, of_worker in groupby(sorted(rows, key=lambda row: (row["worker"], row["pulled_at"])), lambda r: r["worker"]):
        started = [row["started_at"] for row in of_worker if row["started_at"] is not None]
        earliest_after = None
        for place in range(len(started) - 1, -1, -1):
            after = place + max_items + 1
            if after < len(started):
                earliest_after = min(started[after], earliest_after or started[after])
            if earliest_after is not None and started[place] > earliest_after:
                found.append((started[place] - earliest_after).total_seconds() * 1000)
    return sorted(found, reverse=True)
