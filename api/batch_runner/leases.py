"""Batch leases in Redis, which keep runners from running the same lines.

A lease only avoids wasted work. Documents and segments are written only once, so two runners can
safely run the same batch (api/batches/documents.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from prometheus_client import Counter, Gauge

from shared.errors import Unavailable
from shared.stores.redis_client import RedisLink, RedisStore, load_script

LEASE_S = 15.0
"""Time, in seconds, before another runner takes over a dead runner's batches."""

ERRORS = Counter(
    "penstock_batch_leases_errors_total",
    "Failed round trips to Redis about batch leases, by operation.",
    ["operation"],
)
UP = Gauge("penstock_batch_leases_redis_up", "1 while Redis is being asked about leases.")
_RENEW = load_script("shared/stores/lease_renew.lua")
_RELEASE = load_script("shared/stores/lease_release.lua")
log = logging.getLogger(__name__)


class BatchLeases(RedisStore):
    """One runner's leases: an async context manager that opens even without Redis.

    Args:
        redis_url: the Redis server shared by all runners.
        lease_s: a lease expires if it is not renewed for this long.
    """

    def __init__(self, redis_url: str, holder: str, *, lease_s: float = LEASE_S) -> None:
        super().__init__(RedisLink("batches", redis_url, up=UP, errors=ERRORS, field="records_url"))
        self._commands = self._link.commands("the lease store")
        self._holder = holder
        self._lease_s = lease_s

    async def take(self, batch_id: str) -> bool:
        """Takes or renews a lease. Returns whether this runner holds it."""
        lease_ms = round(self._lease_s * 1000)
        return bool(
            await self._commands.run_script(_RENEW, [_key(batch_id)], self._holder, lease_ms)
        )

    async def keep(self, batch_id: str) -> None:
        """Keeps renewing a lease until another runner takes it.

        While Redis is unreachable, this runner is assumed to still hold the lease.
        """
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                if not await self.take(batch_id):
                    return
            except Unavailable as error:
                facts = {"batch": batch_id, "reason": error.message}
                log.warning("batch lease not renewed", extra=facts)

    async def release(self, batch_id: str) -> None:
        """Releases a lease. If Redis is unreachable, the lease expires."""
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(_RELEASE, [_key(batch_id)], self._holder)


def _key(batch_id: str) -> str:
    return f"penstock:batch:{batch_id}:lease"
