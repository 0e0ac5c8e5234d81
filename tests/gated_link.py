"""Counts the round trips that a caller waits for, using a proxy that holds back requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from tests.limits import WAIT_LIMIT_S

T = TypeVar("T")


class GatedLink:
    """A TCP proxy. While `gate` is closed, requests wait, but responses pass."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._waiting: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked = asyncio.Event()
        self.is_open = True

    def pass_on(self) -> None:
        for sink, data in self._waiting:
            sink.write(data)
        self._waiting.clear()
        self.asked.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += (onward, writer)
        answers = asyncio.create_task(self._answers(back, writer))
        self._tasks.add(answers)
        while data := await reader.read(65536):
            self._waiting.append((onward, data))
            self.asked.set()
            if self.is_open:
                self.pass_on()
        onward.close()
        writer.close()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(65536):
            writer.write(data)

    def close(self) -> None:
        """Holds back requests from now on."""
        self.is_open = False

    def cut(self) -> None:
        """Closes all connections. New ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def open(self) -> None:
        """Forwards held requests immediately, along with any that arrive later."""
        self.is_open = True
        self.pass_on()

    async def trips(self, answer: Awaitable[T]) -> tuple[int, T]:
        """The number of round trips until there is a result, and the result."""
        self.close()
        trips = 0
        answering = asyncio.ensure_future(answer)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not answering.done():
                asked = asyncio.create_task(self.asked.wait())
                await asyncio.wait((answering, asked), return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                if not answering.done():
                    trips += 1
                    self.pass_on()
        self.open()
        return trips, await answering


@asynccontextmanager
async def gated(target_port: int) -> AsyncIterator[tuple[GatedLink, int]]:
    """A link to a port on this machine, and the port that the link listens on."""
    link = GatedLink(target_port)
    async with await asyncio.start_server(link.serve, "127.0.0.1", 0) as server:
        yield link, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def gated_redis(redis_url: str) -> AsyncIterator[tuple[GatedLink, str]]:
    """A link to a Redis, and the URL for reaching that Redis through the link."""
    where = urlsplit(redis_url)
    async with gated(where.port or 0) as (link, port):
        yield link, redis_url.replace(f":{where.port}", f":{port}")
