"""One kept HTTP/1.1 connection of the load generator, with at most one request on it at a time.

It uses asyncio protocols, because a client library costs more than the answer of a cache hit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

import httptools
import msgspec

LOST, UNANSWERED = 0, -1
"""Statuses of requests without an answer: the connection broke, or the time was up."""


class Exchange(msgspec.Struct):
    """One request and its answer, timed from when it was due. The API's headers fill the rest."""

    status: int
    round_trip_ms: float = 0.0
    request_id: str = ""
    cache: str = ""
    queue_ms: float = 0.0
    batch_ms: float = 0.0
    inference_ms: float = 0.0
    total_ms: float = 0.0
    ended_s: float = 0.0
    """Since the start of the order."""
    number: int = -1
    """Of the request in its order."""

    @property
    def overhead_ms(self) -> float:
        """What the pipeline added to the model's time."""
        return self.round_trip_ms - self.inference_ms


class Owner(Protocol):
    """The generator, which gives connections their requests."""

    def answered(self, connection: Connection, exchange: Exchange) -> None:
        """Takes a complete answer."""

    def lost(self, connection: Connection, exchange: Exchange | None) -> None:
        """Takes a connection that the server closed, with the exchange that was open on it."""


class Connection(asyncio.Protocol):
    """A connection that is kept between requests."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._due_s = 0.0
        self.body: list[bytes] = []
        self.retry_after_s = 0.0
        """Of the last answer that said so."""
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def begin(self, number: int, request: bytes, due_s: float) -> None:
        """Sends request `number`, timed from `due_s`."""
        self._due_s, self.body = due_s, []
        self._exchange = Exchange(LOST, number=number)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Hands the parser what came."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Reads the API's own headers."""
        exchange = self._exchange
        if name == b"retry-after-ms":
            self.retry_after_s = float(value) / 1000
        if exchange is None or not name.startswith(b"x-"):
            return
        match name:
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
        """Keeps a piece of the answer."""
        self.body.append(body)

    def on_message_complete(self) -> None:
        """Reports the answer."""
        exchange = self._ended()
        assert exchange is not None, "an answer without a request; the server broke HTTP"
        exchange.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._owner.answered(self, exchange)

    def connection_lost(self, error: Exception | None) -> None:
        """Reports the loss."""
        self.is_open = False
        self._owner.lost(self, self._ended())

    def close(self) -> None:
        """Closes it."""
        self.is_open = False
        self._transport.close()

    def _ended(self) -> Exchange | None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.round_trip_ms = (time.perf_counter() - self._due_s) * 1000
        return exchange
