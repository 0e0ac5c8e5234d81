"""Threads for DuckDB's blocking calls: several readers, and one writer for all changes.

Every request and every job goes through `read` or `write`, so two changes never meet.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio
from anyio import to_thread

_Found = TypeVar("_Found")
_READERS = 8


class Threads:
    """The threads of one server, created inside its event loop."""

    def __init__(self) -> None:
        self._readers = anyio.CapacityLimiter(_READERS)
        self._writer = anyio.CapacityLimiter(1)

    async def read(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a function that only reads the data. Waits for a free thread."""
        return await to_thread.run_sync(function, *args, limiter=self._readers)

    async def write(self, function: Callable[..., _Found], *args: object) -> _Found:
        """Runs a function that may change the data or the catalog. Waits for the others."""
        return await to_thread.run_sync(function, *args, limiter=self._writer)
