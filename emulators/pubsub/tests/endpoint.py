"""A real HTTP endpoint for push: records requests, and answers as the test specifies."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.limits import WAIT_LIMIT_S


class Endpoint:
    """`answers` are used up one per POST, the last one forever; `next_post` waits with a limit."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers = [204]
        self.connections = 0
        self.posts: queue.Queue[tuple[str, dict[str, str], bytes]] = queue.Queue()

    def next_post(self) -> tuple[str, dict[str, str], bytes]:
        return self.posts.get(timeout=WAIT_LIMIT_S)

    def next_status(self) -> int:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def listening_endpoint() -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            endpoint.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            endpoint.posts.put(
                (self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            )
            status = endpoint.next_status()
            self.send_response(status)
            if status >= 200 and status != 204:
                self.send_header("Content-Length", "2")
            self.end_headers()
            if status >= 200 and status != 204:
                self.wfile.write(b"ok")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}/push?token=t")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
