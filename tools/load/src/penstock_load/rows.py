"""Queries BigQuery about a replay: its rows, the `usage_hours` report, and other usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from importlib import resources
from typing import Any, NamedTuple

from shared.reports.definitions import ReportQuestion, find_report
from shared.reports.runner import RETRY_LIMIT_S, ReportRunner, translate_errors
from shared.settings import Settings
from shared.usage.bigquery import open_client

QUERY_LIMIT_S = 120.0


class RowOfLoad(NamedTuple):
    """A row of a replay, as selected by check.sql."""

    client_request_id: str
    request_id: str
    row_id: str
    item: int
    tenant: str | None
    model: str
    key_id: str | None
    status: str
    error_code: str | None
    tokens: int | None
    pixel_steps: int | None
    cost_usd: float | None
    received_at: datetime
    cache: str | None
    copies: int
    """Number of times it was written."""
    flow: str | None = None
    """The flow that requested the item."""
    step: str | None = None


class UsageGroup(NamedTuple):
    """A tenant's usage of a model in one hour."""

    hour: datetime
    tenant: str | None
    model: str
    requests: int
    refused: int
    items: int
    succeeded: int
    tokens: int
    pixel_steps: int
    cost_usd: float


class LoadRows:
    """Queries one dataset. Calls block.

    Args:
        most_bytes: maximum bytes that a query may read; larger queries are rejected.
    """

    def __init__(self, client: Any, dataset: str, most_bytes: int) -> None:
        self._client = client
        self._dataset = dataset
        self._most_bytes = most_bytes

    def of_run(self, run: str, since: datetime, until: datetime) -> list[RowOfLoad]:
        """Returns the rows of a replay, without duplicates.

        Raises:
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        rows = self._ask("check.sql", since, until, run)
        return [RowOfLoad(*row) for row in rows]

    def of_others(
        self, run: str, since: datetime, until: datetime, tenants: Sequence[str]
    ) -> list[UsageGroup]:
        """Returns usage by these tenants outside the replay.

        Raises:
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        return [UsageGroup(*row) for row in self._ask("others.sql", since, until, run, tenants)]

    def read_report(
        self, since: datetime, until: datetime, tenants: Sequence[str]
    ) -> list[UsageGroup]:
        """Returns the `usage_hours` report for these tenants.

        Raises:
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        runner = ReportRunner(self._client, self._dataset, self._most_bytes)
        question = ReportQuestion(since, until, tenants=tuple(tenants))
        result = runner.run(find_report("usage_hours"), question, limit_s=QUERY_LIMIT_S)
        return [_group_of(record) for record in result.records()]

    def _ask(
        self,
        file: str,
        since: datetime,
        until: datetime,
        run: str,
        tenants: Sequence[str] | None = None,
    ) -> list[tuple[Any, ...]]:
        from google.cloud.bigquery import (
            DEFAULT_RETRY,
            ArrayQueryParameter,
            QueryJobConfig,
            ScalarQueryParameter,
        )

        parameters: list[Any] = [
            ScalarQueryParameter("since", "TIMESTAMP", since),
            ScalarQueryParameter("until", "TIMESTAMP", until),
            ScalarQueryParameter("run", "STRING", run),
        ]
        if tenants is not None:
            parameters.append(ArrayQueryParameter("tenants", "STRING", list(tenants)))
        config = QueryJobConfig(
            default_dataset=f"{self._client.project}.{self._dataset}",
            maximum_bytes_billed=self._most_bytes,
            query_parameters=parameters,
        )
        sql = resources.files("penstock_load").joinpath(file).read_text(encoding="utf-8")
        with translate_errors():
            retry = DEFAULT_RETRY.with_timeout(RETRY_LIMIT_S)
            job = self._client.query(
                sql, job_config=config, retry=retry, job_retry=None, timeout=QUERY_LIMIT_S
            )
            result = job.result(retry=retry, job_retry=None, timeout=QUERY_LIMIT_S)
            return [tuple(row.values()) for row in result]


def _group_of(record: Mapping[str, Any]) -> UsageGroup:
    # For example, a sum over rows without tokens is NULL.
    sums = (record[name] or 0 for name in UsageGroup._fields[3:])
    place: tuple[Any, ...] = (record["hour"], record["tenant"], record["model"])
    return UsageGroup(*place, *sums)


@contextmanager
def open_rows(settings: Settings, most_bytes: int) -> Iterator[LoadRows]:
    """Opens the configured rows with a separate client.

    Raises:
        Unavailable: no credentials were found.
    """
    with translate_errors():
        client = open_client(settings.project, settings.bigquery_endpoint)
    with closing(client):
        yield LoadRows(client, settings.dataset, most_bytes)
