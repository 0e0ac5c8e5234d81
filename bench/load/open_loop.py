"""The load generator of bench/overload.py: the same few bodies again and again, at a rate or so many at a time.

At a rate (an open loop) it does not wait for answers, as the many callers of a service don't: each request goes out
when it is due, on a kept connection that is free or on a new one. A process of its own (`python -m
bench.load.open_loop`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from itertools import cycle

import httptools
import msgspec
import uvloop

PATH = "/v1/embeddings"
MOST_CONNECTIONS = 4000
TICK_S = 0.002
DRAIN_S = 10.0


class Order(msgspec.Struct):
    """Requests with `bodies` in turn for `seconds`: `rate` of them a second, or `in_flight` at a time where it is 0."""

    port: int
    bodies: list[str]
    seconds: float
    rate: float = 0.0
    in_flight: int = 0
    headers: dict[str, str] = {}


class Exchange(msgspec.Struct):
    """One answer: its status (0: the connection was lost) and the milliseconds it took; by the API's own clock too."""

    status: int
    round_trip_ms: float = 0.0
    total_ms: float = 0.0
    ended_s: float = 0.0
    """Since the start of the order."""


class Report(msgspec.Struct):
    """What came of an order. `lag_ms`: by how much each request went out late; `unsent`: for want of connections."""

    exchanges: list[Exchange]
    lag_ms: list[float]
    unsent: int
    wall_s: float
    cpu_s: float


def drive(order: Order) -> Report:
    """Carries out `order` in a process of its own.

    Raises:
        subprocess.CalledProcessError: the generator failed; its reason is on stderr.
    """
    words, limit_s = [sys.executable, "-m", "bench.load.open_loop"], order.seconds + DRAIN_S + 30
    done = subprocess.run(words, input=msgspec.json.encode(order), stdout=subprocess.PIPE, timeout=limit_s, check=True)
    return msgspec.json.decode(done.stdout, type=Report)


class Generator:
    """Sends what an order says, on the running event loop."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests = cycle([_request(order, body) for body in order.bodies])
        self._idle: list[_Connection] = []
        self._open = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._lag_ms: list[float] = []
        self._unsent = 0
        self.exchanges: list[Exchange] = []
        self.under_way = 0

    async def run(self) -> Report:
        """Sends for as long as the order says, and waits a while for the last answers."""
        self.began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await (self._at_rate() if self._order.rate else self._at_a_time())
        wall_s, cpu_s = time.perf_counter() - self.began_s, time.process_time() - began_cpu_s
        drained_s = time.perf_counter() + DRAIN_S
        while self.under_way and time.perf_counter() < drained_s:  # noqa: ASYNC110 - a tick late is early enough here
            await asyncio.sleep(TICK_S)
        return Report(self.exchanges, self._lag_ms, self._unsent, wall_s, cpu_s)

    async def _at_rate(self) -> None:
        sent = 0
        while (passed_s := time.perf_counter() - self.began_s) < self._order.seconds:
            while sent < passed_s * self._order.rate:
                self._lag_ms.append(1000 * max(0.0, time.perf_counter() - self.began_s - sent / self._order.rate))
                self._send()
                sent += 1
            await asyncio.sleep(TICK_S)

    async def _at_a_time(self) -> None:
        while time.perf_counter() - self.began_s < self._order.seconds:
            while self.under_way < self._order.in_flight:
                self._send()
            await asyncio.sleep(TICK_S)

    def _send(self) -> None:
        request = next(self._requests)
        if self._idle:
            self.under_way += 1
            self._idle.pop().send(request)
        elif self._open >= MOST_CONNECTIONS:
            self._unsent += 1
        else:
            self.under_way += 1
            self._open += 1
            opening = asyncio.create_task(self._connect(request))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _connect(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, connection = await loop.create_connection(
                lambda: _Connection(self), "127.0.0.1", self._order.port
            )
        except OSError:
            self.end(Exchange(0))
            self._open -= 1
            return
        connection.open(transport)
        connection.send(request)

    def end(self, exchange: Exchange) -> None:
        """Notes the end of an exchange."""
        exchange.ended_s = time.perf_counter() - self.began_s
        self.exchanges.append(exchange)
        self.under_way -= 1

    def keep(self, connection: _Connection) -> None:
        """Takes a connection back that has nothing to do."""
        self._idle.append(connection)

    def drop(self, connection: _Connection) -> None:
        """Forgets a connection that was lost."""
        self._open -= 1
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One kept connection, with at most one request on it."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._exchange: Exchange | None = None

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def send(self, request: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = Exchange(0)
        self._began_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"x-penstock-total-ms" and self._exchange is not None:
            self._exchange.total_ms = float(value)

    def on_message_complete(self) -> None:
        self._finish(self._parser.get_status_code())
        self._generator.keep(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(0)
        self._generator.drop(self)

    def _finish(self, status: int) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.status, exchange.round_trip_ms = status, 1000 * (time.perf_counter() - self._began_s)
            self._generator.end(exchange)


def _request(order: Order, body: str) -> bytes:
    given = {
        "host": f"127.0.0.1:{order.port}",
        "content-type": "application/json",
        "content-length": str(len(body.encode())),
        **order.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n{body}".encode()


def main() -> int:
    """Reads an order from stdin and writes its report to stdout; returns the exit status."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(Generator(order).run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
