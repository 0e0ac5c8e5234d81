"""The load generator against a real HTTP server that counts what it is sent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from bench.peers.connection import PLACE, vector_of
from bench.peers.generator import LOST, UNANSWERED, UNREAD, Order, send

Answer = Callable[[web.Request, str], Awaitable[web.StreamResponse]]


class Server:
    """Answers each text as told, and remembers the texts and how many were open at once."""

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


def order(server: Server, texts: list[str], in_flight: int = 4, **changed: object) -> Order:
    given = {"send_s": 5.0, "limit_s": 5.0, "sample_every": 2} | changed
    return Order(server.port, "/embed", {"text": PLACE}, ["vector"], texts, in_flight, **given)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_closed_loop_sends_each_text_once_and_counts_each_answer() -> None:
    texts = [f'text {"x" * number} "quoted" é' for number in range(50)]
    async with serving(length_of) as server:
        report = await send(order(server, texts))
    assert sorted(server.texts) == sorted(texts)
    assert (report.sent, len(report.round_trip_ms), report.failures) == (50, 50, {})
    assert {number: vector[0] for number, vector in report.samples} == {n: len(texts[n]) for n in range(0, 50, 2)}


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
        report = await send(order(server, ["good", "busy", "drop", "good", "busy", "good"], in_flight=1))
    assert report.failures == {"503": 2, LOST: 1}
    assert (report.sent, len(report.round_trip_ms)) == (6, 3)


@pytest.mark.anyio
async def test_what_is_never_answered_is_given_up() -> None:
    async def hang(request: web.Request, text: str) -> web.StreamResponse:
        if text == "hang":
            await asyncio.Event().wait()
        return await length_of(request, text)

    async with serving(hang) as server:
        report = await send(order(server, ["good", "hang", "good"], in_flight=2, send_s=0.2, limit_s=0.2))
    assert report.failures == {UNANSWERED: 1}
    assert len(report.round_trip_ms) == 2


@pytest.mark.anyio
async def test_answer_without_a_vector_is_a_failure() -> None:
    async def no_vector(request: web.Request, text: str) -> web.StreamResponse:
        return web.json_response({"error": "none"})

    async with serving(no_vector) as server:
        report = await send(order(server, ["a", "b"], in_flight=1))
    assert report.failures == {UNREAD: 1}


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
    assert vector_of(json.dumps({"data": [{"e": packed}]}).encode(), ["data", 0, "e"]) == [1.5, -2.0]
    assert vector_of(b"[1, 2.5]", []) == [1.0, 2.5]
    with pytest.raises(LookupError):
        vector_of(b'{"data": []}', ["data", 0])
    with pytest.raises(ValueError, match="Expected"):
        vector_of(b'{"data": "x"}', [])
