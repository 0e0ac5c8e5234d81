"""A load generator's persistent connections to a server, and the requests waiting for them."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

from penstock_load.connection import Connection
from penstock_load.exchange import CANCELED, UNANSWERED, UNCONNECTED, Exchange

CONNECT_LIMIT_S = 10.0


class Server(NamedTuple):
    """The address to send requests to."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class ConnectionPool:
    """Sends each request on a free connection, and opens up to `max_connections` connections.

    Further requests wait in order, and their wait counts toward their latency.

    Args:
        server: server that receives the requests.
        on_end: called once per request, with the chunks of the response body. It may send another
            request.
    """

    def __init__(
        self, server: Server, max_connections: int, on_end: Callable[[Exchange, list[bytes]], None]
    ) -> None:
        self._server = server
        self._max_connections = max_connections
        self._on_end = on_end
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._waiting: dict[int, tuple[bytes, float]] = {}
        self._connections: set[Connection] = set()
        self._open_tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def in_flight(self) -> int:
        """Number of requests that were passed to `send` and have not ended."""
        return len(self._busy) + len(self._waiting)

    async def open(self, count: int) -> None:
        """Opens connections in advance.

        Raises:
            OSError: nothing is listening at the address.
        """
        for _ in range(count):
            await self._connect()

    def send(self, number: int, request: bytes, due_s: float) -> None:
        """Sends a request, or queues it for a connection.

        Args:
            number: identifies the request in its exchange and in `cancel`.
            due_s: when the request is due, according to time.perf_counter(). Its latency is
                measured from then.
        """
        if self._idle:
            # The most recently used connection, which the server is least likely to have closed.
            self._begin(self._idle.pop(), number, request, due_s)
            return
        self._waiting[number] = (request, due_s)
        self._open_more()

    def cancel(self, number: int) -> None:
        """Disconnects a request that has not ended."""
        if number in self._waiting:
            self._end_waiting(number, CANCELED)
        elif number in self._busy:
            self._busy[number].abort(CANCELED)

    def abandon(self) -> None:
        """Marks all open requests as unanswered."""
        for number in list(self._waiting):
            self._end_waiting(number, UNANSWERED)
        for connection in list(self._busy.values()):
            connection.abort(UNANSWERED)

    def close(self) -> None:
        self._is_closing = True
        for task in self._open_tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    def handle_response(self, connection: Connection, exchange: Exchange) -> None:
        """Handles a response, and sends the next request on its connection."""
        del self._busy[exchange.number]
        body = connection.body
        if connection.is_open:
            self._use(connection)
        self._on_end(exchange, body)

    def handle_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        """Handles a lost connection, and opens a new one if requests are waiting."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self._open_more()
        if exchange is not None:
            del self._busy[exchange.number]
            self._on_end(exchange, [])

    def _use(self, connection: Connection) -> None:
        if not self._waiting:
            self._idle.append(connection)
            return
        number = next(iter(self._waiting))
        request, due_s = self._waiting.pop(number)
        self._begin(connection, number, request, due_s)

    def _begin(self, connection: Connection, number: int, request: bytes, due_s: float) -> None:
        self._busy[number] = connection
        connection.begin(number, request, due_s)

    def _end_waiting(self, number: int, status: int) -> None:
        _, due_s = self._waiting.pop(number)
        waited_ms = (time.perf_counter() - due_s) * 1000
        self._on_end(Exchange(status, waited_ms, number=number, lag_ms=waited_ms), [])

    def _open_more(self) -> None:
        is_full = len(self._connections) + len(self._open_tasks) >= self._max_connections
        if is_full or self._is_closing:
            return
        task = asyncio.get_running_loop().create_task(self._connect())
        self._open_tasks.add(task)
        task.add_done_callback(self._handle_opened)

    async def _connect(self) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(self), server.host, server.port, ssl=server.tls
            )
        if connection.is_open:
            self._connections.add(connection)
            self._use(connection)

    def _handle_opened(self, task: asyncio.Task[None]) -> None:
        self._open_tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        # Waiting requests may still be sent on a connection that is open or being opened.
        if error is not None and not self._connections and not self._open_tasks:
            for number in list(self._waiting):
                self._end_waiting(number, UNCONNECTED)
