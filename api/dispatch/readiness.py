"""Whether this instance can serve: a reply that it sends to its own inbox must come back, through the broker itself."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from uuid import uuid4

import redis.asyncio
from redis.exceptions import RedisError

from api.dispatch.job_sender import Inbox
from shared.errors import PenstockError
from shared.messages import Reply, ReplyBody, encode_reply
from shared.transport import Publisher

PROBE_LIMIT_S = 2.0
REDIS_LIMIT_S = 0.5
REUSED_S = 1.0
"""A probe younger than this answers again, so that asking often costs the broker nothing."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What was found: `ready` or, with the reason, not; Redis is only ever a degradation."""

    is_ready: bool
    pubsub: str
    redis: str

    @property
    def status(self) -> str:
        """`ready`, `degraded` or `unavailable`."""
        if not self.is_ready:
            return "unavailable"
        return "ready" if self.redis == "ok" else "degraded"


class Readiness:
    """Asks broker and Redis, each within a limit."""

    def __init__(self, inbox: Inbox, publisher: Publisher, redis_url: str) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._redis_url = redis_url
        self._probing = asyncio.Lock()
        self._probed_s = -math.inf
        self._condition = Condition(False, "not asked yet", "not asked yet")

    async def check(self) -> Condition:
        """The condition now, or at most a second ago."""
        async with self._probing:
            if time.monotonic() - self._probed_s > REUSED_S:
                pubsub, redis_found = await asyncio.gather(self._probe_pubsub(), self._probe_redis())
                self._condition = Condition(pubsub == "ok", pubsub, redis_found)
                self._probed_s = time.monotonic()
        return self._condition

    async def _probe_redis(self) -> str:
        """`ok`, or that requests go on without; asked over a connection of its own, past the breaker of the cache."""
        client = redis.asyncio.Redis.from_url(self._redis_url, socket_connect_timeout=REDIS_LIMIT_S)
        try:
            async with asyncio.timeout(REDIS_LIMIT_S):
                await client.ping()
        except (RedisError, OSError, TimeoutError):
            return "out of reach: requests go on without it"
        finally:
            await client.aclose()
        return "ok"

    async def _probe_pubsub(self) -> str:
        """`ok` when a message went all the way to the broker and back to a slot of ours, else the reason."""
        probe_id = f"probe_{uuid4().hex}"
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                with self._inbox.waiter(probe_id, 0) as waiter:
                    data, attributes = encode_reply(Reply(probe_id, 0, waiter.slot, ReplyBody([])))
                    await self._publisher.publish(waiter.inbox, data, attributes, timeout_s=PROBE_LIMIT_S)
                    await waiter.reply(PROBE_LIMIT_S)
        except TimeoutError:
            return f"no round trip within {PROBE_LIMIT_S:g} s"
        except PenstockError as error:
            return error.message
        return "ok"
