"""Kept connections of a load generator to one server, and the requests that wait for them."""

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
    """The address that requests are sent to."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class ConnectionPool:
    """Sends each request on a free connection, and opens up to `most` of them.

    Requests beyond that wait in order, and their wait counts.

    Args:
        server: the server that gets the requests.
        on_end: gets each request once, with the pieces of the answer's body. It may send the next.
    """

    def __init__(
        self, server: Server, most: int, on_end: Callable[[Exchange, list[bytes]], None]
    ) -> None:
        self._server = server
        self._most = most
        self._on_end = on_end
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._waiting: dict[int, tuple[bytes, float]] = {}
        self._connections: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def in_flight(self) -> int:
        """Requests that were given to it and have not ended."""
        return len(self._busy) + len(self._waiting)

    async def open(self, count: int) -> None:
        """Opens connections ahead.

        Raises:
            OSError: nothing listens.
        """
        for _ in range(count):
            await self._connect()

    def send(self, number: int, request: bytes, due_s: float) -> None:
        """Sends a request, or has it wait for a connection.

        Args:
            number: identifies it, in its exchange and for `cancel`.
            request: all bytes.
            due_s: when it is due, by time.perf_counter(). Its round trip counts from here.
        """
        if self._idle:
            # The last one that was used: the server has closed it least likely.
            self._begin(self._idle.pop(), number, request, due_s)
            return
        self._waiting[number] = (request, due_s)
        self._open_more()

    def cancel(self, number: int) -> None:
        """Hangs up on a request, if it has not ended."""
        if number in self._waiting:
            self._end_waiting(number, CANCELED)
        elif number in self._busy:
            self._busy[number].abort(CANCELED)

    def abandon(self) -> None:
        """Ends everything that is still open as unanswered."""
        for number in list(self._waiting):
            self._end_waiting(number, UNANSWERED)
        for connection in list(self._busy.values()):
            connection.abort(UNANSWERED)

    def close(self) -> None:
        self._is_closing = True
        for task in self._opening:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    def answered(self, connection: Connection, exchange: Exchange) -> None:
        """Takes an answer, and gives its connection the next request."""
        del self._busy[exchange.number]
        body = connection.body
        if connection.is_open:
            self._use(connection)
        self._on_end(exchange, body)

    def lost(self, connection: Connection, exchange: Exchange | None) -> None:
        """Takes a connection that ended, and opens another if requests wait."""
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
        is_full = len(self._connections) + len(self._opening) >= self._most
        if is_full or self._is_closing:
            return
        task = asyncio.get_running_loop().create_task(self._connect())
        self._opening.add(task)
        task.add_done_callback(self._opened)

    async def _connect(self) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(self), server.host, server.port, ssl=server.tls
            )
        if connection.is_open:
            self._connections.add(connection)
            self._use(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        # What waits may still go out on a connection that is open or being opened.
        if error is not None and not self._connections and not self._opening:
            for number in list(self._waiting):
                self._end_waiting(number, UNCONNECTED)
