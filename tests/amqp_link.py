"""A TCP proxy in front of RabbitMQ that drops chosen responses, goes silent, or hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Self, cast

CHUNK_BYTES = 64 * 1024
METHOD_FRAME = 1

Method = tuple[int, int]
"""Class and method, as numbered in https://www.rabbitmq.com/amqp-0-9-1-reference."""
EXCHANGE_DECLARE_OK, QUEUE_DECLARE_OK = (40, 11), (50, 11)
QOS_OK, CONSUME_OK, CONFIRMATION = (60, 11), (60, 21), (60, 80)


class AmqpLink:
    """A port that forwards to a broker on this machine. Used as a context manager."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._to_lose: list[Method] = []
        self._ways: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The `broker` setting for clients that connect through this link."""
        return f"rabbitmq://guest:guest@127.0.0.1:{self._port}/"

    @property
    def lost_all(self) -> bool:
        """True if every response chosen to be dropped has been dropped."""
        return not self._to_lose

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)
        self.cut()

    def lose(self, method: Method) -> None:
        """Drops the broker's next response of this kind."""
        self._to_lose.append(method)

    def fall_silent(self) -> None:
        """Stops forwarding data on open connections. New connections are served."""
        self._silent |= self._writers

    def hang_up_unread(self) -> None:
        """Stops reading from the open connections, and signals the end of the stream on them."""
        for writer in self._clients:
            cast(asyncio.ReadTransport, writer.transport).pause_reading()
            writer.write_eof()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
        ends = {writer, onward}
        self._clients.add(writer)
        self._writers |= ends
        ways = {
            asyncio.create_task(self._carry(reader, onward)),
            asyncio.create_task(self._carry_frames(back, writer)),
        }
        self._ways |= ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._clients.discard(writer)
            self._writers -= ends
            for end in ends:
                end.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if sink not in self._silent:
                    sink.write(data)
        await self._keep_open(sink)

    async def _carry_frames(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await source.readexactly(7)
                kind, _, size_bytes = struct.unpack(">BHI", head)
                rest = await source.readexactly(size_bytes + 1)
                method = struct.unpack_from(">HH", rest) if kind == METHOD_FRAME else None
                if method in self._to_lose:
                    self._to_lose.remove(method)
                elif sink not in self._silent:
                    sink.write(head + rest)
        await self._keep_open(sink)

    async def _keep_open(self, sink: asyncio.StreamWriter) -> None:
        """Keeps a silent connection open, because the other side must not notice that it ended."""
        if sink in self._silent:
            await asyncio.Event().wait()
