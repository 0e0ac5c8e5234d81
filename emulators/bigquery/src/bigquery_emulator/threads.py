"""Threads for DuckDB's blocking calls: metadata, queries, streamed rows, and one writer.

Every request and every job uses `read`, `query`, `append`, or `write`. Two statements that change
rows or tables never overlap. Long statements do not delay requests that describe tables or stream
rows.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio

from bigquery_emulator.errors import BusyError

_Found = TypeVar("_Found")
MAX_QUERIES = 8
"""Number of threads that read rows concurrently."""
_READERS = 8
_LONGEST_WAIT_S = 60.0
_INTERRUPT_EVERY_S = 0.05


def _nothing() -> None:
    pass


class Threads:
    """A server's threads."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(_READERS, "bigquery-read")
        self._queries = ThreadPoolExecutor(MAX_QUERIES, "bigquery-query")
        self._writer = ThreadPoolExecutor(1, "bigquery-write")
        self._appender = ThreadPoolExecutor(1, "bigquery-append")

    async def read(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only reads. Waits until a thread is free.

        Raises:
            BusyError: no thread was free for a minute.
        """
        return await self._run(self._readers, _LONGEST_WAIT_S, _nothing, function, *args)

    async def tidy(self, function: Callable[..., None], *args: object) -> None:
        """Runs a short function that must run even if the job is canceled."""
        with anyio.CancelScope(shield=True):
            await self._run(self._readers, None, _nothing, function, *args)

    async def query(
        self,
        function: Callable[..., _Found],
        *args: object,
        interrupt: Callable[[], None] = _nothing,
    ) -> _Found:
        """Runs a function that reads rows, for as long as its job is allowed to take.

        Waits for a thread for up to that long.

        Args:
            interrupt: called to interrupt the function if its job is stopped.
        """
        return await self._run(self._queries, None, interrupt, function, *args)

    async def append(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only adds rows.

        Waits for other functions of this kind, but not for the writer.

        Raises:
            BusyError: the other functions took more than a minute.
        """
        return await self._run(self._appender, _LONGEST_WAIT_S, _nothing, function, *args)

    async def write(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a request's change to the data or the catalog. Waits for other changes.

        Raises:
            BusyError: the other changes took more than a minute.
        """
        return await self._run(self._writer, _LONGEST_WAIT_S, _nothing, function, *args)

    async def write_in_job(
        self,
        function: Callable[..., _Found],
        *args: object,
        interrupt: Callable[[], None] = _nothing,
    ) -> _Found:
        """Runs a job's change. Waits for other changes for as long as its job is allowed to take.

        See `query`.
        """
        return await self._run(self._writer, None, interrupt, function, *args)

    async def _run(
        self,
        pool: ThreadPoolExecutor,
        wait_s: float | None,
        interrupt: Callable[[], None],
        function: Callable[..., _Found],
        *args: object,
    ) -> _Found:
        work = pool.submit(function, *args)
        done = asyncio.wrap_future(work)
        # A function that is already running can't be canceled.
        give_up = wait_s and asyncio.get_running_loop().call_later(wait_s, work.cancel)
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            if work.cancel():
                raise
            with anyio.CancelScope(shield=True):
                # Interrupts repeatedly, because an interrupt that falls between two of a session's
                # statements is lost.
                while not done.done():
                    interrupt()
                    await asyncio.wait((done,), timeout=_INTERRUPT_EVERY_S)
        finally:
            if give_up:
                give_up.cancel()
        if done.cancelled():
            raise BusyError(f"Exceeded rate limits: no thread was free for {wait_s:.0f} seconds")
        return done.result()
