"""The Redis level of the cache: reads and writes many raw values at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from prometheus_client import Counter, Gauge

from shared.stores.redis_client import RedisLink

WRITE_ENTRIES = 128
"""Entries of one call that are written in one round trip."""

ERRORS = Counter(
    "penstock_cache_errors_total", "Round trips to Redis that failed, by operation.", ["operation"]
)
UP = Gauge("penstock_cache_redis_up", "1 while Redis is being asked, 0 while the breaker is open.")


class _Write(NamedTuple):
    key: str
    value: bytes
    ttl_s: int


class RedisLevel:
    """Gets and puts many values at once. Never raises and never waits long.

    Args:
        link: not yet open.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._reads = link.batcher("get", self._send_reads)
        self._writes = link.batcher("put", self._send_writes)

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of `keys` in their order.

        A value is None if missing or if Redis did not answer.
        """
        values = await self._reads.call(keys) if self._link.is_up else None
        return [None] * len(keys) if values is None else values

    async def put(self, values: Mapping[str, bytes], ttl_s: int) -> None:
        """Sets `values` to expire after `ttl_s`.

        If Redis is down they are lost, and a counter counts it.
        """
        writes = [_Write(key, value, ttl_s) for key, value in values.items()]
        # Packing SETs takes about 20 us each: in parts, so that no other task waits long for the
        # loop.
        for start in range(0, len(writes), WRITE_ENTRIES):
            if self._link.is_up:
                await self._writes.call(writes[start : start + WRITE_ENTRIES])

    async def _send_reads(self, keys: list[str]) -> list[bytes | None]:
        return cast("list[bytes | None]", await self._link.client.mget(keys))

    async def _send_writes(self, writes: list[_Write]) -> list[bool]:
        pipeline = self._link.client.pipeline(transaction=False)
        for write in writes:
            pipeline.set(write.key, write.value, ex=write.ttl_s)
        return list(await pipeline.execute())
