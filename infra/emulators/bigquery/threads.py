"""Threads for DuckDB's blocking calls: for metadata, for queries, for streamed rows, one writer.

Every request and every job goes through `read`, `query`, `append` or `write`. Two statements that
change rows or tables never meet. Long ones keep nobody from a table's description and from
streaming rows.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import anyio
from anyio import to_thread

from infra.emulators.bigquery.errors import BusyError

_Found = TypeVar("_Found")
_READERS = 8
_QUERIES = 8
_LONGEST_WAIT_S = 60.0


class Threads:
    """The threads of one server, created inside its event loop."""

    def __init__(self) -> None:
        self._readers = anyio.CapacityLimiter(_READERS)
        self._queries = anyio.CapacityLimiter(_QUERIES)
        self._writer = anyio.CapacityLimiter(1)
        self._appender = anyio.CapacityLimiter(1)
        self._threads = anyio.CapacityLimiter(_READERS + _QUERIES + 2)

    async def read(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only reads. Waits for a free thread.

        Raises:
            BusyError: there was none for a minute.
        """
        return await self._run(self._readers, _LONGEST_WAIT_S, function, *args)

    async def tidy(self, function: Callable[..., None], *args: object) -> None:
        """Runs a short function that must run, in a canceled job too."""
        with anyio.CancelScope(shield=True):
            await self._run(self._readers, math.inf, function, *args)

    async def query(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a function that reads rows for as long as its job may last. Waits as long."""
        return await self._run(self._queries, math.inf, function, *args)

    async def append(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a short function that only adds rows. Waits for the others, not for the writer.

        Raises:
            BusyError: they took more than a minute.
        """
        return await self._run(self._appender, _LONGEST_WAIT_S, function, *args)

    async def write(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a request's change of the data or the catalog. Waits for the others.

        Raises:
            BusyError: they took more than a minute.
        """
        return await self._run(self._writer, _LONGEST_WAIT_S, function, *args)

    async def write_in_job(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a job's change. Waits for the others as long as its job may last."""
        return await self._run(self._writer, math.inf, function, *args)

    async def _run(
        self,
        limiter: anyio.CapacityLimiter,
        wait_s: float,
        function: Callable[..., _Found],
        *args: object,
    ) -> _Found:
        turn = object()
        with anyio.move_on_after(wait_s) as waiting:
            await limiter.acquire_on_behalf_of(turn)
        if waiting.cancelled_caught:
            raise BusyError(f"Exceeded rate limits: no thread was free for {wait_s:.0f} seconds")
        try:
            return await to_thread.run_sync(function, *args, limiter=self._threads)
        finally:
            limiter.release_on_behalf_of(turn)
