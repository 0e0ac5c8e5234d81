"""`python -m api.batch_runner`: runs batches until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import nullcontext

import uvloop

from api import metrics
from api.batch_runner.runner import open_runner
from shared.brokers import admin_of, transport_of
from shared.errors import PenstockError
from shared.logs import configure_logs
from shared.models.catalog_file import read_catalog, reread_interfaces
from shared.process.gc_tuning import settle_heap
from shared.process.inspection import deny_inspection
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import ApiSettings, read_settings
from shared.usage.senders import sender_of
from shared.usage.writer import RowWriter


def main() -> int:
    """Runs until a signal arrives. Returns 0, or 1 if the process could not start."""
    exempt_loopback_from_proxies()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings = read_settings(ApiSettings)
        configure_logs(settings.log_level, settings.project)
        deny_inspection()
        metrics_server = (
            metrics.serve_metrics(settings.metrics_host, settings.metrics_port)
            if settings.metrics_port
            else nullcontext()
        )
        with metrics_server:
            uvloop.run(_run(settings))
    except PenstockError as error:
        print(f"penstock batches: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _run(settings: ApiSettings) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    catalog = read_catalog(settings.models_file)
    loop.add_signal_handler(signal.SIGHUP, reread_interfaces, catalog, settings.models_file)
    rows = RowWriter(
        sender_of(settings),
        spool_dir=settings.spool_dir,
        spool_max_bytes=settings.spool_max_bytes,
    )
    async with open_runner(
        settings,
        catalog,
        transport_of(settings),
        admin_of(settings),
        rows,
    ) as runner:
        settle_heap()
        running = asyncio.create_task(runner.run())
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
