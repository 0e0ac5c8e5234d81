"""A real HTTP endpoint for push: records requests and responds as the test specifies."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from tests.http_server import QuietHandler, serving
from tests.limits import WAIT_LIMIT_S


class Endpoint:
    """Each POST consumes one of `answers`; the last one repeats forever.

    `next_post` waits with a time limit.
    """

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
    class Handler(QuietHandler):
        def setup(self) -> None:
            super().setup()
            endpoint.connections += 1

        def do_POST(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            endpoint.posts.put((self.path, headers, self.read_body()))
            status = endpoint.next_status()
            self.send_response(status)
            if status >= 200 and status != 204:
                self.send_header("Content-Length", "2")
            self.end_headers()
            if status >= 200 and status != 204:
                self.wfile.write(b"ok")

    with serving(Handler) as url:
        endpoint = Endpoint(f"{url}/push?token=t")
        yield endpoint
