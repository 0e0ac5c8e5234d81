"""Runs reports for callers, under the same concurrency limits as usage queries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from api.usage.turns import QueryPermits
from shared.reports.definitions import Report
from shared.reports.question import ReportQuestion
from shared.reports.runner import ReportResult, ReportRunner, translated_errors
from shared.usage.bigquery import open_client

QUERY_LIMIT_S = 20.0
MAX_ROWS = 5_000
"""Maximum number of rows in a response."""


class ReportDataset(NamedTuple):
    """The dataset of the rows, and the maximum bytes that a query may read."""

    project: str
    dataset: str
    endpoint: str
    """URL of an embedded BigQuery. Empty for Google's."""
    most_bytes: int


class ReportService:
    """Answers reports.

    Args:
        dataset: the data set.
        turns: the limits shared by all usage queries.
    """

    def __init__(self, dataset: ReportDataset, turns: QueryPermits) -> None:
        self._dataset = dataset
        self._turns = turns
        self._client: Any = None
        self._running: set[asyncio.Task[ReportResult]] = set()

    async def run(
        self,
        report: Report,
        question: ReportQuestion,
        tenant: str,
        budgets_usd: Mapping[str, float],
    ) -> ReportResult:
        """Runs one report for `tenant`.

        Raises:
            BadInput: the report does not support the filter, or the result has too many rows.
            Overloaded: too many queries are running.
            Unavailable: BigQuery is out of reach, or refused.
        """
        self._turns.claim(tenant)
        reading = self._turns.run(tenant, self._read, report, question, budgets_usd)
        task = asyncio.create_task(reading)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A thread can't be stopped: the permit is held until its query ends, even after a hang-up.
        # BigQuery ends it after QUERY_LIMIT_S.
        return await asyncio.shield(task)

    def _read(
        self, report: Report, question: ReportQuestion, budgets_usd: Mapping[str, float]
    ) -> ReportResult:
        if self._client is None:
            with translated_errors():
                self._client = open_client(self._dataset.project, self._dataset.endpoint)
        runner = ReportRunner(
            self._client,
            self._dataset.dataset,
            self._dataset.most_bytes,
            budgets_usd,
            most_rows=MAX_ROWS,
        )
        return runner.run(report, question, limit_s=QUERY_LIMIT_S)
