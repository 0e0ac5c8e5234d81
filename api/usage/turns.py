"""Turns at BigQuery: few queries at a time, and of one tenant only some that wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import Overloaded

RUNNING = 2
"""Queries at a time. Each holds a thread for a second or so."""
WAITING = 16
OF_ONE_TENANT = 4
"""Queries of one tenant that run or wait."""


class Turns:
    """Who asks BigQuery now, and who waits for it."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(RUNNING)

    def claim(self, tenant: str) -> None:
        """Takes a place in the line. `taken` must follow.

        Raises:
            Overloaded: the line is full, or the tenant has its part of it.
        """
        if self._asked[tenant] >= OF_ONE_TENANT or self._asked.total() >= RUNNING + WAITING:
            raise Overloaded("too many questions about usage; try again", retry_after_s=1.0)
        self._asked[tenant] += 1

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """The turn of a tenant that has claimed one."""
        try:
            async with self._slots:
                yield
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant]
