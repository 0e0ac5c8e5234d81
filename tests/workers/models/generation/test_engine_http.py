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

from tests.limits import WAIT_LIMIT_S
from workers.models.engines import engine_http
from workers.models.engines.engine_http import EngineHttp

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


async def test_streams_that_arrive_one_after_another_are_read_whole(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            second_writer = await server.opened.get()
            for number in range(20):
                parts = asyncio.gather(first.read_part(), second.read_part())
                writer.write(chunk(b"a%d" % number))
                await writer.drain()
                second_writer.write(chunk(b"b%d" % number))
                assert tuple(await parts) == (b"a%d" % number, b"b%d" % number)
            second_writer.write(LAST)
            assert await second.read_part() == b""
        writer.write(chunk(b"c") + LAST)
        assert await first.read_part() == b"c"
        assert await first.read_part() == b""


@pytest.mark.usefixtures("no_end_of_gathering")
async def test_a_stream_that_is_alone_waits_for_no_other(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            waiting = asyncio.create_task(second.read_part())
            await asyncio.sleep(0)
            waiting.cancel()
        writer.write(chunk(b"a"))
        assert await first.read_part() == b"a"


@pytest.mark.usefixtures("no_end_of_gathering")
async def test_a_stream_waits_for_the_others_of_its_step(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as first:
        writer = await server.opened.get()
        async with http.post("/", {}) as second:
            parts = [asyncio.create_task(answer.read_part()) for answer in (first, second)]
            await asyncio.sleep(0)
            writer.write(chunk(b"a"))
            await writer.drain()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not parts[0].done()
            for part in parts:
                part.cancel()


async def test_what_arrived_before_a_connection_is_lost_can_be_read(path: str) -> None:
    async with opened(path) as (server, http), http.post("/", {}) as response:
        writer = await server.opened.get()
        part = asyncio.create_task(response.read_part())
        writer.write(chunk(b"a"))
        writer.close()
        assert await part == b"a"
        with pytest.raises(ConnectionError, match="was closed"):
            await response.read_part()


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
