"""A separate process that prepares its ordered work and waits for the signal to start.

It reads its order, a line of JSON, from stdin, and writes READY once it has prepared its work. It
starts when it receives the next line, and writes a report when it is done. Both sides are here.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

READY = b"ready\n"
S = TypeVar("S", bound=msgspec.Struct)


class OrderedProcess:
    """A process that is ready to start."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def report(self, kind: type[S], limit_s: float) -> S:
        """Waits up to `limit_s` for the process to finish. Returns its report."""
        async with asyncio.timeout(limit_s):
            output, _ = await self._process.communicate()
        return msgspec.json.decode(output, type=kind)


@asynccontextmanager
async def ordered(
    words: Sequence[str], order: msgspec.Struct, limit_s: float
) -> AsyncIterator[OrderedProcess]:
    """Starts a process with an order, and waits until the process is ready.

    The process is killed after the block.

    Args:
        words: the module to run and its arguments.
        limit_s: time limit for becoming ready.

    Raises:
        RuntimeError: the process exited before it was ready.
        TimeoutError: the process was not ready in time.
    """
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(limit_s):
            if await process.stdout.readline() != READY:
                raise RuntimeError(f"{words[0]} exited before it was ready")
        yield OrderedProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def read_order(kind: type[S]) -> S:
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def await_start() -> None:
    """Reports that this process is ready, and waits until it may start."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.readline()


def write_report(report: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report))
