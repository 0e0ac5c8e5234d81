"""What a model process prints: passed on as it comes, and the end of it kept to say why the process died."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from workers.runtime.child_process import ChildProcess

DRAIN_LIMIT_S = 5.0
_TAIL_BYTES = 4000


class ChildOutput:
    """What a model process prints: passed on to stderr, and the end of it kept for the error message."""

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
        """Waits for the rest, now that the process is gone; a grandchild may hold the pipe, so not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LIMIT_S):
                await self._task

    def tail(self) -> str:
        """The last lines, set off for a message; empty where there are none."""
        text = self._kept.decode(errors="replace").strip()
        return f"; it printed last:\n{text}" if text else ""
