"""`python -m tests.ten_kills FOLDER [SEED]`: ten SIGKILLs, with a disk that is sometimes full.

The seed determines message sizes and how long after a rejection the server is killed.

The run takes place in a mount namespace (`unshare --map-root-user --mount`), where it can mount a
small disk.
"""

import asyncio
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.full_disk import DISK
from tests.kept_server import KeptServer
from tests.limits import WAIT_LIMIT_S
from tests.wire import Wire, connect

TOPIC = "projects/p/topics/jobs"
PLAIN, ORDERED, ONCE = (f"projects/p/subscriptions/{name}" for name in ("plain", "ordered", "once"))
KILLS = 10
PUBLISHERS = 4
ENOUGH_SMALL, ENOUGH_LARGE = 60, 5
"""Number of responses before a kill."""
SMALL_BYTES, LARGE_BYTES = (200, 2_000), (20_000, 50_000, 200_000)
PAUSES_S = (0.0, 0.01, 0.1, 0.2)
"""Pauses before a kill, to catch the server rejecting, making room, or with room again."""


@dataclass
class Ledger:
    """The server's responses and the messages that consumers received."""

    answered: dict[str, int] = field(default_factory=dict)
    """The number in each message, keyed by message id."""
    received: dict[str, set[str]] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    """Messages whose ack was confirmed under exactly-once delivery."""
    again: set[str] = field(default_factory=set)
    """Messages redelivered even though their ack was confirmed."""
    refused: int = 0


async def publish(wire: Wire, ledger: Ledger, key: str, start: int, size: int) -> None:
    for number in range(start, start + 10_000):
        data = f"{number}:" + "x" * size
        try:
            (message_id,) = await wire.publish(TOPIC, data, ordering_key=key)
        except grpc.aio.AioRpcError as error:
            if "data directory" not in str(error.details()):
                return
            ledger.refused += 1
            await asyncio.sleep(0.02)
        else:
            ledger.answered[message_id] = number


async def consume(wire: Wire, ledger: Ledger, path: str, is_done: Any) -> None:
    received = ledger.received.setdefault(path, set())
    while not is_done():
        pulled = (await wire.pull(path, 50, return_immediately=True)).received_messages
        received.update(delivery.message.message_id for delivery in pulled)
        if path == ONCE:
            ledger.again |= ledger.confirmed & {delivery.message.message_id for delivery in pulled}
        if path == ORDERED:
            check_order(pulled)
        if not pulled:
            await asyncio.sleep(0.01)
            continue
        await wire.ack(path, pulled)
        if path == ONCE:
            ledger.confirmed |= {delivery.message.message_id for delivery in pulled}


async def consume_until_killed(wire: Wire, ledger: Ledger, path: str) -> None:
    with suppress(grpc.aio.AioRpcError):
        await consume(wire, ledger, path, lambda: False)


def check_order(pulled: Any) -> None:
    latest: dict[str, int] = {}
    for received in pulled:
        message_id = int(received.message.message_id)
        assert message_id > latest.get(received.message.ordering_key, 0), "out of order"
        latest[received.message.ordering_key] = message_id


async def kill_in_traffic(
    server: KeptServer, ledger: Ledger, kill: int, draw: random.Random
) -> None:
    """Runs publishers (and consumers, unless the disk must fill up), then kills the server."""
    is_full = kill % 3 == 2
    size = draw.choice(LARGE_BYTES if is_full else SMALL_BYTES)
    enough = len(ledger.answered) + (ENOUGH_LARGE if is_full else ENOUGH_SMALL)
    refused = ledger.refused
    async with connect(server.endpoint) as wire, asyncio.TaskGroup() as traffic:
        for number in range(PUBLISHERS):
            start = (kill * PUBLISHERS + number) * 10_000
            traffic.create_task(publish(wire, ledger, f"k{number}", start, size))
        if not is_full:
            for path in (PLAIN, ORDERED, ONCE):
                traffic.create_task(consume_until_killed(wire, ledger, path))
        try:
            async with asyncio.timeout(WAIT_LIMIT_S / 3):
                # Polls, because four publishers increment the message count being waited for.
                while (  # noqa: ASYNC110
                    len(ledger.answered) < enough or (is_full and ledger.refused == refused)
                ):
                    await asyncio.sleep(0.005)
                if is_full:
                    await asyncio.sleep(draw.choice(PAUSES_S))
        except TimeoutError:
            lacking, refused = enough - len(ledger.answered), ledger.refused - refused
            raise AssertionError(
                f"kill {kill}: {lacking} answers are lacking, {refused} were refused"
            ) from None
        finally:
            server.kill()


async def main(folder: Path, seed: int) -> str:
    server, ledger, draw = KeptServer(folder), Ledger(), random.Random(seed)
    server.start()
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(PLAIN, TOPIC)
        await wire.subscription(ORDERED, TOPIC, enable_message_ordering=True)
        await wire.subscription(ONCE, TOPIC, enable_exactly_once_delivery=True)
    for kill in range(KILLS):
        await kill_in_traffic(server, ledger, kill, draw)
        # No matter how little disk space is left, the server starts and everything can be acked.
        server.start()
        async with connect(server.endpoint) as wire, asyncio.timeout(WAIT_LIMIT_S):
            await asyncio.gather(
                *(
                    consume(wire, ledger, path, lambda path=path: all_of(ledger, path))
                    for path in (PLAIN, ORDERED, ONCE)
                )
            )
    server.kill()
    for path in (PLAIN, ORDERED, ONCE):
        lost = ledger.answered.keys() - ledger.received[path]
        assert not lost, (path, sorted(lost)[:5], len(lost))
    assert not ledger.again, ledger.again
    assert ledger.refused, "the disk was never full"
    return f"{KILLS} kills, {len(ledger.answered)} answered, {ledger.refused} refused, none lost"


def all_of(ledger: Ledger, path: str) -> bool:
    return ledger.answered.keys() <= ledger.received[path]


if __name__ == "__main__":
    disk, seed = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(disk)], check=True)
    sys.stdout.write(asyncio.run(main(disk, seed)) + "\n")
