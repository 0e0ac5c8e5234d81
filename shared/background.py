"""A task that runs beside requests, from the start of its owner to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class BackgroundTask:
    """Runs a coroutine that never returns. If it ends before `stop`, that is logged as a bug.

    Args:
        work: what it does, for the log.
        run: makes the coroutine.
    """

    def __init__(self, work: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._run = run
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts it in the running event loop."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Ends it and waits for its end. Does nothing if it was not started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            facts = {"work": self._work}
            log.critical("work ended; this is a bug", extra=facts, exc_info=task.exception())
