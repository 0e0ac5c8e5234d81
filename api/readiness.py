"""Whether this instance can serve: a reply that it sends to its own inbox must come back, through the broker itself."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from uuid import uuid4

from api.jobs import Inbox
from shared.cache import ResultCache
from shared.errors import PenstockError
from shared.messages import Reply, ReplyBody, encode_reply
from shared.transport import Publisher

PROBE_LIMIT_S = 2.0
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

    def __init__(self, inbox: Inbox, publisher: Publisher, cache: ResultCache) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._cache = cache
        self._probing = asyncio.Lock()
        self._probed_s = -math.inf
        self._pubsub = ""

    async def check(self) -> Condition:
        """The condition now, or at most a second ago."""
        async with self._probing:
            if time.monotonic() - self._probed_s > REUSED_S:
                self._pubsub = await self._probe()
                self._probed_s = time.monotonic()
        redis = "ok" if self._cache.redis_is_up else "out of reach: requests go on without it"
        return Condition(self._pubsub == "ok", self._pubsub, redis)

    async def _probe(self) -> str:
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
