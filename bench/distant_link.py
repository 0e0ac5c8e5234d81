"""`python -m bench.distant_link PORT TARGET_PORT DELAY_MS`: a TCP proxy that adds distance.

Each direction delays what passes by DELAY_MS. With `--jitter`, a log-normal time is added, as round
trips of Pub/Sub have: its median is that share of the delay, and sigma is 0.7. Bytes keep their
order, as TCP does. A process of its own, so that it shares no interpreter with what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from infra.local.process import Process, free_port, listens

CHUNK_BYTES = 256 * 1024
JITTER_SIGMA = 0.7
READY_LIMIT_S = 30.0


@contextmanager
def distant(
    target_port: int, delay_ms: float, log_dir: Path, *, jitter: float = 0.0
) -> Iterator[int]:
    """The port of a proxy in front of `target_port` of this machine.

    Args:
        target_port: where it leads.
        delay_ms: of each direction, in milliseconds. With 0 there is no proxy.
        log_dir: the folder of its log.
        jitter: the median of what is added at random, as a share of the delay.
    """
    if not delay_ms:
        yield target_port
        return
    port = free_port()
    flags = [str(port), str(target_port), str(delay_ms), "--jitter", str(jitter)]
    command = [sys.executable, "-m", "bench.distant_link", *flags]
    with Process(f"link-{port}", command, log_dir) as link:
        link.wait_ready(lambda: listens(port), READY_LIMIT_S)
        yield port


async def serve(port: int, target_port: int, pause_s: Callable[[], float]) -> None:
    """Proxies connections until canceled. `pause_s` returns the delay of the next piece."""

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_s, data = await pieces.get()
                await asyncio.sleep(due_s - loop.time())
                if not data:
                    sink.close()
                    return
                sink.write(data)

        delivering = asyncio.create_task(deliver())
        last_s = 0.0
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                last_s = max(last_s, loop.time() + pause_s())
                pieces.put_nowait((last_s, data))
        pieces.put_nowait((max(last_s, loop.time()), b""))
        await delivering

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", target_port)
        await asyncio.gather(carry(reader, onward), carry(back, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    """Runs until it is ended."""
    parser = argparse.ArgumentParser(description="A TCP proxy that adds distance.")
    parser.add_argument("port", type=int)
    parser.add_argument("target_port", type=int)
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("--jitter", type=float, default=0.0)
    arguments = parser.parse_args()
    delay_s = arguments.delay_ms / 1000

    def pause_s() -> float:
        if not arguments.jitter:
            return float(delay_s)
        return float(delay_s) * (
            1.0 + float(arguments.jitter) * random.lognormvariate(0.0, JITTER_SIGMA)
        )

    uvloop.run(serve(arguments.port, arguments.target_port, pause_s))


if __name__ == "__main__":
    main()
