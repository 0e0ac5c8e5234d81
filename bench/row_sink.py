"""Accepts and counts rows as BigQuery would: `python -m bench.row_sink PORT LATENCY_MS MOST`.

Runs as a separate process that is never the bottleneck for the writer. After `GET /away`, it closes
the connection on every call until `GET /back`. `GET /counts` returns its totals: rows, distinct
rows, and the tokens in them.
"""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec


class _Values(msgspec.Struct):
    tokens: int


class _Row(msgspec.Struct):
    insert_id: str = msgspec.field(name="insertId")
    values: _Values = msgspec.field(name="json")


class _Insert(msgspec.Struct):
    rows: list[_Row]


class RowCounts(msgspec.Struct):
    """The received rows. `tokens` counts each distinct row once."""

    rows: int = 0
    different: int = 0
    tokens: int = 0


_decoder = msgspec.json.Decoder(_Insert)


class _Sink:
    def __init__(self, latency_s: float, most: int) -> None:
        self.latency_s = latency_s
        self.is_away = False
        self.counts = RowCounts()
        self._seen = bytearray(most)
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        rows = _decoder.decode(body).rows
        with self._lock:
            for row in rows:
                # The row's number, which the benchmark puts at the end of its request.
                number = int(row.insert_id.partition(":")[0][-8:], 16)
                self.counts.rows += 1
                if not self._seen[number]:
                    self._seen[number] = 1
                    self.counts.different += 1
                    self.counts.tokens += row.values.tokens


def _handler_of(sink: _Sink) -> type[BaseHTTPRequestHandler]:
    class RowHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if sink.is_away:
                self.close_connection = True
                return
            sink.take(body)
            time.sleep(sink.latency_s)
            self._answer(b"{}")

        def do_GET(self) -> None:
            if self.path in ("/away", "/back"):
                sink.is_away = self.path == "/away"
            self._answer(msgspec.json.encode(sink.counts))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    return RowHandler


class _Server(ThreadingHTTPServer):
    daemon_threads = True


if __name__ == "__main__":
    port, latency_ms, most = map(int, sys.argv[1:])
    _Server(("127.0.0.1", port), _handler_of(_Sink(latency_ms / 1000, most))).serve_forever()
