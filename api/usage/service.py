"""Reads usage for callers: few queries at a time, with a cache of results.

A result is cached for KEEP_S. So frequent requests cost nothing, and the figures are at most KEEP_S
older than BigQuery's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from api.usage.rows import UsageLine, UsageQuery, UsageRows
from api.usage.turns import QueryPermits

KEEP_S = 10.0
MAX_KEPT = 256


class UsageRead(NamedTuple):
    """Usage, as BigQuery had it at `read_at_s` (Unix time)."""

    lines: Sequence[UsageLine]
    read_at_s: float


class UsageService:
    """Answers questions about usage.

    Args:
        rows: the usage table.
        turns: those of all questions about usage.
        clock: unix time. Tests replace it.
    """

    def __init__(
        self, rows: UsageRows, turns: QueryPermits, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows = rows
        self._turns = turns
        self._clock = clock
        self._kept: dict[UsageQuery, asyncio.Task[UsageRead]] = {}

    async def read(self, query: UsageQuery, tenant: str) -> UsageRead:
        """Returns the usage, at most KEEP_S old, for a request of `tenant`.

        Raises:
            BadInput: the result has too many groups.
            Overloaded: too many queries are running.
            Unavailable: BigQuery is out of reach.
        """
        kept = self._kept.get(query)
        if kept is None or not self._is_fresh(kept):
            self._turns.claim(tenant)
            kept = asyncio.create_task(self._read(query, tenant))
            self._kept.pop(query, None)
            self._kept[query] = kept
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        # The answer is for others too, so a caller who hangs up does not stop it.
        return await asyncio.shield(kept)

    def _is_fresh(self, kept: asyncio.Task[UsageRead]) -> bool:
        if not kept.done():
            return True
        if kept.cancelled() or kept.exception() is not None:
            return False
        return self._clock() < kept.result().read_at_s + KEEP_S

    async def _read(self, query: UsageQuery, tenant: str) -> UsageRead:
        def read() -> UsageRead:
            read_at_s = self._clock()
            return UsageRead(self._rows.read(query), read_at_s)

        return await self._turns.run(tenant, read)
