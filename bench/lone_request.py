"""The timeline of a lone request, by the distance to the broker.

A worker with a model that takes a fixed time (bench/fairness/timed.py) and one caller, both behind
a proxy that delays each direction. Phases are medians, so they add up to the whole only nearly. A
way takes a little longer than asked, as timers do, so it is measured with an echo.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from bench.distant_link import distant
from bench.fairness.timed import BrokerSite, Callers, TimedWorker, servers
from bench.report import Figure, Outcome
from shared.messages import ReplyBody

DELAYS_MS = (0.0, 10.0, 25.0, 50.0)
MODEL_S = 0.005
REQUESTS, WARM_UP = 40, 10
WAYS = 4
ECHO_BYTES = 512
MAX_BESIDES_MS = 5.0
"""What a request may take besides four ways and the model."""


class _Caller(Callers):
    """Keeps what the reply says, and when it came."""

    answered: ReplyBody
    answered_at_s: float

    def _deliver(self, request_id: str, body: ReplyBody) -> None:
        self.answered, self.answered_at_s = body, time.time()
        super()._deliver(request_id, body)


def run() -> Outcome:
    """Measures each distance."""
    figures = list[Figure]()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (endpoint, redis_url):
        for delay_ms in DELAYS_MS:
            host, _, port = endpoint.partition(":")
            with distant(int(port), delay_ms, Path(folder)) as link:
                site = BrokerSite(redis_url, f"{host}:{link}", near=endpoint)
                way_ms = uvloop.run(_way_ms(delay_ms, Path(folder))) if delay_ms else 0.0
                figures += uvloop.run(_measure(site, delay_ms, way_ms))
    return Outcome(figures)


async def _way_ms(delay_ms: float, folder: Path) -> float:
    """What one direction of the proxy takes, by the round trips of an echo."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    took_s = []
    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        AsyncExitStack() as stack,
    ):
        proxy = distant(server.sockets[0].getsockname()[1], delay_ms, folder)
        link = await asyncio.to_thread(proxy.__enter__)
        stack.push_async_callback(asyncio.to_thread, proxy.__exit__, None, None, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", link)
        for _ in range(REQUESTS):
            began_s = time.perf_counter()
            writer.write(bytes(ECHO_BYTES))
            await reader.readexactly(ECHO_BYTES)
            took_s.append(time.perf_counter() - began_s)
        writer.close()
    return 1000 * statistics.median(took_s) / 2


async def _measure(site: BrokerSite, delay_ms: float, way_ms: float) -> list[Figure]:
    project = f"lone-{time.time_ns()}"
    await site.provision(project)
    async with (
        site.transport(project) as transport,
        TimedWorker(site, project, batch_s=MODEL_S),
    ):
        caller = _Caller(transport)
        receiving = asyncio.create_task(caller.receive())
        timelines = []
        for _ in range(WARM_UP + REQUESTS):
            began_s = time.time()
            await caller.ask("one", [1])
            timelines.append(dict(_phases_ms(began_s, caller)))
        receiving.cancel()
    timelines = timelines[WARM_UP:]
    middle = {name: statistics.median(one[name] for one in timelines) for name in timelines[0]}
    besides_ms = middle["all"] - middle["model"] - WAYS * way_ms
    where = f"{delay_ms:g} ms"
    return [
        Figure(f"{where}: one way", way_ms, "ms"),
        *(Figure(f"{where}: {name}", value, "ms") for name, value in middle.items()),
        Figure(f"{where}: besides ways and model", besides_ms, "ms", "<=", MAX_BESIDES_MS),
    ]


def _phases_ms(began_s: float, caller: _Caller) -> Iterator[tuple[str, float]]:
    """The phases of a request, one after the other, and the whole."""
    body = caller.answered
    receipt = body.outcomes[0].receipt
    moments = {
        "job published to pulled": receipt.pulled_at_s,
        "pulled to model": receipt.started_at_s,
        "model": receipt.finished_at_s,
        "model to reply": body.replied_at_s,
        "reply published to received": caller.answered_at_s,
    }
    last_s = began_s
    for name, at_s in moments.items():
        assert at_s is not None, "a computed item has all its times; this is a bug"
        yield name, 1000 * (at_s - last_s)
        last_s = at_s
    yield "all", 1000 * (caller.answered_at_s - began_s)
