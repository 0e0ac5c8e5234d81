"""HTTP over an engine's Unix socket, with its streams read together, once per step.

An engine sends a step's tokens one text after another, within up to 10 ms. If each text's token
woke the event loop separately, it would cost nearly twice as much CPU. So when the first stream has
data, the others get a moment to receive theirs, and then all of them are read at once. An epoll
object holds the streams' sockets, and a second one reports only the first of them that is readable.
Pausing and resuming the event loop's own watch would cost ten times as much. Each part is passed on
as it is read, because waking a task for it would cost more than processing it.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httptools
import msgspec

GATHER_S, MAX_GATHER_S = 0.0006, 0.01
"""How long to wait per stream for its data after the first stream's data arrives, and the maximum
wait for all streams.

A single stream does not wait.
"""
CONNECT_LIMIT_S = 30.0
RETRY_S = 0.01
"""Pause before another attempt to connect while the server's connection queue is full."""
READ_BYTES = 32 * 1024
TakePart = Callable[[bytes], bool]
"""Called with each part of a stream. Returns True if the rest is not needed."""


class EngineHttp:
    """Requests to one engine, each with its own connection.

    Connections are not kept open, because the server may close one just as it is being reused.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._key = key
        self._streams = _StreamReader()

    @asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[EngineResponse]:
        """Sends a request. Yields the response, once its head has arrived.

        Exiting the context before the response is complete closes the connection.

        Raises:
            OSError: there is no connection, or it was lost.
        """
        async with self._send("POST", path, msgspec.json.encode(body)) as response:
            yield response

    async def get(self, path: str) -> bytes:
        """Returns the body of a response.

        Raises:
            OSError: there is no connection, or it was lost.
        """
        async with self._send("GET", path) as response:
            return await response.read()

    @asynccontextmanager
    async def _send(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[EngineResponse]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: engine\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await self._connect(connection)
            await asyncio.get_running_loop().sock_sendall(connection, head.encode() + body)
            response = EngineResponse(connection, self._streams)
            try:
                await response.read_head()
                yield response
            finally:
                self._streams.remove(response)

    async def _connect(self, connection: socket.socket) -> None:
        while True:
            try:
                connection.connect(self._path)
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    def close(self) -> None:
        self._streams.close()


class EngineResponse:
    """A response that is being read. `status` is known once its head has arrived."""

    def __init__(self, connection: socket.socket, streams: _StreamReader) -> None:
        self.status = 0
        self.connection = connection
        self._streams = streams
        self._follower: _Follower | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._arrived: list[bytes] = []
        self._is_whole = False
        self._error: OSError | None = None

    async def read(self) -> bytes:
        """Returns the whole body.

        Raises:
            OSError: the connection was already lost.
        """
        while not self._is_whole:
            await self._receive()
        return self._take()

    async def follow(self, take: TakePart) -> bool:
        """Passes the parts of a stream to `take` until the stream ends or `take` returns True.

        Returns whether `take` returned True.

        Raises:
            OSError: the connection was lost before the stream's end.
            Exception: `take` raised it.
        """
        follower = self._follower = _Follower(take, asyncio.get_running_loop().create_future())
        self._pass_on(follower)
        if not follower.is_done.done():
            self._streams.add(self)
        return await follower.is_done

    async def read_head(self) -> None:
        while not self.status:
            await self._receive()

    async def _receive(self) -> None:
        self.feed(await asyncio.get_running_loop().sock_recv(self.connection, READ_BYTES))
        if self._error is not None:
            raise self._error

    def receive_now(self) -> bool:
        """Reads and passes on what has arrived. Returns False if its follower needs no more."""
        follower = self._follower
        assert follower is not None, "only followed streams are added; this is a bug"
        if follower.is_done.done():  # it was canceled
            return False
        try:
            self.feed(self.connection.recv(READ_BYTES))
        except BlockingIOError:
            return True
        except OSError as error:
            self._error = error
        self._pass_on(follower)
        return not follower.is_done.done()

    def _pass_on(self, follower: _Follower) -> None:
        try:
            if self._arrived and follower.take(self._take()):
                follower.is_done.set_result(True)
            elif self._is_whole:
                follower.is_done.set_result(False)
            elif self._error is not None:
                follower.is_done.set_exception(self._error)
        except Exception as error:
            follower.is_done.set_exception(error)

    def feed(self, data: bytes) -> None:
        """Parses received bytes, which are empty if the connection was closed."""
        if not data:
            self._error = ConnectionResetError("the connection was closed")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = ConnectionError(f"not an HTTP response: {error}")

    def _take(self) -> bytes:
        if len(self._arrived) == 1:
            return self._arrived.pop()
        body = b"".join(self._arrived)
        self._arrived.clear()
        return body

    # The parser calls the next three methods.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._arrived.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


class _Follower(NamedTuple):
    """Takes a stream's parts. `is_done` is set once no more are needed."""

    take: TakePart
    is_done: asyncio.Future[bool]


class _StreamReader:
    """Reads the open streams together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._first = select.epoll()
        """Reports that a stream is readable, once per call of `_watch`."""
        self._first.register(self._epoll.fileno(), select.EPOLLONESHOT)
        self._loop.add_reader(self._first.fileno(), self._on_data)
        self._open: dict[int, EngineResponse] = {}
        """By file descriptor."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_watching = False

    def add(self, response: EngineResponse) -> None:
        """Reads a stream until its follower is done or the stream is removed."""
        descriptor = response.connection.fileno()
        self._open[descriptor] = response
        self._epoll.register(descriptor, select.EPOLLIN)
        self._watch()

    def remove(self, response: EngineResponse) -> None:
        """Stops reading a stream, if it is being read."""
        descriptor = response.connection.fileno()
        if self._open.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)
        if not self._open:
            self._rest()

    def close(self) -> None:
        if not self._epoll.closed:
            self._rest()
            self._loop.remove_reader(self._first.fileno())
            self._first.close()
            self._epoll.close()

    def _watch(self) -> None:
        if not self._is_watching and self._timer is None:
            self._is_watching = True
            self._first.modify(self._epoll.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _rest(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._first.modify(self._epoll.fileno(), select.EPOLLONESHOT)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_data(self) -> None:
        """Called when the first of the streams has data."""
        if not self._first.poll(0):
            return
        self._is_watching = False
        if len(self._open) == 1:
            self._read_all()
            return
        gather_s = min(MAX_GATHER_S, GATHER_S * len(self._open))
        self._timer = self._loop.call_later(gather_s, self._read_all)

    def _read_all(self) -> None:
        self._timer = None
        for descriptor, _ in self._epoll.poll(0, max(1, len(self._open))):
            response = self._open[descriptor]
            if not response.receive_now():
                self.remove(response)
        if self._open:
            self._watch()
