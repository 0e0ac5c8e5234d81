"""A model process's client, with a process that ignores its closed socket."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.limits import WAIT_LIMIT_S
from workers.models.base import PreparedText
from workers.models.client import ModelProcessDied
from workers.models.reports import Ready
from workers.runtime.client import ModelClient
from workers.runtime.protocol import encode_server_message, read_client_message

pytestmark = pytest.mark.anyio


class DeafProcess:
    """Is ready at once, and runs until it is killed."""

    pid = 1

    def __init__(self, theirs: socket.socket) -> None:
        self.connection = theirs.dup()
        self.connection.sendall(encode_server_message(Ready("deaf", 0.0, 0.0, 1)))
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader()
        self.returncode: int | None = None
        self.is_waited_for = asyncio.Event()
        self._has_ended = asyncio.Event()

    def kill(self) -> None:
        assert self.stdout is not None
        self.returncode = -9
        self.stdout.feed_eof()
        self._has_ended.set()

    async def wait(self) -> int | None:
        self.is_waited_for.set()
        await self._has_ended.wait()
        return self.returncode


async def test_a_batch_fails_though_closing_its_process_is_canceled() -> None:
    processes: list[DeafProcess] = []

    async def start(theirs: socket.socket) -> DeafProcess:
        processes.append(DeafProcess(theirs))
        return processes[0]

    client = await ModelClient.start(start, WAIT_LIMIT_S)
    (process,) = processes
    with process.connection:
        has_ended = asyncio.Event()
        serving = asyncio.create_task(client.serve(has_ended.set))
        running = await client.send(
            [PreparedText(key="", length=1, ids=b"1234")], WAIT_LIMIT_S, None
        )
        assert await asyncio.to_thread(read_client_message, process.connection) is not None
        serving.cancel()
        await process.is_waited_for.wait()
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        assert has_ended.is_set()
        with pytest.raises(ModelProcessDied):
            async with asyncio.timeout(WAIT_LIMIT_S):
                await running.done
    process.kill()
