"""Adds up rows in memory, as BigQuery would (api/limits/spent.sql)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from api.limits.counters import month_of
from api.limits.spent import SpentQuestion
from shared.usage.row import Row


def once(rows: Iterable[Row]) -> list[Row]:
    """Returns each row_id once, as in reports (infra/bigquery/views/rows_deduplicated.sql)."""

    def order(row: Row) -> tuple[bool, float, float]:
        attempt = -math.inf if row.attempt is None else row.attempt
        return row.status == "succeeded", -attempt, -(row.replied_at_s or 0.0)

    found: dict[tuple[float, str], Row] = {}
    for row in sorted(rows, key=order):
        found.setdefault((row.received_at_s, row.row_id), row)
    return list(found.values())


class RowSums:
    """A SpentReader over lists of rows that may grow.

    Args:
        row_lists: the rows that have arrived.
    """

    def __init__(self, row_lists: Iterable[Sequence[Row]]) -> None:
        self._row_lists = row_lists

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        rows = once(row for rows in list(self._row_lists) for row in list(rows))
        return [(_sum(rows, one, month), _sum(rows, one, month - 1)) for one in questions]


def _sum(rows: Sequence[Row], question: SpentQuestion, month: int) -> float:
    (tenant, key_id), before_s = question
    return sum(
        row.cost_usd or 0.0
        for row in rows
        if row.tenant == tenant
        and key_id in ("", row.key_id)
        and month_of(row.received_at_s) == month
        and (row.replied_at_s or row.received_at_s) < before_s
    )
