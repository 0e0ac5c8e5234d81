"""A backlog is sent in several concurrent requests, because BigQuery takes a while to respond to
each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.local.process import free_port
from shared.usage.writer import BATCH_ROWS, SENDERS
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import row, writer_to

pytestmark = pytest.mark.anyio


class Slow:
    """Responds to the first requests once all of them have arrived.

    The request with the row `failing` fails.
    """

    def __init__(self, together: int, failing: str) -> None:
        self.barrier = threading.Barrier(together)
        self.failing = failing
        self.taken: list[str] = []
        self._asked = 0
        self._lock = threading.Lock()

    def answer(self, ids: list[str]) -> int:
        """The response status for a request with these rows."""
        with self._lock:
            self._asked += 1
            is_first = self._asked <= self.barrier.parties
        if is_first:
            self.barrier.wait(WAIT_LIMIT_S)
        with self._lock:
            if is_first and self.failing in ids:
                return 503
            self.taken += ids
            return 200

    @contextmanager
    def running(self) -> Iterator[str]:
        slow = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(slow.answer([one["insertId"] for one in body["rows"]]))
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


@pytest.mark.parametrize("failing", [None, 0, BATCH_ROWS * (SENDERS - 1)])
async def test_backlog_goes_in_several_requests_at_a_time(
    tmp_path: Path, failing: int | None
) -> None:
    rows, spool_dir = BATCH_ROWS * SENDERS, tmp_path / "spool"
    async with writer_to(f"http://127.0.0.1:{free_port()}", spool_dir) as sink:
        for number in range(rows):
            sink.write(row(number))
    slow = Slow(SENDERS, "" if failing is None else f"req:{failing:05}:succeeded")
    with slow.running() as endpoint:
        async with writer_to(endpoint, spool_dir) as sink:
            assert await sink.flush(WAIT_LIMIT_S)
    assert sorted(slow.taken) == [f"req:{number:05}:succeeded" for number in range(rows)]
    assert list(spool_dir.iterdir()) == []
