"""Turns at BigQuery: few queries at a time, shared by tenants, whoever asks how often."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from shared.errors import Overloaded
from shared.fair_permits import FairPermits

MAX_RUNNING = 4
"""Queries at a time. Each holds a thread for a second or so."""
MAX_OF_ONE_TENANT = 4
"""Queries of one tenant that run or wait."""
MAX_CLAIMED = 64
"""Queries that run or wait. So sixteen tenants that do their worst still leave the line open."""

Answer = TypeVar("Answer")


class QueryPermits:
    """Who asks BigQuery now, and who waits for it.

    Alone, a tenant runs two queries and leaves two threads (shared/fair_permits.py).
    """

    def __init__(self) -> None:
        self._claimed: Counter[str] = Counter()
        self._turns = FairPermits(MAX_RUNNING)
        # Of its own, so that slow queries keep no other work of the process from a thread.
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "usage")

    def claim(self, tenant: str) -> None:
        """Takes a position in the queue. `taken` or `run` must follow.

        Raises:
            Overloaded: the line is full, or the tenant has its part of it.
        """
        if self._claimed[tenant] >= MAX_OF_ONE_TENANT or self._claimed.total() >= MAX_CLAIMED:
            raise Overloaded("too many questions about usage; try again", retry_after_s=1.0)
        self._claimed[tenant] += 1

    async def run(self, tenant: str, function: Callable[..., Answer], *args: object) -> Answer:
        """Calls a function that blocks, in the turn of a tenant that has claimed one."""
        async with self.taken(tenant):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, function, *args)

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """The turn of a tenant that has claimed one."""
        try:
            await self._turns.take(tenant)
            try:
                yield
            finally:
                self._turns.give(tenant)
        finally:
            self._claimed[tenant] -= 1
            if not self._claimed[tenant]:
                del self._claimed[tenant]
