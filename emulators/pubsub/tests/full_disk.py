"""`python -m tests.full_disk FOLDER`: runs a server on a separate disk that fills up.

The run takes place in a mount namespace (`unshare --map-root-user --mount`), where it can mount a
small disk.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

from tests.kept_server import KeptServer
from tests.limits import WAIT_LIMIT_S
from tests.wire import Wire, connect

TOPIC, SUBSCRIPTION = "projects/p/topics/jobs", "projects/p/subscriptions/one"
DISK = "size=24m"


async def main(folder: Path) -> None:
    server = KeptServer(folder)
    server.start()
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        answered = await fill(wire)
        assert len(answered) > 100, len(answered)
    server.kill()
    # The server starts even on a full disk, with all confirmed messages.
    server.start()
    async with connect(server.endpoint) as wire:
        received: list[Any] = []
        while len(received) < len(answered):
            received += (await wire.pull(SUBSCRIPTION)).received_messages
        assert {delivery.message.message_id for delivery in received} >= set(answered)
        # Once the backlog is acked, space is available again without any further action.
        for start in range(0, len(received), 100):
            await wire.ack(SUBSCRIPTION, received[start : start + 100])
        again = await published_at_last(wire)
    server.kill()
    server.start()
    async with connect(server.endpoint) as wire:
        (remaining,) = (await wire.pull(SUBSCRIPTION)).received_messages
        assert [remaining.message.message_id] == again
    server.kill()


async def fill(wire: Wire) -> list[str]:
    answered: list[str] = []
    while True:
        try:
            answered += await wire.publish(TOPIC, "x" * 50_000)
        except grpc.aio.AioRpcError as error:
            refused_by_the_disk(error)
            return answered


async def published_at_last(wire: Wire) -> list[str]:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            try:
                return await wire.publish(TOPIC, "room again")
            except grpc.aio.AioRpcError as error:
                refused_by_the_disk(error)
                await asyncio.sleep(0.05)


def refused_by_the_disk(error: grpc.aio.AioRpcError) -> None:
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        raise error


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(disk)], check=True)
    asyncio.run(main(disk))
