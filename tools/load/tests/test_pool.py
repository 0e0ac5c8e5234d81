"""Persistent connections: requests that wait, are disconnected, or never reach a server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from penstock_load.connection import encode_request
from penstock_load.exchange import CANCELED, LOST, UNANSWERED, UNCONNECTED, Exchange
from penstock_load.pool import ConnectionPool, Server
from tests.limits import WAIT_LIMIT_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Ends:
    """Collects the requests that have ended, along with their bodies."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.bodies: list[bytes] = []
        self._more = asyncio.Event()

    def __call__(self, exchange: Exchange, body: list[bytes]) -> None:
        self.exchanges.append(exchange)
        self.bodies.append(b"".join(body))
        self._more.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(self.exchanges) < count:
                self._more.clear()
                await self._more.wait()

    @property
    def statuses(self) -> dict[int, int]:
        return {exchange.number: exchange.status for exchange in self.exchanges}


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[Server]:
    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Server("127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pool_of(server: Server, most: int) -> AsyncIterator[tuple[ConnectionPool, Ends]]:
    ends = Ends()
    pool = ConnectionPool(server, most, ends)
    try:
        yield pool, ends
    finally:
        pool.close()


def send(pool: ConnectionPool, *numbers: int) -> None:
    for number in numbers:
        content = b'{"number": %d}' % number
        pool.send(number, encode_request("h", "/", {}, content), time.perf_counter())


async def echo(request: web.Request) -> web.StreamResponse:
    headers = {"x-penstock-cost-usd": "0.00000123"}
    return web.Response(body=await request.read(), headers=headers)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.anyio
async def test_requests_wait_in_order_for_a_connection() -> None:
    async with serving(echo) as server, pool_of(server, 1) as (pool, ends):
        send(pool, *range(5))
        assert pool.in_flight == 5
        await ends.wait(5)
    assert [exchange.number for exchange in ends.exchanges] == list(range(5))
    assert ends.bodies[3] == b'{"number": 3}'
    assert ends.exchanges[0].cost_usd == 0.00000123


@pytest.mark.anyio
async def test_caller_hangs_up_on_open_and_on_waiting_requests() -> None:
    async with serving(hang) as server, pool_of(server, 1) as (pool, ends):
        await pool.open(1)
        send(pool, 0, 1, 2)
        pool.cancel(1)
        pool.cancel(0)
        pool.cancel(77)
        await ends.wait(2)
        assert ends.statuses == {1: CANCELED, 0: CANCELED}
        pool.abandon()
        await ends.wait(3)
    assert ends.statuses[2] == UNANSWERED


@pytest.mark.anyio
async def test_what_was_sent_is_told_from_what_never_left() -> None:
    async def drop(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(drop) as server, pool_of(server, 2) as (pool, ends):
        send(pool, 0)
        await ends.wait(1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with pool_of(Server("127.0.0.1", nobody.getsockname()[1]), 2) as (pool, unheard):
            send(pool, 1, 2, 3)
            await unheard.wait(3)
            assert pool.in_flight == 0
    assert ends.statuses == {0: LOST}
    assert unheard.statuses == {1: UNCONNECTED, 2: UNCONNECTED, 3: UNCONNECTED}
