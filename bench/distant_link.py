"""`python -m bench.distant_link PORT TARGET_PORT DELAY_MS JITTER CUT_EVERY_S`: a remote TCP server.

Data in each direction is delayed by DELAY_MS. JITTER is the sigma of log-normal delays, whose
median is DELAY_MS. Every CUT_EVERY_S seconds, all connections are dropped along with the bytes in
transit. A value of 0 turns either one off. Bytes stay in order, as in TCP. The proxy is a separate
process, so it does not share an interpreter with the measured programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from infra.local.process import Process, free_port, listens

CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 1024
"""Maximum number of chunks in transit in one direction of a connection. At this limit, reading
pauses.
"""
PUBSUB_SIGMA = 0.44
"""Sigma of the log-normal time from publish to receipt with Pub/Sub: ln(46.8 / 26.6) / 1.28.

With Google's Go client and 100 messages/s, its 0.5, 0.9, and 0.99 quantiles are 26.6, 46.8, and
470.7 ms (https://github.com/davidxia/cloud-message-latency, "Metrics", 2021). Up to the 0.9
quantile, these fit a log-normal distribution. The slowest hundredth is later than that, one message
at a time. This proxy can't reproduce that, because it would hold up a whole connection, which
Pub/Sub does not do.
"""
READY_LIMIT_S = 30.0


@contextmanager
def distant(
    target_port: int,
    delay_ms: float,
    log_dir: Path,
    *,
    jitter: float = 0.0,
    cut_every_s: float = 0.0,
) -> Iterator[int]:
    """Yields the port of a proxy in front of `target_port` on this machine.

    Args:
        delay_ms: delay in each direction. If it is 0 and no other option is set, no proxy is used.
        log_dir: folder for the proxy's log.
        jitter: sigma of the log-normal delay. 0 means a constant delay.
        cut_every_s: interval, in seconds, at which all connections are dropped. 0 means never.
    """
    if not delay_ms and not cut_every_s:
        yield target_port
        return
    port = free_port()
    arguments = map(str, (port, target_port, delay_ms, jitter, cut_every_s))
    command = [sys.executable, "-m", "bench.distant_link", *arguments]
    with Process(f"link-{port}", command, log_dir) as link:
        link.wait_ready(lambda: listens(port), READY_LIMIT_S)
        yield port


async def delayed(
    source: asyncio.StreamReader, pause_s: Callable[[], float]
) -> AsyncGenerator[bytes, None]:
    """Yields the pieces that `source` sends, in order, each after its delay, until the end.

    Args:
        source: one direction of a connection.
        pause_s: returns the delay for the next piece, in seconds.
    """
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)

    async def read() -> None:
        due_s = loop.time()
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                due_s = max(due_s, loop.time() + pause_s())
                await pieces.put((due_s, data))
        await pieces.put((max(due_s, loop.time() + pause_s()), b""))

    reading = asyncio.create_task(read())
    try:
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                return
            yield data
    finally:
        reading.cancel()


async def serve(
    port: int, target_port: int, pause_s: Callable[[], float], cut_every_s: float = 0.0
) -> None:
    """Proxies connections until canceled.

    Aborts all connections every `cut_every_s` (0 means never).
    """
    open_ends = set[asyncio.StreamWriter]()

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(delayed(source, pause_s)) as pieces:
            async for data in pieces:
                sink.write(data)
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", target_port)
        open_ends.update((writer, onward))
        try:
            await asyncio.gather(carry(reader, onward), carry(back, writer))
        finally:
            open_ends.difference_update((writer, onward))

    async def cut() -> None:
        while cut_every_s:
            await asyncio.sleep(cut_every_s)
            for end in open_ends:
                end.transport.abort()

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await asyncio.gather(server.serve_forever(), cut())


def log_normal(median_s: float, sigma: float) -> Callable[[], float]:
    return lambda: median_s * random.lognormvariate(0.0, sigma)


def main() -> None:
    """Parses the arguments and runs the proxy until it is killed."""
    port, target_port = map(int, sys.argv[1:3])
    delay_ms, jitter, cut_every_s = map(float, sys.argv[3:])
    uvloop.run(serve(port, target_port, log_normal(delay_ms / 1000, jitter), cut_every_s))


if __name__ == "__main__":
    main()
