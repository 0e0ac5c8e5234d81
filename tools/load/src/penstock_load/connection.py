"""A load generator's persistent HTTP/1.1 connection, with one request at a time.

It uses asyncio protocols, because a client library would cost more than serving a cache hit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from penstock_load.exchange import LOST, Exchange


class Owner(Protocol):
    """Assigns requests to connections."""

    def handle_response(self, connection: Connection, exchange: Exchange) -> None:
        """Called when a connection has received a complete response."""

    def handle_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        """Called when the server closes a connection, with the exchange that was open on it."""


class Connection(asyncio.Protocol):
    """A persistent connection."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._due_s = 0.0
        self.body: list[bytes] = []
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        self.is_open = True

    def begin(self, number: int, request: bytes, due_s: float) -> None:
        """Sends request `number`, timed from `due_s`."""
        self._due_s, self.body = due_s, []
        lag_ms = (time.perf_counter() - due_s) * 1000
        self._exchange = Exchange(LOST, number=number, lag_ms=lag_ms)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Passes received bytes to the parser."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is None or not name.startswith(b"x-"):
            return
        match name:
            case b"x-penstock-cost-usd":
                exchange.cost_usd = float(value)
            case b"x-request-id":
                exchange.request_id = value.decode()
            case b"x-penstock-cache":
                exchange.cache = value.decode()
            case b"x-penstock-queue-ms":
                exchange.queue_ms = float(value)
            case b"x-penstock-batch-ms":
                exchange.batch_ms = float(value)
            case b"x-penstock-inference-ms":
                exchange.inference_ms = float(value)
            case b"x-penstock-total-ms":
                exchange.total_ms = float(value)

    def on_body(self, body: bytes) -> None:
        """Stores a chunk of the response."""
        self.body.append(body)

    def on_message_complete(self) -> None:
        exchange = self._finish_exchange()
        if exchange is None:
            # Proxies send 408 on idle connections before they close them.
            self.close()
            return
        exchange.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._owner.handle_response(self, exchange)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._owner.handle_lost(self, self._finish_exchange())

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def abort(self, status: int) -> None:
        """Disconnects. The open request gets `status` if the connection is lost."""
        if self._exchange is not None:
            self._exchange.status = status
        self.is_open = False
        self._transport.abort()

    def _finish_exchange(self) -> Exchange | None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.round_trip_ms = (time.perf_counter() - self._due_s) * 1000
        return exchange


def encode_request(
    host: str, path: str, headers: Mapping[str, str], content: bytes = b"", method: str = "POST"
) -> bytes:
    """Returns the bytes of a request, by default a POST with a JSON body.

    Args:
        host: includes the port unless it is the default.
        headers: in addition to the standard headers.
    """
    all_headers = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content
