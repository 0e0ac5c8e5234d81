"""`python -m infra.row_archive`: archives rows from the object store until SIGTERM.

`python -m infra.row_archive restore` reloads archived days that BigQuery has lost.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta

from prometheus_client import Counter, start_http_server

from infra.row_archive.archive import ArchivedDays, RowArchive, RowArchiveSettings
from infra.row_archive.loads import BigQueryLoader
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.logs import configure_logs
from shared.process.concurrency import backoff
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import read_settings
from shared.stores.objects import ObjectStore

TABLES = ("rows", "worker_hours", "worker_starts", "webhook_deliveries")
MERGED_AFTER = timedelta(days=2)
"""Rows may arrive a day late after an outage. A day's files are merged only after that."""
MAX_PAUSE_S = 30.0

FAILURES = Counter(
    "penstock_row_archive_failures_total", "Passes that ended early; their rows are kept"
)

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until stopped. Returns 0, or 1 if startup or the restore failed."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(
        prog="penstock row archive", description="Archive rows from the object store."
    )
    commands = parser.add_subparsers(dest="command")
    restore = commands.add_parser(
        "restore", help="load archived days that are missing from BigQuery"
    )
    restore.add_argument("--from", dest="since", type=_day, metavar="DAY", default="2000-01-01")
    restore.add_argument("--to", dest="until", type=_day, metavar="DAY", default="9999-12-31")
    options = parser.parse_args(argv)
    try:
        settings = read_settings(RowArchiveSettings)
        if not settings.rows_url:
            raise ConfigurationError(
                ("PENSTOCK_ROWS_URL must be set; when it is empty, rows go directly to BigQuery"),
                field="rows_url",
            )
        configure_logs(settings.log_level, settings.project)
        objects = ObjectStore(settings.rows_url, setting="rows_url")
        if options.command == "restore":
            asyncio.run(_restore(settings, objects, options.since, options.until))
        else:
            asyncio.run(_run(settings, objects))
    except PenstockError as error:
        print(f"penstock row archive: {error.message}", file=sys.stderr)
        return 1
    return 0


def _day(text: str) -> str:
    """Returns a day as it appears in the names of folders: `2026-11-23`."""
    return date.fromisoformat(text).isoformat()


async def _restore(
    settings: RowArchiveSettings, objects: ObjectStore, since: str, until: str
) -> None:
    loader = _loader(settings)
    for table in TABLES:
        row_counts = await asyncio.to_thread(loader.days, table)
        days = await ArchivedDays(objects, table).restore(loader, row_counts, since, until)
        print(f"{table}: {len(days)} days restored{_span(days)}", flush=True)


def _span(days: Sequence[str]) -> str:
    return f", {days[0]} to {days[-1]}" if days else ""


def _loader(settings: RowArchiveSettings) -> BigQueryLoader:
    return BigQueryLoader(settings.project, settings.dataset, settings.bigquery_endpoint)


async def _run(settings: RowArchiveSettings, objects: ObjectStore) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        server, _ = start_http_server(settings.health_port, settings.health_host)
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_HEALTH_PORT: {settings.health_host}:{settings.health_port}: {error}",
            field="health_port",
        ) from error
    try:
        await _passes(settings, objects, stopped)
    finally:
        server.shutdown()
        server.server_close()


async def _passes(
    settings: RowArchiveSettings, objects: ObjectStore, stopped: asyncio.Event
) -> None:
    """Runs passes until stopped. The current pass finishes first."""
    loader = _loader(settings) if settings.archive_loads else None
    tables = [_Table(objects, table, loader) for table in TABLES]
    pauses = backoff(1.0, MAX_PAUSE_S)
    while not stopped.is_set():
        began_s = time.monotonic()
        # A failing table doesn't hold up other tables' rows.
        if all([await table.take(stopped) for table in tables]):
            pauses = backoff(1.0, MAX_PAUSE_S)
            pause_s = settings.archive_every_s - (time.monotonic() - began_s)
        else:
            pause_s = next(pauses)
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), max(0.0, pause_s))


class _Table:
    """One table's rows and days."""

    def __init__(self, objects: ObjectStore, table: str, loader: BigQueryLoader | None) -> None:
        self._archive = RowArchive(objects, table, loader)
        self._days = ArchivedDays(objects, table)
        self._name = table
        self._merged = ""

    async def take(self, stopped: asyncio.Event) -> bool:
        """Archives waiting rows and merges past days. Returns False on failure."""
        try:
            while await self._archive.run_once() and not stopped.is_set():
                pass
            day = f"{datetime.now(UTC) - MERGED_AFTER:%Y-%m-%d}"
            if day != self._merged:
                await self._days.merge_until(day)
                self._merged = day
        except Unavailable as error:
            log.warning("rows not archived", extra={"table": self._name, "reason": error.message})
        except Exception as error:  # a bug should cause only a pause, not block all later rows
            log.error(
                "archiving failed; this is a bug", extra={"table": self._name}, exc_info=error
            )
        else:
            return True
        FAILURES.inc()
        return False


if __name__ == "__main__":
    sys.exit(main())
