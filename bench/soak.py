"""10,000 requests, with 64 in flight: each gets one response and one row, in order of arrival."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from bench.load.generator import LoadOrder, drive, embedding_bodies
from bench.pipeline import MODEL, running
from bench.report import Figure, Outcome, expect_none
from shared.models.catalog_file import read_catalog

REQUESTS = 10_000
IN_FLIGHT = 64
LIMIT_S = 600.0
ROWS_LIMIT_S = 60.0
COLUMNS = ("row_id", "worker", "status", "pulled_at", "started_at")
SIDE_BY_SIDE_MS = 20.0
"""Two model processes receive batches one after another. The OS decides which one starts first."""


def run() -> Outcome:
    with running() as pipeline:
        texts = pipeline.texts.short(REQUESTS)
        bodies = embedding_bodies(MODEL, texts)
        report = drive(LoadOrder(pipeline.api.port, bodies, IN_FLIGHT, limit_s=LIMIT_S))
        request_ids = {exchange.request_id for exchange in report.exchanges}
        rows = pipeline.usage_rows(COLUMNS, request_ids, ROWS_LIMIT_S)
        max_items = (
            read_catalog(pipeline.stack.settings.models_file).find(MODEL).usual_batch.max_items
        )
    late_ms = overtaken_ms(rows, max_items)
    answered = report.statuses().get(200, 0)
    overtaken = sum(late > SIDE_BY_SIDE_MS for late in late_ms)
    figures = [
        Figure("requests answered with 200", answered, "", ">=", REQUESTS),
        Figure("answers to distinct requests", len(request_ids), "", ">=", REQUESTS),
        Figure("rows", len(rows), "", "<=", REQUESTS),
        Figure("distinct rows", len({row["row_id"] for row in rows}), "", ">=", REQUESTS),
        expect_none("rows that did not succeed", sum(row["status"] != "succeeded" for row in rows)),
        expect_none(f"items overtaken by one that came over {max_items} later", overtaken),
        Figure("rate", report.rate, "/s"),
        Figure("round trip p50", report.round_trip()["p50"], "ms"),
        Figure("round trip p99", report.round_trip()["p99"], "ms"),
    ]
    return Outcome(
        figures,
        {"statuses": report.statuses(), "cache": report.hits(), "overtaken_ms": late_ms[:100]},
    )


def overtaken_ms(rows: list[Any], max_items: int) -> list[float]:
    """Returns how much later each item started than one pulled over `max_items` items later."""
    gaps_ms = []
    for _, of_worker in groupby(
        sorted(rows, key=lambda row: (row["worker"], row["pulled_at"])), lambda r: r["worker"]
    ):
        started = [row["started_at"] for row in of_worker if row["started_at"] is not None]
        earliest_after = None
        for place in range(len(started) - 1, -1, -1):
            after = place + max_items + 1
            if after < len(started):
                earliest_after = min(started[after], earliest_after or started[after])
            if earliest_after is not None and started[place] > earliest_after:
                gaps_ms.append((started[place] - earliest_after).total_seconds() * 1000)
    return sorted(gaps_ms, reverse=True)
