"""Passes on a model process's output, and keeps the last lines for error messages."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from workers.runtime.child_process import ChildProcess

DRAIN_LIMIT_S = 5.0
_TAIL_BYTES = 4000


class ChildOutput:
    """Copies a process's output to stderr, and keeps the last lines for error messages."""

    def __init__(self, process: ChildProcess) -> None:
        assert process.stdout is not None, "started with a pipe; this is a bug"
        self._stream = process.stdout
        self._kept = b""
        self._task = asyncio.create_task(self._pass_on())

    async def _pass_on(self) -> None:
        while chunk := await self._stream.read(_TAIL_BYTES):
            self._kept = (self._kept + chunk)[-_TAIL_BYTES:]
            sys.stderr.write(chunk.decode(errors="replace"))

    async def finish(self) -> None:
        """Waits for any remaining output after the process has exited.

        The wait is short, because a grandchild may hold the pipe open.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LIMIT_S):
                await self._task

    def tail(self) -> str:
        """Returns the last lines, formatted for an error message. Empty if there are no lines."""
        text = self._kept.decode(errors="replace").strip()
        return f"; its last output:\n{text}" if text else ""
