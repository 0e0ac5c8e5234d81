"""The directory of keys in Redis: one hash, a stream of acts, and a hash of last uses.

The directory is one value with a version, so that a reader never sees half of a change, and two
writers at the same time do not undo each other. Nothing has a TTL, so Redis evicts none of it. A
Redis that lost its data has no version. Then readers keep what they have.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from prometheus_client import Counter, Gauge

from shared.stores.redis_client import RedisLink, RedisStore
from shared.stores.redis_scripts import load_script
from shared.tenants.directory import MOST_KEYS
from shared.tenants.key_store import (
    HOW_TO_START,
    MOST_ACTS,
    Act,
    NoDirectory,
    NotedAct,
    StoredDocument,
)

ERRORS = Counter(
    "penstock_keys_errors_total",
    "Round trips to Redis about API keys that failed, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_keys_redis_up",
    "1 while Redis is being asked for API keys, 0 while the breaker is open.",
)
_REPLACE = load_script("shared/stores/key_replace.lua")
_USES = load_script("shared/stores/key_uses.lua")


class KeyRedis(RedisStore):
    """The directory in one Redis.

    Args:
        redis_url: `redis://`, `rediss://` or `unix://` URL.
        prefix: the prefix of every key, for several deployments on one Redis.
        timeout_s: the time limit of one round trip.
        retry_s: the first pause before Redis is tried again after a failure.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        prefix: str = "penstock:",
        timeout_s: float = 1.0,
        retry_s: float = 0.25,
    ) -> None:
        limits = {"timeout_s": timeout_s, "retry_s": retry_s}
        super().__init__(
            RedisLink("keys", redis_url, **limits, up=UP, errors=ERRORS, field="keys_url")
        )
        self._commands = self._link.commands("the store of API keys")
        self._directory = f"{prefix}keys"
        self._audit = f"{prefix}keys:audit"
        self._used = f"{prefix}keys:used"
        self.source = "Redis"
        self.read_only = ""

    def read_at_start(self) -> StoredDocument | None:
        """None: Redis is asked once the store is open."""
        return None

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the directory. Returns None if it still has this version.

        Raises:
            NoDirectory: Redis has none, or lost it.
            Unavailable: Redis did not answer.
        """
        if version:
            found = await self._commands.run("HGET", self._directory, "version")
            if found is not None and found.decode("latin-1") == version:
                return None
        new, data = await self._commands.run("HMGET", self._directory, "version", "document")
        if new is None or data is None:
            reason = f"there are no keys in Redis; {HOW_TO_START}"
            raise NoDirectory(reason, public=reason)
        return StoredDocument(new.decode("latin-1"), data)

    async def replace(self, version: str, data: bytes, act: Act) -> bool:
        """Replaces the directory if it has this version, and notes the act.

        Raises:
            Unavailable: Redis did not answer. It may have done so all the same.
        """
        args = (version, secrets.token_hex(8), data, msgspec.json.encode(act), MOST_ACTS)
        done = await self._commands.run_script(_REPLACE, [self._directory, self._audit], *args)
        return bool(done)

    async def acts(self, limit: int, before: str = "") -> list[NotedAct]:
        """The acts before this one, newest first.

        Raises:
            Unavailable: Redis did not answer.
        """
        end = f"({before}" if before else "+"
        found = await self._commands.run("XREVRANGE", self._audit, end, "-", "COUNT", limit)
        return [
            NotedAct(act_id.decode(), msgspec.json.decode(fields[b"act"], type=Act))
            for act_id, fields in found
        ]

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Notes when keys were last used.

        Raises:
            Unavailable: Redis did not answer.
        """
        if used_s:
            pairs = [word for pair in used_s.items() for word in pair]
            await self._commands.run_script(_USES, [self._used], 2 * MOST_KEYS, *pairs)

    async def uses(self) -> dict[str, int]:
        """When keys were last used, by id in Unix seconds.

        Raises:
            Unavailable: Redis did not answer.
        """
        found = await self._commands.run("HGETALL", self._used)
        return {key_id.decode(): int(used_s) for key_id, used_s in found.items()}
