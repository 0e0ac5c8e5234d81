"""Accepts and counts rows as BigQuery would: `python -m bench.row_sink PORT LATENCY_MS MOST`.

Runs as a separate process that is never the bottleneck for the writer. After `GET /away`, it closes
the connection on every call until `GET /back`. `GET /counts` returns its totals: rows, distinct
rows, and the tokens in them.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from aiohttp import web

MAX_BODY_BYTES = 64 * 2**20


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
        self._latency_s = latency_s
        self._is_away = False
        self._counts = RowCounts()
        self._seen = bytearray(most)

    async def insert(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self._is_away:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        for row in _decoder.decode(body).rows:
            # The row's number, which the benchmark puts at the end of its request.
            number = int(row.insert_id.partition(":")[0][-8:], 16)
            self._counts.rows += 1
            if not self._seen[number]:
                self._seen[number] = 1
                self._counts.different += 1
                self._counts.tokens += row.values.tokens
        await asyncio.sleep(self._latency_s)
        return web.json_response({})

    async def command(self, request: web.Request) -> web.Response:
        if request.path in ("/away", "/back"):
            self._is_away = request.path == "/away"
        return web.Response(body=msgspec.json.encode(self._counts))


if __name__ == "__main__":
    port, latency_ms, most = map(int, sys.argv[1:])
    sink = _Sink(latency_ms / 1000, most)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/{path:.*}", sink.insert), web.get("/{path:.*}", sink.command)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)
