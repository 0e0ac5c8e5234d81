"""The load generator of every contender: one text a request, N in flight or at a rate, over kept connections.

A process of its own (`python -m bench.peers.generator`: an order on stdin, the report on stdout). Answers are only
counted while it measures; a sample of them is kept and read at the end.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from typing import Any

import msgspec
import uvloop

from bench.peers.connection import Connection, requests_of, vector_of

LOST = "connection lost"
UNANSWERED = "unanswered"
UNREAD = "not a vector"
START_LIMIT_S = 60.0


class Order(msgspec.Struct):
    """What to send to whom.

    Closed loop: `in_flight` requests at a time, a new one as soon as one is answered, new ones for `send_s` seconds or
    until the texts are used up. Open loop (`rate_per_s` above 0): arrivals of a Poisson process for `send_s` seconds,
    on as many connections as that takes up to `in_flight`; an arrival that finds none free waits, and its wait counts.
    """

    port: int
    path: str
    body: Any
    answer: list[str | int]
    texts: list[str]
    in_flight: int
    send_s: float
    rate_per_s: float = 0.0
    seed: int = 0
    limit_s: float = 120.0
    sample_every: int = 16


class Report(msgspec.Struct):
    """What came of an order.

    `round_trip_ms` holds the requests answered with 200, in order of their end; `failures` counts the others by status
    or reason; `samples` are (number of the text, its vector). CPU seconds are the generator's own.
    """

    sent: int
    round_trip_ms: list[float]
    failures: dict[str, int]
    wall_s: float
    cpu_s: float
    samples: list[tuple[int, list[float]]]

    @property
    def rate(self) -> float:
        """Requests answered with 200 per second, from the first sent to the last answered."""
        return len(self.round_trip_ms) / self.wall_s


def drive(order: Order) -> Report:
    """Carries out `order` in a process of its own.

    Raises:
        subprocess.CalledProcessError: the generator failed; its reason is on stderr.
    """
    words = [sys.executable, "-m", "bench.peers.generator"]
    limit_s = order.send_s + order.limit_s + START_LIMIT_S
    # A file, for a report of half a megabyte came through a pipe cut short once in a hundred runs.
    with tempfile.TemporaryFile() as report:
        subprocess.run(words, input=msgspec.json.encode(order), stdout=report, timeout=limit_s, check=True)
        report.seek(0)
        return msgspec.json.decode(report.read(), type=Report)


async def send(order: Order) -> Report:
    """Carries out `order` on this event loop.

    Requests without an answer `limit_s` after the last one was sent are given up and counted as unanswered.

    Raises:
        OSError: nothing listens on the port.
    """
    load = _Load(order)
    for _ in range(order.in_flight if not order.rate_per_s else 1):
        await load.connect()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await load.run(began_s)
    cpu_s = time.process_time() - began_cpu_s
    wall_s = max(load.ended_s - began_s, 1e-9)
    samples = load.read_samples()
    load.close()
    return Report(load.sent, load.round_trip_ms, dict(load.failures), wall_s, cpu_s, samples)


class _Load:
    """The state of one order: texts to come, connections, what was counted."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests = requests_of(order.port, order.path, order.body, order.texts)
        self._idle: deque[Connection] = deque()
        self._waiting: deque[tuple[int, float]] = deque()
        self._connections: list[Connection] = []
        self._kept: list[tuple[int, bytes]] = []
        self._until_s = 0.0
        self._settled = asyncio.Event()
        self._reconnects: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.ended_s = 0.0
        self.round_trip_ms: list[float] = []
        self.failures: Counter[str] = Counter()

    @property
    def _is_closed_loop(self) -> bool:
        return not self._order.rate_per_s

    async def connect(self) -> None:
        """Opens one more connection; it is idle then."""
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._order.port)
        connection.open(transport)
        self._connections.append(connection)
        self.take_next(connection)

    async def run(self, began_s: float) -> None:
        """Sends for as long as the order says, then waits for the answers."""
        self._until_s = began_s + self._order.send_s
        if self._is_closed_loop:
            while self._idle and self._begin_closed(self._idle.popleft()):
                pass
        else:
            await self._arrive(began_s)
            # The next one would come too late: nothing is sent any more, also where all are answered already.
            self._until_s = time.perf_counter()
        self._settle()
        try:
            async with asyncio.timeout(self._until_s - time.perf_counter() + self._order.limit_s):
                await self._settled.wait()
        except TimeoutError:
            open_ones = self.sent - len(self.round_trip_ms) - self.failures.total()
            self.failures[UNANSWERED] += open_ones
            self.ended_s = time.perf_counter()

    async def _arrive(self, began_s: float) -> None:
        """The open loop: each arrival is timed from when it was due, not from when a connection was free."""
        gaps = random.Random(self._order.seed)
        due_s = began_s
        for number in range(len(self._requests)):
            due_s += gaps.expovariate(self._order.rate_per_s)
            if due_s > self._until_s:
                return
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            self.sent += 1
            self._waiting.append((number, due_s))
            if self._idle:
                self.take_next(self._idle.popleft())
            elif len(self._connections) < self._order.in_flight:
                self._reconnect()

    def take_next(self, connection: Connection) -> None:
        """Gives a free connection its next request, or keeps it for later."""
        if self._is_closed_loop and self._until_s and self._begin_closed(connection):
            return
        if self._waiting:
            number, due_s = self._waiting.popleft()
            connection.begin(number, self._requests[number], due_s)
            return
        self._idle.append(connection)
        self._settle()

    def _begin_closed(self, connection: Connection) -> bool:
        now_s = time.perf_counter()
        if now_s > self._until_s or self.sent >= len(self._requests):
            return False
        number, self.sent = self.sent, self.sent + 1
        connection.begin(number, self._requests[number], now_s)
        return True

    def answered(self, connection: Connection, number: int, status: int, began_s: float, body: bytes) -> None:
        """Counts an answer and goes on with its connection."""
        self.ended_s = time.perf_counter()
        if status != 200:
            self.failures[str(status)] += 1
        else:
            self.round_trip_ms.append((self.ended_s - began_s) * 1000)
            if number % self._order.sample_every == 0:
                self._kept.append((number, body))
        if connection.is_open:
            self.take_next(connection)
        self._settle()

    def lost(self, connection: Connection, number: int | None) -> None:
        """Counts what was open on a connection that the server closed, and opens another in its place."""
        self._connections.remove(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if number is not None:
            self.failures[LOST] += 1
            self.ended_s = time.perf_counter()
        if self._settled.is_set():
            return
        self._reconnect()
        self._settle()

    def _reconnect(self) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_again())
        self._reconnects.add(task)
        task.add_done_callback(self._reconnected)

    def _reconnected(self, task: asyncio.Task[None]) -> None:
        self._reconnects.discard(task)
        self._settle()

    async def _connect_again(self) -> None:
        try:
            await self.connect()
        except OSError:
            # The server is gone: what waits for a connection counts as lost.
            self.failures[LOST] += len(self._waiting)
            self._waiting.clear()

    def _settle(self) -> None:
        if not self._until_s:
            return
        can_send = bool(self._connections or self._reconnects) and self.sent < len(self._requests)
        is_sending = can_send and time.perf_counter() < self._until_s
        if not is_sending and self.sent == len(self.round_trip_ms) + self.failures.total():
            self._settled.set()

    def read_samples(self) -> list[tuple[int, list[float]]]:
        """The vectors of the kept answers; one that can't be read counts as a failure."""
        samples = []
        for number, body in self._kept:
            try:
                samples.append((number, vector_of(body, self._order.answer)))
            except (ValueError, LookupError, TypeError):
                self.failures[UNREAD] += 1
        return samples

    def close(self) -> None:
        """Closes all connections."""
        self._settled.set()
        for connection in list(self._connections):
            connection.close()


def main() -> int:
    """Reads an order from stdin and writes its report to stdout; returns the exit status."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(send(order))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
