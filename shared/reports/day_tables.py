"""The tables that are made from rows a day at a time: `daily_usage` and `anomalies`.

A day is one partition. A query writes into it with WRITE_TRUNCATE, which BigQuery does as a whole
or not at all. So whoever repeats a day replaces it, and nobody reads half of one.
https://docs.cloud.google.com/bigquery/docs/managing-partitioned-table-data
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import BadInput
from shared.reports.days import BillingDay
from shared.reports.runner import (
    MOST_BYTES,
    MOST_ROWS,
    QUERY_LIMIT_S,
    RETRY_LIMIT_S,
    translated_errors,
)

if TYPE_CHECKING:
    from google.cloud.bigquery import Client

DAILY_USAGE, ANOMALIES = "daily_usage", "anomalies"
LIMITS: Mapping[str, int | float] = {
    "least_weeks": 4,
    "least_usd": 1.0,
    "least_errors": 10.0,
    "least_share": 0.5,
}
"""What an anomaly needs besides its score: hours of earlier weeks to compare with, and a distance
from their median in dollars or errors, and as a share of it."""
_TYPES = {str: "STRING", int: "INT64", float: "FLOAT64", date: "DATE", datetime: "TIMESTAMP"}


class Anomaly(NamedTuple):
    """An hour outside the usual band of that hour of the week."""

    hour: datetime
    scope: str
    """all, or tenant."""
    tenant: str | None
    measure: str
    """cost_usd, or errors."""
    direction: str
    """high, or low."""
    value: float
    median: float
    low: float
    high: float
    score: float | None
    weeks: int


class DayTables:
    """Writes and reads these tables. Calls block, so a server runs them on threads.

    Args:
        client: Google's client. Open.
        dataset: the id of the data set.
        most_bytes: a query that would read more is refused.
        most_rows: an answer with more is refused. It is kept in memory.
    """

    def __init__(
        self,
        client: Client,
        dataset: str,
        most_bytes: int = MOST_BYTES,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self._client = client
        self._dataset = dataset
        self._most_bytes = most_bytes
        self._most_rows = most_rows

    def write_usage(self, day: BillingDay, limit_s: float = QUERY_LIMIT_S) -> None:
        """Sums up a day in `daily_usage`.

        Raises:
            Unavailable: BigQuery is out of reach or refused. The table is as it was, or done.
        """
        ends = {"since": day.since, "until": day.until, "tz": day.tz}
        self._replace(DAILY_USAGE, day.day, ends, limit_s)

    def write_anomalies(
        self, day: BillingDay, until: datetime, limit_s: float = QUERY_LIMIT_S
    ) -> None:
        """Judges the hours of a day up to `until`, in `anomalies`.

        Raises:
            Unavailable: as for `write_usage`.
        """
        self._replace(ANOMALIES, day.day, {"until": until, "tz": day.tz, **LIMITS}, limit_s)

    def anomalies(self, day: date, limit_s: float = QUERY_LIMIT_S) -> list[Anomaly]:
        """The anomalies of a day.

        Raises:
            BadInput: there are too many.
            Unavailable: BigQuery is out of reach or refused.
        """
        return [Anomaly(*row) for row in self._read("found_anomalies", day, limit_s)]

    def summary(self, day: date, limit_s: float = QUERY_LIMIT_S) -> list[dict[str, Any]]:
        """A day and its month by tenant and model, as statements/summary.sql says.

        Raises:
            BadInput: there are too many.
            Unavailable: BigQuery is out of reach or refused.
        """
        return [dict(row.items()) for row in self._read("summary", day, limit_s)]

    def _replace(self, table: str, day: date, values: Mapping[str, Any], limit_s: float) -> None:
        destination = f"{self._client.project}.{self._dataset}.{table}${day:%Y%m%d}"
        config = self._config(
            {"day": day, **values},
            destination=destination,
            create_disposition="CREATE_NEVER",
            write_disposition="WRITE_TRUNCATE",
        )
        self._ask(table, config, limit_s, max_results=0)

    def _read(self, statement: str, day: date, limit_s: float) -> list[Any]:
        rows = self._ask(
            statement, self._config({"day": day}), limit_s, max_results=self._most_rows + 1
        )
        if len(rows) > self._most_rows:
            raise BadInput(f"{statement} of {day}: more than {self._most_rows} rows", field="from")
        return rows

    def _ask(self, statement: str, config: Any, limit_s: float, max_results: int) -> list[Any]:
        from google.cloud.bigquery import DEFAULT_RETRY

        with translated_errors():
            retry = DEFAULT_RETRY.with_timeout(RETRY_LIMIT_S)
            job = self._client.query(
                _sql(statement), job_config=config, retry=retry, job_retry=None, timeout=limit_s
            )
            return list(
                job.result(retry=retry, job_retry=None, timeout=limit_s, max_results=max_results)
            )

    def _config(self, values: Mapping[str, Any], **options: Any) -> Any:
        from google.cloud.bigquery import QueryJobConfig, ScalarQueryParameter

        return QueryJobConfig(
            default_dataset=f"{self._client.project}.{self._dataset}",
            maximum_bytes_billed=self._most_bytes,
            query_parameters=[
                ScalarQueryParameter(name, _TYPES[type(value)], value)
                for name, value in values.items()
            ],
            **options,
        )


@cache
def _sql(statement: str) -> str:
    folder = resources.files("shared.reports").joinpath("statements")
    return folder.joinpath(f"{statement}.sql").read_text(encoding="utf-8")
