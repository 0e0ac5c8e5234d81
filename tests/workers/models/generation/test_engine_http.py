"""HTTP over an engine's Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import ModelFailed
from tests.limits import WAIT_LIMIT_S
from workers.models.engines import engine_http
from workers.models.engines.engine_http import EngineHttp, EngineResponse

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # its path must be short
        yield str(Path(folder, "http.sock"))


class Server:
    """Its connections, in the order of their requests."""

    def __init__(self) -> None:
        self.opened: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM)
        await self.opened.put(writer)
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the client leaves
        writer.close()


@asynccontextmanager
async def opened(path: str) -> AsyncIterator[tuple[Server, EngineHttp]]:
    server, http = Server(), EngineHttp(path, "key")
    listening = await asyncio.start_unix_server(server.accept, path)
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            yield server, http
    finally:
        http.close()
        listening.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def no_end_of_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATHER_S", "MAX_GATHER_S"):
        monkeypatch.setattr(engine_http, name, 10 * WAIT_LIMIT_S)


class Follower:
    """Puts a stream's parts into a queue, and needs no more after a part that equals `last`."""

    def __init__(self, response: EngineResponse, last: bytes = b"") -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._last = last
        self.end = asyncio.create_task(response.follow(self._take))

    def _take(self, part: bytes) -> bool:
        self.parts.put_nowait(part)
        return part == self._last


async def test_streams_that_arrive_one_after_another_are_read_whole(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        following = Follower(first)
        async with http.post("/", {}) as second:
            second_writer = await server.opened.get()
            second_following = Follower(second)
            for number in range(20):
                writer.write(chunk(b"a%d" % number))
                await writer.drain()
                second_writer.write(chunk(b"b%d" % number))
                assert await following.parts.get() == b"a%d" % number
                assert await second_following.parts.get() == b"b%d" % number
            second_writer.write(LAST)
            assert not await second_following.end
        writer.write(chunk(b"c") + LAST)
        assert await following.parts.get() == b"c"
        assert not await following.end


async def test_a_stream_ends_when_its_follower_needs_no_more(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            second_writer = await server.opened.get()
            following, second_following = Follower(first, b"end"), Follower(second)
            writer.write(chunk(b"end"))
            assert await following.end
            writer.write(chunk(b"more"))
            second_writer.write(chunk(b"b") + LAST)
            assert not await second_following.end
            assert following.parts.qsize() == second_following.parts.qsize() == 1


async def test_an_error_of_a_follower_ends_only_its_stream(path: str) -> None:
    def fail(part: bytes) -> bool:
        raise ModelFailed(part.decode())

    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            second_writer = await server.opened.get()
            following = Follower(second)
            failing = asyncio.create_task(first.follow(fail))
            writer.write(chunk(b"bad"))
            with pytest.raises(ModelFailed, match="bad"):
                await failing
            second_writer.write(chunk(b"b") + LAST)
            assert await following.parts.get() == b"b"
            assert not await following.end


@pytest.mark.usefixtures("no_end_of_gathering")
async def test_a_stream_that_is_alone_waits_for_no_other(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            waiting = Follower(second)
            await asyncio.sleep(0)
            waiting.end.cancel()
        following = Follower(first)
        writer.write(chunk(b"a"))
        assert await following.parts.get() == b"a"
        following.end.cancel()


@pytest.mark.usefixtures("no_end_of_gathering")
async def test_a_stream_waits_for_the_others_of_its_step(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            followers = [Follower(answer) for answer in (first, second)]
            await asyncio.sleep(0)
            writer.write(chunk(b"a"))
            await writer.drain()
            for _ in range(20):
                await asyncio.sleep(0)
            assert followers[0].parts.empty()
            for following in followers:
                following.end.cancel()


async def test_what_arrived_before_a_connection_is_lost_can_be_read(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as response:
        writer = await server.opened.get()
        following = Follower(response)
        writer.write(chunk(b"a"))
        writer.close()
        assert await following.parts.get() == b"a"
        with pytest.raises(ConnectionError, match="was closed"):
            await following.end


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n", b""])
async def test_an_answer_that_is_not_http_or_has_no_end(path: str, answer: bytes) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_unix_server(accept, path)
    http = EngineHttp(path, "key")
    with pytest.raises(ConnectionError, match=r"was closed|not an HTTP response"):
        await http.get("/")
    http.close()
    listening.close()


async def test_a_connection_waits_while_the_servers_queue_is_full(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        server.setblocking(False)
        loop, waiting = asyncio.get_running_loop(), []
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            try:
                waiting[-1].connect(path)
            except BlockingIOError:
                break
        http = EngineHttp(path, "key")
        getting = asyncio.create_task(http.get("/"))
        await asyncio.sleep(0)
        for connection in waiting:
            connection.close()
        async with asyncio.timeout(WAIT_LIMIT_S):
            body = b""
            while not body:
                accepted, _ = await loop.sock_accept(server)
                with accepted:
                    if await loop.sock_recv(accepted, 1000):
                        body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                        await loop.sock_sendall(accepted, body)
            assert await getting == b"ok"
        http.close()
