"""Limits concurrent BigQuery queries, in total and per tenant."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from shared.errors import Overloaded

MAX_RUNNING = 4
"""Queries at a time. Each holds a thread for a second or so."""
MAX_OF_ONE_TENANT = 4
"""Queries of one tenant that run or wait."""
MAX_CLAIMED = 64
"""Queries that run or wait. So sixteen tenants that do their worst still leave the line open."""

Answer = TypeVar("Answer")


class Turns:
    """The running BigQuery queries, and those that wait.

    A tenant starts a query if more threads are free than it has queries running. So alone it runs
    two and leaves two, and it takes at least three tenants to hold all. Tenants that wait take
    turns.
    """

    def __init__(self) -> None:
        self._claimed: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        # A separate pool, so that slow queries take no threads from other work of the process.
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "usage")

    def claim(self, tenant: str) -> None:
        """Takes a place in the line. `taken` or `run` must follow.

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
        """Holds the turn of a tenant that has claimed one."""
        try:
            await self._turn(tenant)
            try:
                yield
            finally:
                _count_down(self._running, tenant)
                self._start_next()
        finally:
            _count_down(self._claimed, tenant)

    async def _turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn at the same moment
                _count_down(self._running, tenant)
            else:
                self._leave(tenant, turn)
            self._start_next()
            raise

    def _start_next(self) -> None:
        """Gives turns while anybody who waits may have one, to the tenant that waits longest."""
        while (tenant := self._next_tenant()) is not None:
            turn = self._waiting[tenant].popleft()
            if self._waiting[tenant]:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not turn.cancelled():
                self._running[tenant] += 1
                turn.set_result(None)

    def _next_tenant(self) -> str | None:
        free = MAX_RUNNING - self._running.total()
        return next((one for one in self._waiting if self._running[one] < free), None)

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]


def _count_down(counter: Counter[str], tenant: str) -> None:
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
