"""Redis and instances on one clock that the test controls."""

from __future__ import annotations

import calendar
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import redis

from api.limits.accounts import LimitStore
from api.limits.limiter import Limiter
from tests.limits import REDIS_LIMIT_S

CLOCK = "tests/api/limits/now.lua"
T0_MS = calendar.timegm((2026, 11, 22, 12, 0, 0)) * 1000


class Clock:
    """Redis's time, as set by the test. Calling it returns the same time in seconds."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self.set(T0_MS)

    def __call__(self) -> float:
        return self.now_ms / 1000

    def set(self, now_ms: float) -> None:
        self.now_ms = int(now_ms)
        self._client.set("test:now_ms", self.now_ms)

    def advance(self, seconds: float) -> None:
        self.set(self.now_ms + seconds * 1000)

    def close(self) -> None:
        self._client.close()


@asynccontextmanager
async def limiters(url: str, clock: Clock, instances: int) -> AsyncIterator[list[Limiter]]:
    """Limiters, each with its own connection and no background tasks."""
    async with AsyncExitStack() as opened:
        made = []
        for number in range(instances):
            store = LimitStore(url, f"api-{number}", clock=CLOCK, timeout_s=REDIS_LIMIT_S)
            made.append(Limiter(await opened.enter_async_context(store), clock=clock))
        yield made
