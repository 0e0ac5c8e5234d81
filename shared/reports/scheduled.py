"""A scheduled run: totals each day, evaluates its hours, and creates invoices and summaries.

Each step replaces the results of earlier runs for the same day, so a run can be repeated at any
time, even concurrently. `penstock run-daily` and the `reports` function perform the same run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from prometheus_client import Counter

from shared.errors import Unavailable
from shared.reports.day_tables import (
    AGAIN_DAYS,
    Anomaly,
    BillingDay,
    DayTables,
    hours_over,
    months_over,
)
from shared.reports.definitions import ask_month, find_report
from shared.reports.invoice import (
    Invoice,
    InvoiceTerms,
    invoice_page,
    invoices,
    invoices_csv,
    terms_of,
)
from shared.reports.runner import QUERY_LIMIT_S, ReportRunner, translate_errors
from shared.reports.summary import Summary, as_html, as_text, keys_of, summary_of
from shared.settings import ReportSettings
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import open_client

RUN_LIMIT_S = 500.0
"""Time limit for a run. A day takes seconds to process, and Cloud Scheduler waits up to ten
minutes.
"""
PUTS_AT_ONCE = 8
HTML = "text/html; charset=utf-8"

ANOMALIES = Counter(
    "penstock_reports_anomalies_total",
    "Hours found outside their usual range, each counted once",
    ["measure"],
)
for _measure in ("cost_usd", "errors"):
    ANOMALIES.labels(_measure)

log = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """The result of a run."""

    days: Sequence[BillingDay]
    summary: Summary | None
    """Summary of the last day. None if only hours were evaluated."""
    anomalies: int
    """Number of anomalies not found by earlier runs."""
    objects: Sequence[str]
    """Keys of the objects written to the object store."""


class ScheduledReports:
    """Creates daily reports.

    Args:
        limit_s: maximum number of seconds per run.
        terms: the seller and tax to put on invoices.
    """

    def __init__(
        self,
        tables: DayTables,
        runner: ReportRunner,
        objects: ObjectStore,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limit_s: float = RUN_LIMIT_S,
        terms: InvoiceTerms = InvoiceTerms(),  # noqa: B008
    ) -> None:
        self._tables = tables
        self._runner = runner
        self._objects = objects
        self._clock = clock
        self._limit_s = limit_s
        self._terms = terms

    async def run(self, days: Sequence[BillingDay]) -> RunResult:
        """Processes the days, of which there is at least one, oldest first.

        Raises:
            Unavailable: BigQuery or the object store is unreachable, or time ran out. Results for
                finished days are kept.
        """
        steps = _Steps(self._limit_s)
        keys: list[str] = []
        new = 0
        for day in days:
            limit_s = steps.left_s(f"before {day.day} was done")
            await asyncio.to_thread(self._tables.write_usage, day, limit_s)
            new += await self._judge(day, day.until, steps)
            summary = await self._summarize(day, steps)
            keys += keys_of(day.day)
        for month in months_over(list(days), self._clock()):
            keys += await self._invoice(month, days[-1].tz, steps)
        _log_summary(summary, new)
        return RunResult(days, summary, new, keys)

    async def judge_hours(self, tz: str) -> RunResult:
        """Evaluates the current day's completed hours.

        Raises:
            Unavailable: see `run`.
        """
        day, until = hours_over(tz, self._clock())
        new = await self._judge(day, until, _Steps(self._limit_s))
        return RunResult([day], None, new, [])

    async def _judge(self, day: BillingDay, until: datetime, steps: _Steps) -> int:
        known = {_key(anomaly) for anomaly in await self._anomalies(day, steps)}
        limit_s = steps.left_s(f"before the hours of {day.day} were judged")
        await asyncio.to_thread(self._tables.write_anomalies, day, until, limit_s)
        new = [
            anomaly for anomaly in await self._anomalies(day, steps) if _key(anomaly) not in known
        ]
        # Anomalies found while backfilling last month's days aren't news.
        if day.until > self._clock() - timedelta(days=AGAIN_DAYS + 2):
            for anomaly in new:
                ANOMALIES.labels(anomaly.measure).inc()
                log.warning("anomaly", extra=_facts(anomaly))
        return len(new)

    async def _anomalies(self, day: BillingDay, steps: _Steps) -> list[Anomaly]:
        limit_s = steps.left_s(f"before the hours of {day.day} were judged")
        return await asyncio.to_thread(self._tables.anomalies, day.day, limit_s)

    async def _summarize(self, day: BillingDay, steps: _Steps) -> Summary:
        limit_s = steps.left_s(f"before the summary of {day.day}")
        records = await asyncio.to_thread(self._tables.summary, day.day, limit_s)
        summary = summary_of(day, records, await self._anomalies(day, steps))
        page, text = keys_of(day.day)
        await self._objects.put(page, as_html(summary).encode(), HTML)
        await self._objects.put(text, as_text(summary).encode(), "text/plain; charset=utf-8")
        return summary

    async def _invoice(self, month: str, tz: str, steps: _Steps) -> list[str]:
        limit_s = steps.left_s(f"before the invoices of {month}")
        question = ask_month(month, tz)
        result = await asyncio.to_thread(
            self._runner.run, find_report("invoice"), question, None, limit_s
        )
        documents = invoices(result, self._terms)
        folder = f"invoices/{month}"
        keys = [f"{folder}/all.csv"]
        await self._objects.put(keys[0], invoices_csv(documents), "text/csv; charset=utf-8")
        for start in range(0, len(documents), PUTS_AT_ONCE):
            steps.left_s(f"before the invoices of {month} were written")
            some = documents[start : start + PUTS_AT_ONCE]
            await asyncio.gather(*(self._put_invoice(folder, invoice) for invoice in some))
        return keys + [f"{folder}/{invoice.number}.html" for invoice in documents]

    async def _put_invoice(self, folder: str, invoice: Invoice) -> None:
        page = invoice_page([invoice])
        await self._objects.put(f"{folder}/{invoice.number}.html", page, HTML)


@contextmanager
def open_reports(settings: ReportSettings) -> Iterator[ScheduledReports]:
    """Yields scheduled reports with a separate BigQuery client.

    Raises:
        ConfigurationError: the object store's URL is invalid.
        Unavailable: there are no credentials.
    """
    objects = ObjectStore(settings.objects_url)
    with translate_errors():
        client = open_client(settings.project, settings.bigquery_endpoint)
    with closing(client):
        tables = DayTables(client, settings.dataset)
        runner = ReportRunner(client, settings.dataset)
        yield ScheduledReports(tables, runner, objects, terms=terms_of(settings))


class _Steps:
    """A run's time limit, shared by its steps."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s

    def left_s(self, when: str) -> float:
        """Returns the time limit for the next step.

        Raises:
            Unavailable: time ran out.
        """
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise Unavailable(f"the {self._limit_s:g} s time limit expired {when}")
        return min(left_s, QUERY_LIMIT_S)


def _key(anomaly: Anomaly) -> tuple[object, ...]:
    return anomaly.hour, anomaly.scope, anomaly.tenant, anomaly.measure, anomaly.direction


def _facts(anomaly: Anomaly) -> dict[str, object]:
    facts = anomaly._asdict()
    return facts | {"hour": anomaly.hour.isoformat()}


def _log_summary(summary: Summary, new: int) -> None:
    facts = {
        "subject": summary.subject,
        "day": str(summary.day.day),
        "cost_usd": summary.totals["cost_usd"],
        "requests": summary.totals["requests"],
        "errors": summary.totals["errors"],
        "anomalies": len(summary.anomalies),
        "new_anomalies": new,
        "summary": keys_of(summary.day.day)[0],
    }
    log.info("daily summary", extra=facts)
