"""Gives an instance an inbox: leased from the pool through Redis, or created for it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prometheus_client import Counter, Gauge

from shared.errors import PenstockError, Unavailable
from shared.reply_topics import make_inbox, remove_inbox
from shared.stores.redis_client import Commands, RedisLink
from shared.stores.redis_scripts import load_script
from shared.transport import Admin

log = logging.getLogger(__name__)

REDIS_LIMIT_S, REDIS_RETRY_S = 2.0, 0.25
REMOVE_LIMIT_S = 4.0
"""A container has 10 s from SIGTERM to its end.

https://docs.cloud.google.com/run/docs/container-contract#instance-shutdown
"""
OWN_INBOX_EXPIRES_S = 86_400
"""The shortest that Pub/Sub accepts: one day, by `ExpirationPolicy.ttl` in pubsub.proto. It removes
inboxes of crashed instances."""

ERRORS = Counter(
    "penstock_inbox_errors_total",
    "Round trips to Redis about the inbox's lease that failed.",
    ["operation"],
)
UP = Gauge("penstock_inbox_redis_up", "1 while Redis is being asked about the inbox's lease.")

_RENEW = load_script("shared/stores/lease_renew.lua")
_RELEASE = load_script("shared/stores/lease_release.lua")


class InboxLost(Unavailable):
    """Another instance has the inbox, or it is gone: replies to it no longer arrive here."""


@dataclass(frozen=True, slots=True)
class InboxLease:
    """An inbox that this instance holds.

    `keep` runs while it is held and raises InboxLost after that.
    """

    inbox: str
    keep: Callable[[], Coroutine[Any, Any, object]]


class InboxPool:
    """The inboxes of the pool, numbered from `first`.

    The key of each in Redis has the id of its holder.

    While Redis is out of reach an instance keeps its inbox: no other instance can lease it through
    a Redis that is down. If only this instance is cut off and another leases its inbox, replies may
    go to the wrong instance until Redis answers again. Their requests then read the record.

    Args:
        redis_url: the Redis with the leases.
        first: the number of the first inbox. Regions with separate Redis servers use separate
            ranges.
        size: how many inboxes the pool has.
        lease_s: a lease expires after this time without renewal.
        instance: id of the holder.
    """

    def __init__(
        self, redis_url: str, first: int, size: int, lease_s: float, instance: str
    ) -> None:
        self._redis_url = redis_url
        self._first = first
        self._size = size
        self._lease_s = lease_s
        self._instance = instance

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[InboxLease]:
        """Leases an inbox while the block runs.

        Raises:
            Unavailable: none is free, or Redis is out of reach.
        """
        link = RedisLink(
            "inbox",
            self._redis_url,
            timeout_s=REDIS_LIMIT_S,
            retry_s=REDIS_RETRY_S,
            up=UP,
            errors=ERRORS,
        )
        redis = link.commands("the pool of inboxes")
        async with link:
            number = await self._acquire(redis)
            try:
                yield InboxLease(str(number), lambda: self._renew(redis, number))
            finally:
                await self._release(redis, number)

    async def _acquire(self, redis: Commands) -> int:
        numbers = range(self._first, self._first + self._size)
        held = await redis.run("MGET", *map(_key, numbers))
        free = [number for number, holder in zip(numbers, held, strict=True) if holder is None]
        # In random order, so that instances that start together try different inboxes.
        for number in random.sample(free, len(free)):
            if await redis.run("SET", _key(number), self._instance, "NX", "PX", self._lease_ms()):
                return number
        raise Unavailable(f"all {self._size} inboxes of the pool are taken")

    async def _renew(self, redis: Commands, number: int) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                is_ours = await redis.run_script(
                    _RENEW, [_key(number)], self._instance, self._lease_ms()
                )
            except Unavailable as error:
                log.warning(
                    "inbox lease not renewed", extra={"inbox": number, "reason": error.message}
                )
                continue
            if not is_ours:
                raise InboxLost(f"inbox {number} is held by another instance now")

    async def _release(self, redis: Commands, number: int) -> None:
        try:
            await redis.run_script(_RELEASE, [_key(number)], self._instance)
        except Unavailable as error:
            log.warning(
                "inbox lease not released", extra={"inbox": number, "reason": error.message}
            )

    def _lease_ms(self) -> int:
        return max(1, round(self._lease_s * 1000))


@asynccontextmanager
async def own_inbox(admin: Admin, slots: int, instance: str) -> AsyncIterator[InboxLease]:
    """Creates an inbox with its slots, and removes it when the block ends.

    Raises:
        ConfigurationError: this process may not create one.
        Unavailable: the broker is out of reach.
    """
    inbox = f"{instance}-{uuid4().hex[:12]}"
    try:
        await make_inbox(admin, inbox, slots, expires_after_s=OWN_INBOX_EXPIRES_S)
        yield InboxLease(inbox, asyncio.Event().wait)
    finally:
        try:
            async with asyncio.timeout(REMOVE_LIMIT_S):
                await remove_inbox(admin, inbox, slots)
        except (TimeoutError, PenstockError) as error:
            log.warning("own inbox not removed", extra={"inbox": inbox, "reason": repr(error)})


def _key(number: int) -> str:
    return f"penstock:inbox:{number}"
