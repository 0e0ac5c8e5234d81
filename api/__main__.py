"""`python -m api`: settings, logs, the real broker and rows, then uvicorn until SIGTERM."""

from __future__ import annotations

import signal
import sys

import uvicorn

from api.app import create_app
from shared.catalogue import read_catalogue
from shared.errors import ConfigurationError
from shared.logs import configure_logs
from shared.pubsub import PubSubTransport
from shared.pubsub_admin import PubSubAdmin
from shared.rows import RowWriter
from shared.settings import ApiSettings, read_settings

DRAIN_S = 4
"""For requests in hand after SIGTERM. Cloud Run kills after 10 s; rows take up to 5 s to get to BigQuery or disk."""
KEEP_ALIVE_S = 620
"""Above the 600 s for which Google's load balancer keeps its connections; else it uses some that we just closed."""


def main() -> int:
    """Serves until told to stop; 0, or 1 when it could not start."""
    # uvicorn passes a signal on once it has drained; without handlers of ours a clean stop would look like a kill.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    try:
        settings = read_settings(ApiSettings)
        configure_logs(settings.log_level)
        app = create_app(
            settings,
            read_catalogue(settings.models_file),
            PubSubTransport(settings.project, settings.pubsub_endpoint),
            PubSubAdmin(settings.project, settings.pubsub_endpoint),
            RowWriter(
                project=settings.project,
                dataset=settings.dataset,
                endpoint=settings.bigquery_endpoint,
                spool_dir=settings.spool_dir,
                spool_max_bytes=settings.spool_max_bytes,
            ),
        )
    except ConfigurationError as error:
        print(f"penstock api: {error.message}", file=sys.stderr)
        return 1
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http="httptools",
            lifespan="on",
            log_config=None,
            access_log=False,
            # Links are made from public_url; what a proxy says of itself is not needed, nor to be trusted.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
