"""The load generator against a real HTTP server that counts the requests it receives."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bench.load.generator import LoadOrder, drive, send
from bench.peers.answers import PLACE, bodies_of, vector_of

Answer = Callable[[web.Request, str], Awaitable[web.StreamResponse]]


class Server:
    """Responds to each text as configured, and remembers the texts and how many requests were open
    at once.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.port = 0
        self.texts: list[str] = []
        self.most_open = 0
        self._open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = (await request.json())["text"]
        self.texts.append(text)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            return await self._answer(request, text)
        finally:
            self._open -= 1


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    app = web.Application()
    app.router.add_post("/embed", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


async def length_of(request: web.Request, text: str) -> web.StreamResponse:
    return web.json_response({"vector": [float(len(text)), 1.0]})


def order(server: Server, texts: list[str], in_flight: int = 4, **changed: object) -> LoadOrder:
    given: dict[str, Any] = {"send_s": 5.0, "limit_s": 5.0, "sample_every": 2} | changed
    return LoadOrder(
        server.port, bodies_of({"text": PLACE}, texts), in_flight, path="/embed", **given
    )


@pytest.mark.anyio
async def test_closed_loop_sends_each_text_once_and_counts_each_answer() -> None:
    texts = [f'text {"x" * number} "quoted" é' for number in range(50)]
    async with serving(length_of) as server:
        report = await send(order(server, texts))
    assert sorted(server.texts) == sorted(texts)
    assert (report.sent, len(report.round_trip_ms), report.failures) == (50, 50, {})
    sampled = {number: vector_of(body, ["vector"])[0] for number, body in report.samples}
    assert sampled == {number: len(texts[number]) for number in range(0, 50, 2)}


@pytest.mark.anyio
async def test_closed_loop_keeps_its_number_in_flight() -> None:
    waiting: list[asyncio.Future[None]] = []

    async def answer_in_fives(request: web.Request, text: str) -> web.StreamResponse:
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) == 5:
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        else:
            await waiting[-1]
        return await length_of(request, text)

    async with serving(answer_in_fives) as server:
        report = await send(order(server, ["a"] * 20, in_flight=5))
    assert server.most_open == 5
    assert len(report.round_trip_ms) == 20


@pytest.mark.anyio
async def test_refusals_and_lost_connections_are_counted_apart() -> None:
    async def misbehave(request: web.Request, text: str) -> web.StreamResponse:
        if text == "busy":
            return web.json_response({}, status=503)
        if text == "drop":
            assert request.transport is not None
            request.transport.abort()
        return await length_of(request, text)

    async with serving(misbehave) as server:
        report = await send(
            order(server, ["good", "busy", "drop", "good", "busy", "good"], in_flight=1)
        )
    assert report.failures == {"503": 2, "connection lost": 1}
    assert (report.sent, len(report.round_trip_ms)) == (6, 3)


@pytest.mark.anyio
async def test_what_is_never_answered_is_given_up() -> None:
    async def hang(request: web.Request, text: str) -> web.StreamResponse:
        if text == "hang":
            await asyncio.Event().wait()
        return await length_of(request, text)

    async with serving(hang) as server:
        report = await send(
            order(server, ["good", "hang", "good"], in_flight=2, send_s=0.2, limit_s=0.2)
        )
    assert report.failures == {"unanswered": 1}
    assert len(report.round_trip_ms) == 2


@pytest.mark.anyio
async def test_generator_is_a_process_of_its_own() -> None:
    async with serving(length_of) as server:
        report = await asyncio.to_thread(drive, order(server, ["a", "b", "a"], in_flight=2))
    assert report.statuses() == {200: 3}
    assert sorted(server.texts) == ["a", "a", "b"]


@pytest.mark.anyio
async def test_bodies_are_sent_again_and_again_for_as_long_as_asked() -> None:
    async with serving(length_of) as server:
        report = await send(order(server, ["a", "b"], in_flight=2, send_s=0.2, is_cycled=True))
    assert report.sent == len(report.round_trip_ms) > 2
    assert set(server.texts) == {"a", "b"}


@pytest.mark.anyio
async def test_headers_of_the_api_are_read() -> None:
    async def answer_with_headers(request: web.Request, text: str) -> web.StreamResponse:
        timings = {
            f"x-penstock-{name}-ms": "1.5" for name in ("queue", "batch", "inference", "total")
        }
        headers = {"x-request-id": request.headers["x-me"], "x-penstock-cache": "miss", **timings}
        return web.json_response({}, headers=headers)

    async with serving(answer_with_headers) as server:
        report = await send(order(server, ["a"], headers={"x-me": "me"}))
    [exchange] = report.exchanges
    assert (exchange.request_id, exchange.cache, exchange.total_ms) == ("me", "miss", 1.5)
    assert exchange.overhead_ms == pytest.approx(exchange.round_trip_ms - 1.5)


@pytest.mark.anyio
async def test_open_loop_does_not_wait_for_answers() -> None:
    all_there = asyncio.Event()
    arrived: list[str] = []

    async def answer_when_all_arrived(request: web.Request, text: str) -> web.StreamResponse:
        arrived.append(text)
        if len(arrived) == 10:
            all_there.set()
        await all_there.wait()
        return await length_of(request, text)

    async with serving(answer_when_all_arrived) as server:
        texts = [str(number) for number in range(10)]
        report = await send(order(server, texts, in_flight=100, rate_per_s=500.0))
    assert sorted(server.texts) == sorted(texts)
    assert (report.sent, len(report.round_trip_ms), report.failures) == (10, 10, {})


@pytest.mark.anyio
async def test_open_loop_counts_the_wait_for_a_connection() -> None:
    async with serving(length_of) as server:
        report = await send(order(server, ["a"] * 40, in_flight=1, rate_per_s=100_000.0))
    assert len(report.round_trip_ms) == 40
    assert report.round_trip_ms == sorted(report.round_trip_ms)


def test_vector_is_read_from_lists_and_base64() -> None:
    packed = base64.b64encode(np.array([1.5, -2.0], "<f4").tobytes()).decode()
    assert vector_of(json.dumps({"data": [{"e": packed}]}).encode(), ["data", 0, "e"]) == [
        1.5,
        -2.0,
    ]
    assert vector_of(b"[1, 2.5]", []) == [1.0, 2.5]
    with pytest.raises(LookupError):
        vector_of(b'{"data": []}', ["data", 0])
    with pytest.raises(ValueError, match="Expected"):
        vector_of(b'{"data": "x"}', [])
