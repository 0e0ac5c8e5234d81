"""Tables derived from rows one day at a time: `daily_usage` and `anomalies`.

Each day is a partition. A query writes each day with WRITE_TRUNCATE, which BigQuery applies
atomically, so a rerun replaces the day and readers never see a partial one:
https://docs.cloud.google.com/bigquery/docs/managing-partitioned-table-data

Days are in the billing time zone, both for scheduled runs and for backfills.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import BadInput
from shared.reports.runner import (
    MAX_BYTES,
    MAX_ROWS,
    QUERY_LIMIT_S,
    RETRY_LIMIT_S,
    translate_errors,
)

if TYPE_CHECKING:
    from google.cloud.bigquery import Client
from datetime import UTC, time, timedelta

from shared.reports.definitions import find_zone

AGAIN_DAYS = 3
"""Number of previous days that a scheduled run recomputes, because rows may arrive late."""
MAX_DAYS = 31
"""Maximum number of days per call, enough for a month."""
SETTLING = timedelta(minutes=5)
"""How long to wait for an hour's rows before evaluating that hour."""

DAILY_USAGE, ANOMALIES = "daily_usage", "anomalies"
LIMITS: Mapping[str, int | float] = {
    "least_weeks": 4,
    "least_usd": 1.0,
    "least_errors": 10.0,
    "least_share": 0.5,
}
"""Conditions for an anomaly, in addition to its score: a minimum number of hours from earlier weeks
to compare with, and a minimum distance from their median, both in dollars or errors and as a
fraction.
"""
_TYPES = {str: "STRING", int: "INT64", float: "FLOAT64", date: "DATE", datetime: "TIMESTAMP"}


class BillingDay(NamedTuple):
    """A day in the billing time zone. It has 23 or 25 hours when DST starts or ends."""

    day: date
    tz: str

    @property
    def since(self) -> datetime:
        return _midnight(self.day, self.tz)

    @property
    def until(self) -> datetime:
        return _midnight(self.day + timedelta(days=1), self.tz)


def days_asked(parameters: Mapping[str, object], tz: str, now: datetime) -> list[BillingDay]:
    """Returns the days a call covers, oldest first.

    Args:
        parameters: `from` and `to`, both inclusive, such as 2026-10-31. `to` alone is that day,
            and `from` alone lasts until the last complete day. Defaults to the last complete day
            and the AGAIN_DAYS days before it.
        tz: name of the billing time zone.

    Raises:
        BadInput: a field is invalid, the range is too long, or its last day is not over yet.
    """
    if unknown := set(parameters) - {"from", "to"}:
        name = min(unknown)[:40]
        raise BadInput(f"{name}: is not a valid field; use from and to", field=name)
    last_over = now.astimezone(find_zone(tz)).date() - timedelta(days=1)
    last = _day(parameters, "to") or last_over
    first = _day(parameters, "from") or (
        last if "to" in parameters else last - timedelta(days=AGAIN_DAYS)
    )
    if last > last_over:
        raise BadInput(f"to: {last} is not over yet in {tz}", field="to")
    if first > last:
        raise BadInput(f"from: {first} must not be after {last}", field="from")
    days = (last - first).days + 1
    if days > MAX_DAYS:
        raise BadInput(
            f"from: the range must be at most {MAX_DAYS} days, got {days}; split it into "
            "several calls",
            field="from",
        )
    return [BillingDay(first + timedelta(days=number), tz) for number in range(days)]


def hours_over(tz: str, now: datetime) -> tuple[BillingDay, datetime]:
    """Returns the day whose hours should be evaluated, and the end of its last complete hour."""
    settled = now - SETTLING
    day = BillingDay(settled.astimezone(find_zone(tz)).date(), tz)
    hours = (settled - day.since) // timedelta(hours=1)
    if not hours:
        day = BillingDay(day.day - timedelta(days=1), tz)
        return day, day.until
    return day, day.since + timedelta(hours=hours)


def months_over(days: list[BillingDay], now: datetime) -> list[str]:
    """Returns the completed months among these days, such as 2026-10.

    Only completed months have invoices.
    """
    months = {day.day.replace(day=1): day.tz for day in days}
    return [
        f"{first:%Y-%m}"
        for first, tz in sorted(months.items())
        if _midnight((first + timedelta(days=31)).replace(day=1), tz) <= now
    ]


def _day(parameters: Mapping[str, object], field: str) -> date | None:
    if field not in parameters:
        return None
    text = parameters[field]
    try:
        day = date.fromisoformat(text) if isinstance(text, str) and len(text) == 10 else None
    except ValueError:
        day = None
    if day is None or not 1970 <= day.year <= 9998:
        raise BadInput(
            f"{field}: must be a date such as 2026-10-01, got {str(text)[:40]!r}", field=field
        )
    return day


def _midnight(day: date, tz: str) -> datetime:
    return datetime.combine(day, time(), find_zone(tz)).astimezone(UTC)


class Anomaly(NamedTuple):
    """An hour outside the usual range for that hour of the week."""

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
    """Writes and reads these tables. Calls block, so servers run them in threads."""

    def __init__(self, client: Client, dataset: str, most_bytes: int = MAX_BYTES) -> None:
        self._client = client
        self._dataset = dataset
        self._most_bytes = most_bytes

    def write_usage(self, day: BillingDay, limit_s: float = QUERY_LIMIT_S) -> None:
        """Writes a day's totals to `daily_usage`.

        Raises:
            Unavailable: BigQuery is unreachable or rejected the query. The table is either
                unchanged or complete.
        """
        ends = {"since": day.since, "until": day.until, "tz": day.tz}
        self._replace(DAILY_USAGE, day.day, ends, limit_s)

    def write_anomalies(
        self, day: BillingDay, until: datetime, limit_s: float = QUERY_LIMIT_S
    ) -> None:
        """Evaluates a day's hours up to `until`, and writes `anomalies`.

        Raises:
            Unavailable: see `write_usage`.
        """
        self._replace(ANOMALIES, day.day, {"until": until, "tz": day.tz, **LIMITS}, limit_s)

    def anomalies(self, day: date, limit_s: float = QUERY_LIMIT_S) -> list[Anomaly]:
        """Returns a day's anomalies.

        Raises:
            BadInput: there are too many rows.
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        return [Anomaly(*row) for row in self._read("found_anomalies", day, limit_s)]

    def summary(self, day: date, limit_s: float = QUERY_LIMIT_S) -> list[dict[str, Any]]:
        """Returns usage by tenant and model for a day and its month, using statements/summary.sql.

        Raises:
            BadInput: there are too many rows.
            Unavailable: BigQuery is unreachable or rejected the query.
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
        rows = self._ask(statement, self._config({"day": day}), limit_s, max_results=MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            raise BadInput(f"{statement} for {day}: more than {MAX_ROWS} rows", field="from")
        return rows

    def _ask(self, statement: str, config: Any, limit_s: float, max_results: int) -> list[Any]:
        from google.cloud.bigquery import DEFAULT_RETRY

        with translate_errors():
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
