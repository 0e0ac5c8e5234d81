"""A webhook receiver on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Told:
    """A webhook receiver: each delivery's headers and body."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[dict[str, str], str]] = []
        told = self

        class Take(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                told.deliveries.append(
                    ({name.lower(): value for name, value in self.headers.items()}, body)
                )
                self.send_response(204)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Keeps request logs out of the output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def statuses(self) -> list[str]:
        return [json.loads(body)["status"] for _, body in self.deliveries]


@contextmanager
def receiver() -> Iterator[Told]:
    made = Told()
    with made.server:
        thread = threading.Thread(target=made.server.serve_forever, args=[0.01])
        thread.start()
        yield made
        made.server.shutdown()
        thread.join(5)
