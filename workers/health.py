"""The worker's health server: /livez (loop responds), /readyz (warm and pulling), /metrics.

It runs on a thread, using the standard library's server, so that it doesn't depend on the event
loop it checks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

LOOP_LIMIT_S = 5.0
"""If the loop doesn't respond within this time, it can't extend leases either.

The process then needs a restart.
"""


def _responds(loop: asyncio.AbstractEventLoop) -> bool:
    responded = threading.Event()
    try:
        loop.call_soon_threadsafe(responded.set)
    except RuntimeError:  # closed
        return False
    return responded.wait(LOOP_LIMIT_S)


def _handler(
    loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Serves a few paths, for GET requests only."""

        def do_GET(self) -> None:
            if self.path == "/metrics":
                # OpenMetrics, which supports exemplars, if the scraper requests it.
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, encode(REGISTRY), content_type)
            elif self.path in ("/livez", "/healthz"):  # the latter is the old path
                self._answer_bool(_responds(loop))
            elif self.path == "/readyz":
                self._answer_bool(is_ready())
            else:
                self._answer(404, b"not found\n", "text/plain")

        def _answer_bool(self, good: bool) -> None:
            self._answer(200 if good else 503, b"ok\n" if good else b"not ready\n", "text/plain")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Suppresses log entries for probes."""

    return Handler


@contextmanager
def health_server(
    host: str, port: int, loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]
) -> Iterator[int]:
    """Serves until the context exits. Yields the port the server is bound to."""
    server = ThreadingHTTPServer((host, port), _handler(loop, is_ready))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="health", daemon=True
    )
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LOOP_LIMIT_S)
