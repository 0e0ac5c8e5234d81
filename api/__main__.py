"""`python -m api`: connects to the broker and BigQuery, and runs uvicorn until SIGTERM."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext

from api import metrics
from api.app import create_app
from api.server import QuietServer, server_config
from shared.brokers import admin_of, transport_of
from shared.errors import ConfigurationError
from shared.logs import configure_logs
from shared.models.catalog_file import read_catalog, reread_interfaces
from shared.process.inspection import deny_inspection
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import ApiSettings, read_settings
from shared.tracing.setup import export_spans
from shared.usage.senders import sender_of
from shared.usage.writer import RowWriter


def main() -> int:
    """Serves until a signal arrives. Returns 0, or 1 if the process could not start."""
    exempt_loopback_from_proxies()
    # uvicorn re-raises the signal after draining. Without these handlers, a clean shutdown would
    # look like a killed process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return _serve(read_settings(ApiSettings))
    except ConfigurationError as error:
        print(f"penstock api: {error.message}", file=sys.stderr)
        return 1


def _serve(settings: ApiSettings) -> int:
    configure_logs(settings.log_level, settings.project)
    deny_inspection()  # a custom class may run as the same user on this machine
    catalog = read_catalog(settings.models_file)
    signal.signal(
        signal.SIGHUP, lambda number, frame: reread_interfaces(catalog, settings.models_file)
    )
    app = create_app(
        settings,
        catalog,
        transport_of(settings),
        admin_of(settings),
        RowWriter(
            sender_of(settings),
            spool_dir=settings.spool_dir,
            spool_max_bytes=settings.spool_max_bytes,
        ),
    )
    server = QuietServer(server_config(app, settings))
    metrics_server = (
        metrics.serve_metrics(settings.metrics_host, settings.metrics_port)
        if settings.metrics_port
        else nullcontext()
    )
    traces = export_spans(
        "penstock-api",
        project=settings.project,
        region=settings.region,
        broker=settings.messaging_system,
        decides=True,
    )
    with metrics_server, traces:
        server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
