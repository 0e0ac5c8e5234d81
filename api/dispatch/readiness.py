"""Checks readiness: API keys must be known, and a probe must get through the broker and back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args
from uuid import uuid4

import redis.asyncio
from redis.exceptions import RedisError

from api.dispatch.reply_inbox import ReplyInbox
from shared.broker.transport import Publisher
from shared.errors import PenstockError
from shared.messages import Reply, ReplyBody, encode_reply
from shared.models.entry import Replies
from shared.stores.redis_client import find_eviction_fault

PROBE_LIMIT_S = 2.0
REDIS_LIMIT_S = 0.5
REUSED_S = 1.0
"""How long a result is reused, so that frequent checks do not load the broker."""
_KEYS_READY = frozenset({"ok", "not required"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadinessStatus:
    """The result of a check.

    If Redis is missing or may evict records, the instance is degraded but ready.
    """

    is_ready: bool
    pubsub: str
    redis: str
    keys: str

    @property
    def status(self) -> str:
        """`ready`, `degraded`, or `unavailable`."""
        if not self.is_ready:
            return "unavailable"
        return "ready" if self.redis == "ok" else "degraded"


class Readiness:
    """Probes the broker and Redis, each with a time limit.

    Args:
        records_url: URL of the Redis server for records, which may be the same server. It must not
            evict keys that have no expiration.
        keys_status: returns `ok`, `not required`, or the reason API keys can't be checked.
    """

    def __init__(
        self,
        inbox: ReplyInbox,
        publisher: Publisher,
        redis_url: str,
        records_url: str,
        keys_status: Callable[[], str],
    ) -> None:
        self._inbox = inbox
        self._publisher = publisher
        self._redis_url = redis_url
        self._records_url = records_url
        self._keys_status = keys_status
        self._probing = asyncio.Lock()
        self._probed_s = -math.inf
        self._last = ReadinessStatus(False, *["not checked yet"] * 3)

    async def check(self) -> ReadinessStatus:
        """Returns the status, at most REUSED_S old."""
        async with self._probing:
            if time.monotonic() - self._probed_s > REUSED_S:
                pubsub, redis_found = await asyncio.gather(
                    self._probe_pubsub(), self._probe_redis()
                )
                keys = self._keys_status()
                is_ready = pubsub == "ok" and keys in _KEYS_READY
                self._last = ReadinessStatus(is_ready, pubsub, redis_found, keys)
                self._probed_s = time.monotonic()
        return self._last

    async def _probe_redis(self) -> str:
        """Returns `ok`, or a description of the problem.

        Uses separate connections, because the stores' connections have a circuit breaker.
        """
        urls = dict.fromkeys((self._redis_url, self._records_url))
        reasons = await asyncio.gather(*map(self._probe_one, urls))
        return next((reason for reason in reasons if reason != "ok"), "ok")

    async def _probe_one(self, url: str) -> str:
        client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=REDIS_LIMIT_S)
        try:
            async with asyncio.timeout(REDIS_LIMIT_S):
                await client.ping()
                if url == self._records_url:
                    return await find_eviction_fault(client) or "ok"
        except (RedisError, OSError, TimeoutError):
            return "unreachable; requests proceed without it"
        finally:
            await client.aclose()
        return "ok"

    async def _probe_pubsub(self) -> str:
        """Returns `ok` after a round trip through the broker on both topics, or what went wrong."""
        reasons = await asyncio.gather(*map(self._probe_replies, get_args(Replies)))
        return next((reason for reason in reasons if reason != "ok"), "ok")

    async def _probe_replies(self, replies: Replies) -> str:
        probe_id = f"probe_{uuid4().hex}"
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                with self._inbox.waiter(probe_id, 0, replies) as waiter:
                    data, attributes = encode_reply(Reply(probe_id, 0, waiter.slot, ReplyBody([])))
                    await self._publisher.publish(
                        waiter.inbox, data, attributes, timeout_s=PROBE_LIMIT_S
                    )
                    await waiter.reply(PROBE_LIMIT_S)
        except TimeoutError:
            return f"round trip did not complete within {PROBE_LIMIT_S:g} s"
        except PenstockError as error:
            # Anyone can read this response, but the broker's message is for operators only.
            log.warning("broker round trip failed", extra={"reason": error.message})
            return "round trip failed: unreachable or rejecting messages"
        return "ok"
