"""Threads for DuckDB's blocking calls: for metadata, for queries, for streamed rows, one writer.

Every request and every job goes through `read`, `query`, `append` or `write`. Two statements that
change rows or tables never meet. Long ones keep nobody from a table's description and from
streaming rows.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio

from bigquery_emulator.errors import BusyError

_Found = TypeVar("_Found")
MAX_QUERIES = 8
"""That read rows at the same time."""
_READERS = 8
_LONGEST_WAIT_S = 60.0
_INTERRUPT_EVERY_S = 0.05


def _nothing() -> None:
    pass


class Threads:
    """The threads of one server."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(_READERS, "bigquery-read")
        self._queries = ThreadPoolExecutor(MAX_QUERIES, "bigquery-query")
        self._writer = ThreadPoolExecutor(1, "bigquery-write")
        self._appender = ThreadPoolExecutor(1, "bigquery-append")

    async def read(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only reads. Waits for a free thread.

        Raises:
            BusyError: there was none for a minute.
        """
        return await self._run(self._readers, _LONGEST_WAIT_S, _nothing, function, *args)

    async def tidy(self, function: Callable[..., None], *args: object) -> None:
        """Runs a short function that must run, in a canceled job too."""
        with anyio.CancelScope(shield=True):
            await self._run(self._readers, None, _nothing, function, *args)

    async def query(
        self,
        function: Callable[..., _Found],
        *args: object,
        interrupt: Callable[[], None] = _nothing,
    ) -> _Found:
        """Runs a function that reads rows for as long as its job may last. Waits as long.

        Args:
            interrupt: ends what runs in the function, where its job is stopped.
        """
        return await self._run(self._queries, None, interrupt, function, *args)

    async def append(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only adds rows. Waits for the others, not for the writer.

        Raises:
            BusyError: they took more than a minute.
        """
        return await self._run(self._appender, _LONGEST_WAIT_S, _nothing, function, *args)

    async def write(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a request's change of the data or the catalog. Waits for the others.

        Raises:
            BusyError: they took more than a minute.
        """
        return await self._run(self._writer, _LONGEST_WAIT_S, _nothing, function, *args)

    async def write_in_job(
        self,
        function: Callable[..., _Found],
        *args: object,
        interrupt: Callable[[], None] = _nothing,
    ) -> _Found:
        """Runs a job's change. Waits for the others as long as its job may last. See `query`."""
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
        # One that runs can't be canceled.
        give_up = wait_s and asyncio.get_running_loop().call_later(wait_s, work.cancel)
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            if work.cancel():
                raise
            with anyio.CancelScope(shield=True):
                # Again and again: an interrupt between two statements of a session is lost.
                while not done.done():
                    interrupt()
                    await asyncio.wait((done,), timeout=_INTERRUPT_EVERY_S)
        finally:
            if give_up:
                give_up.cancel()
        if done.cancelled():
            raise BusyError(f"Exceeded rate limits: no thread was free for {wait_s:.0f} seconds")
        return done.result()
