"""The load generator: a fixed number of embedding requests over HTTP, N in flight, each timed with its own headers.

A process of its own (`python -m bench.load.closed_loop`: an order on stdin, the report on stdout), so that what it
costs is not counted as the API's; on asyncio protocols, because a client library costs more than the answer of a cache
hit.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial

import httptools
import msgspec
import numpy as np
import uvloop

PATH = "/v1/embeddings"


class Order(msgspec.Struct):
    """What to send: one request per text, `in_flight` at a time on as many kept connections, within `limit_s`."""

    port: int
    model: str
    texts: list[str]
    in_flight: int
    limit_s: float = 300.0
    headers: dict[str, str] = {}


class Exchange(msgspec.Struct):
    """One request and its answer. Milliseconds; status 0: the connection was lost before the answer was complete."""

    status: int
    round_trip_ms: float
    request_id: str = ""
    cache: str = ""
    queue_ms: float = 0.0
    batch_ms: float = 0.0
    inference_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def overhead_ms(self) -> float:
        """What the pipeline added to the model's time."""
        return self.round_trip_ms - self.inference_ms


class Report(msgspec.Struct):
    """What came of an order: the exchanges in order of their end, wall and CPU seconds of the generator."""

    exchanges: list[Exchange]
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return len(self.exchanges) / self.wall_s

    def statuses(self) -> dict[int, int]:
        """How many answers had each status."""
        found = [exchange.status for exchange in self.exchanges]
        return {status: found.count(status) for status in sorted(set(found))}

    def hits(self) -> dict[str, int]:
        """How many answers said each cache word."""
        found = [exchange.cache for exchange in self.exchanges]
        return {word: found.count(word) for word in sorted(set(found))}

    def round_trip(self) -> dict[str, float]:
        """p50, p95 and p99 of the round trip, in ms."""
        return percentiles([exchange.round_trip_ms for exchange in self.exchanges])

    def overhead(self) -> dict[str, float]:
        """p50, p95 and p99 of the round trip without the model's time, in ms."""
        return percentiles([exchange.overhead_ms for exchange in self.exchanges])


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99 of `values`, rounded to microseconds where they are milliseconds."""
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "p99": round(float(p99), 3)}


def drive(order: Order) -> Report:
    """Carries out `order` in a process of its own.

    Raises:
        subprocess.CalledProcessError: the generator failed; its reason is on stderr.
    """
    words = [sys.executable, "-m", "bench.load.closed_loop"]
    sent = msgspec.json.encode(order)
    done = subprocess.run(words, input=sent, stdout=subprocess.PIPE, timeout=order.limit_s + 30, check=True)
    return msgspec.json.decode(done.stdout, type=Report)


async def send(order: Order) -> Report:
    """Carries out `order` on this event loop.

    Raises:
        TimeoutError: it took longer than its limit.
        OSError: nothing listens on the port.
    """
    loop = asyncio.get_running_loop()
    requests = iter([_request(order, text) for text in order.texts])
    exchanges: list[Exchange] = []
    connections = []
    for _ in range(order.in_flight):
        made = partial(_Connection, requests, exchanges, loop.create_future())
        transport, connection = await loop.create_connection(made, "127.0.0.1", order.port)
        connection.open(transport)
        connections.append(connection)
    async with asyncio.timeout(order.limit_s):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for connection in connections:
            connection.send_next()
        await asyncio.gather(*(connection.done for connection in connections))
    return Report(exchanges, time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _request(order: Order, text: str) -> bytes:
    body = msgspec.json.encode({"model": order.model, "input": text, "encoding_format": "base64"})
    given: Mapping[str, str] = {
        "host": f"127.0.0.1:{order.port}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **order.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """One kept connection: sends the next request of all as soon as the last one is answered."""

    def __init__(self, requests: Iterator[bytes], exchanges: list[Exchange], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._exchanges = exchanges
        self._parser = httptools.HttpResponseParser(self)
        self._open: Exchange | None = None
        self.done = done

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def send_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            self._finish()
            return
        self._open = Exchange(0, 0.0)
        self._began_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._open
        if exchange is None or not name.startswith(b"x-"):
            return
        match name:
            case b"x-request-id":
                exchange.request_id = value.decode()
            case b"x-penstock-cache":
                exchange.cache = value.decode()
            case b"x-penstock-queue-ms":
                exchange.queue_ms = float(value)
            case b"x-penstock-batch-ms":
                exchange.batch_ms = float(value)
            case b"x-penstock-inference-ms":
                exchange.inference_ms = float(value)
            case b"x-penstock-total-ms":
                exchange.total_ms = float(value)

    def on_message_complete(self) -> None:
        assert self._open is not None, "an answer without a request; the server broke HTTP"
        self._open.status = self._parser.get_status_code()
        self._close_exchange(self._open)
        self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._open is not None:
            self._close_exchange(self._open)
        self._finish()

    def _close_exchange(self, exchange: Exchange) -> None:
        exchange.round_trip_ms = (time.perf_counter() - self._began_s) * 1000
        self._exchanges.append(exchange)
        self._open = None

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def main() -> int:
    """Reads an order from stdin and writes its report to stdout; returns the exit status."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(send(order))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
