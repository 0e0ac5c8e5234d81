"""`python -m api`: settings, logs, the real broker and rows, then uvicorn until SIGTERM."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext

import uvicorn

from api import metrics
from api.app import create_app
from api.server import server_config
from shared.brokers import admin_of, transport_of
from shared.catalog import read_catalog
from shared.errors import ConfigurationError
from shared.logs import configure_logs
from shared.settings import ApiSettings, read_settings
from shared.tracing.setup import traced
from shared.usage.senders import sender_of
from shared.usage.writer import RowWriter


def main() -> int:
    """Serves until a signal arrives. Returns 0, or 1 if it could not start."""
    # uvicorn raises the signal again after draining. Without these handlers a clean stop looks like
    # a kill.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    try:
        return _serve(read_settings(ApiSettings))
    except ConfigurationError as error:
        print(f"penstock api: {error.message}", file=sys.stderr)
        return 1


def _serve(settings: ApiSettings) -> int:
    configure_logs(settings.log_level, settings.project)
    app = create_app(
        settings,
        read_catalog(settings.models_file),
        transport_of(settings),
        admin_of(settings),
        RowWriter(
            sender_of(settings),
            spool_dir=settings.spool_dir,
            spool_max_bytes=settings.spool_max_bytes,
        ),
    )
    server = uvicorn.Server(server_config(app, settings))
    counted = (
        metrics.served(settings.metrics_host, settings.metrics_port)
        if settings.metrics_port
        else nullcontext()
    )
    traces = traced(
        "penstock-api",
        project=settings.project,
        region=settings.region,
        broker=settings.messaging_system,
        decides=True,
    )
    with counted, traces:
        server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
