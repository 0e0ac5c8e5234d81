"""The load generator for all benchmarks: closed or open loop, over persistent connections.

It is a separate process (`python -m bench.load.generator`: an order on stdin, the report on
stdout), so that its cost is not attributed to the API.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import uvloop

from penstock_load.connection import encode_request
from penstock_load.exchange import LOST, UNANSWERED, UNCONNECTED, Exchange
from penstock_load.pool import ConnectionPool, Server

START_LIMIT_S = 60.0
REASONS = {LOST: "connection lost", UNANSWERED: "unanswered", UNCONNECTED: "no connection"}


class LoadOrder(msgspec.Struct):
    """The requests to send, and where to send them.

    In a closed loop, `in_flight` requests are sent at a time, and the next one is sent as soon as
    one gets a response. In an open loop (`rate_per_s` above 0), requests arrive as a Poisson
    process, on as many connections as needed, up to `in_flight`. An arrival waits if no connection
    is free, and this wait is part of its measured time.

    Sending ends after `send_s` seconds (0 means no limit) or once all bodies are sent. With
    `is_cycled`, the bodies are sent repeatedly. Requests that have no response `limit_s` after that
    are abandoned.
    """

    port: int
    bodies: list[str]
    in_flight: int
    path: str = "/v1/embeddings"
    headers: dict[str, str] = {}
    send_s: float = 0.0
    is_cycled: bool = False
    rate_per_s: float = 0.0
    seed: int = 0
    limit_s: float = 300.0
    sample_every: int = 0
    """Every nth successful response is kept. 0 means none."""


class LoadReport(msgspec.Struct):
    """The exchanges, in the order in which they finished, and their cost.

    `lag_ms` is each request's delay in an open loop. `samples` contains body numbers and the
    responses to those bodies. `wall_s` is the time until the last response. The CPU seconds are the
    generator's own.
    """

    sent: int
    exchanges: list[Exchange]
    lag_ms: list[float]
    samples: list[tuple[int, str]]
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return sum(exchange.status == 200 for exchange in self.exchanges) / self.wall_s

    @property
    def round_trip_ms(self) -> list[float]:
        """Round trips of the requests that got a 200 response."""
        return [exchange.round_trip_ms for exchange in self.exchanges if exchange.status == 200]

    @property
    def failures(self) -> dict[str, int]:
        others = (exchange.status for exchange in self.exchanges if exchange.status != 200)
        return dict(Counter(REASONS.get(status, str(status)) for status in others))

    def statuses(self) -> dict[int, int]:
        return dict(sorted(Counter(exchange.status for exchange in self.exchanges).items()))

    def hits(self) -> dict[str, int]:
        return dict(sorted(Counter(exchange.cache for exchange in self.exchanges).items()))

    def round_trip(self) -> dict[str, float]:
        """The p50, p95, and p99 of the round trip, in ms."""
        return percentiles([exchange.round_trip_ms for exchange in self.exchanges])

    def overhead(self) -> dict[str, float]:
        """The p50, p95, and p99 of the round trip minus the model's time, in ms."""
        return percentiles([exchange.overhead_ms for exchange in self.exchanges])


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns p50, p95, and p99 of `values`, rounded to microseconds if given in milliseconds."""
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "p99": round(float(p99), 3)}


def embedding_bodies(model: str, inputs: Sequence[str] | Sequence[list[str]]) -> list[str]:
    """Returns a request body for each input, which is a text or a list of texts."""
    bodies = ({"model": model, "input": some, "encoding_format": "base64"} for some in inputs)
    return [msgspec.json.encode(body).decode() for body in bodies]


def drive(order: LoadOrder) -> LoadReport:
    """Carries out `order` in a separate process.

    Raises:
        subprocess.CalledProcessError: the generator failed. The reason is on stderr.
    """
    words = [sys.executable, "-m", "bench.load.generator"]
    limit_s = (order.send_s or order.limit_s) + order.limit_s + START_LIMIT_S
    sent = msgspec.json.encode(order)
    # Uses a file, because a half-megabyte report sent through a pipe was cut off about once in a
    # hundred runs.
    with tempfile.TemporaryFile() as report:
        subprocess.run(words, input=sent, stdout=report, timeout=limit_s, check=True)
        report.seek(0)
        return msgspec.json.decode(report.read(), type=LoadReport)


async def send(order: LoadOrder) -> LoadReport:
    """Carries out `order` on this event loop.

    Raises:
        OSError: nothing is listening on the port.
    """
    generator = _Generator(order)
    await generator.connect()
    began_cpu_s = time.process_time()
    await generator.run()
    cpu_s = time.process_time() - began_cpu_s
    generator.pool.close()
    exchanges = generator.exchanges
    wall_s = max((exchange.ended_s for exchange in exchanges), default=0.0) or 1e-9
    lag_ms = [exchange.lag_ms for exchange in exchanges] if order.rate_per_s else []
    return LoadReport(generator.sent, exchanges, lag_ms, generator.samples, wall_s, cpu_s)


class _Generator:
    """The state of one order: its requests and their outcomes."""

    def __init__(self, order: LoadOrder) -> None:
        self._order = order
        host = f"127.0.0.1:{order.port}"
        self._requests = [
            encode_request(host, order.path, order.headers, body.encode()) for body in order.bodies
        ]
        self.pool = ConnectionPool(Server("127.0.0.1", order.port), order.in_flight, self._ended)
        self._callers = 0 if order.rate_per_s else order.in_flight
        """Callers in a closed loop that are still sending."""
        self._is_sending = False
        self._settled = asyncio.Event()
        self._until_s = 0.0
        self.sent = 0
        self.exchanges: list[Exchange] = []
        self.samples: list[tuple[int, str]] = []

    async def connect(self) -> None:
        await self.pool.open(1 if self._order.rate_per_s else self._order.in_flight)

    async def run(self) -> None:
        order, self._began_s = self._order, time.perf_counter()
        self._until_s = self._began_s + (order.send_s or order.limit_s)
        self._is_sending = True
        if order.rate_per_s:
            await self._arrive()
            self._is_sending, self._until_s = False, time.perf_counter()
        else:
            for _ in range(self._callers):
                self._send_next()
        self._settle()
        try:
            async with asyncio.timeout(self._until_s - time.perf_counter() + order.limit_s):
                await self._settled.wait()
        except TimeoutError:
            self._is_sending = False
            self.pool.abandon()
            async with asyncio.timeout(order.limit_s):
                await self._settled.wait()

    async def _arrive(self) -> None:
        """Runs the open loop: each request is timed from when it was due."""
        gaps, due_s = random.Random(self._order.seed), self._began_s
        while not self._is_over():
            due_s += gaps.expovariate(self._order.rate_per_s)
            if due_s > self._until_s:
                return
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self._send(due_s)

    def _is_over(self) -> bool:
        is_used_up = not self._order.is_cycled and self.sent >= len(self._requests)
        return is_used_up or time.perf_counter() > self._until_s

    def _send(self, due_s: float) -> None:
        number, self.sent = self.sent, self.sent + 1
        self.pool.send(number, self._requests[number % len(self._requests)], due_s)

    def _send_next(self) -> None:
        """In a closed loop, makes a caller send its next request."""
        if self._is_sending and not self._is_over():
            self._send(time.perf_counter())
        self._settle()

    def _ended(self, exchange: Exchange, body: list[bytes]) -> None:
        """Stores a request's outcome. In a closed loop, its caller continues."""
        exchange.ended_s = time.perf_counter() - self._began_s
        self.exchanges.append(exchange)
        every = self._order.sample_every
        if every and 200 <= exchange.status < 300 and exchange.number % every == 0:
            self.samples.append((exchange.number, b"".join(body).decode()))
        if exchange.status == UNCONNECTED:
            self._callers -= 1
        elif not self._order.rate_per_s:
            self._send_next()
        self._settle()

    def _settle(self) -> None:
        is_closed_loop = not self._order.rate_per_s
        if is_closed_loop and (self._is_over() or self._callers <= 0):
            self._is_sending = False
        if self._until_s and not self._is_sending and self.sent == len(self.exchanges):
            self._settled.set()


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadOrder)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(send(order))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
