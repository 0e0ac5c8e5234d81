"""Stores idempotent requests' claims and responses in Redis, for all instances.

An entry is a hash for one tenant and key. Its fields are `fingerprint` (of the request), `claim`
(of the request that computes the response), and `answer` (the response). A claim is valid for as
long as its instance keeps renewing the lease. One call renews all of an instance's leases. Only
Redis's clock is used, so instances' clocks don't need to agree.

Entries have no TTL, because a full Redis server evicts keys that have one (volatile-lru), and
responses must be kept. Each new entry removes a few expired entries, found through an index. All
responses share a byte budget (shared/stores/retention.py). Claims do not count toward the budget,
because only crashed instances leave claims without a response. The scripts are in *.lua files in
this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from prometheus_client import Counter, Gauge

from shared.stores.redis_client import KEY_PREFIX, RedisLink, RedisStore, load_script
from shared.stores.retention import BUDGET_BYTES

ERRORS = Counter(
    "penstock_answers_errors_total",
    "Failed round trips to Redis about stored answers, by operation.",
    ["operation"],
)
DROPPED = Counter(
    "penstock_answers_dropped_total", "Stored answers dropped early for lack of room."
)
UP = Gauge(
    "penstock_answers_redis_up",
    "1 while Redis is being asked for stored answers, 0 while the breaker is open.",
)

REDIS_LIMIT_S = 0.25
_RETENTION, _NOW = "shared/stores/retention.lua", "api/idempotency/now.lua"
_CLAIM = load_script(_RETENTION, _NOW, "api/idempotency/claim.lua")
_COMPLETE = load_script(_RETENTION, _NOW, "api/idempotency/complete.lua")
_RELEASE = load_script("api/idempotency/release.lua")
_RENEW = load_script(_NOW, "api/idempotency/renew.lua")


class KeyClaim(NamedTuple):
    """The result of a claim.

    `acquired`: the caller computes the response. `in_progress`: another request is computing it.
    `completed`: `response` is stored. `mismatch`: the key was used with a different request.
    """

    state: Literal["acquired", "in_progress", "completed", "mismatch"]
    response: bytes


class IdempotencyStore(RedisStore):
    """The entries in one Redis server.

    An async context manager that opens quickly, with or without Redis.

    Args:
        redis_url: `redis://`, `rediss://`, or `unix://` URL.
        keep_s: how long to store a response, in seconds.
        lease_s: seconds until a claim that is not renewed expires.
        prefix: prefix for every key, so that several deployments can share one Redis.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        keep_s: float,
        lease_s: float,
        max_bytes: int = BUDGET_BYTES,
        prefix: str = KEY_PREFIX,
    ) -> None:
        super().__init__(
            RedisLink(
                "answers",
                redis_url,
                timeout_s=REDIS_LIMIT_S,
                up=UP,
                errors=ERRORS,
                field="records_url",
            )
        )
        self._commands = self._link.commands("the response store required for Idempotency-Key")
        self._prefix = prefix
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self.lease_s = lease_s

    async def claim(self, name: str, fingerprint: str, claim: str) -> KeyClaim:
        """Claims the right to compute the response. `claim` is a unique ID.

        Raises:
            Unavailable: Redis did not respond. If Redis recorded the claim, it expires with the
                lease.
        """
        args = (fingerprint, claim, self._keep_s, self.lease_s)
        state, response = await self._commands.run_script(_CLAIM, self._keys(name), *args)
        return KeyClaim(state.decode(), response)

    async def complete(
        self, name: str, tenant: str, fingerprint: str, claim: str, response: bytes
    ) -> bytes:
        """Stores `response`, unless the key already has one. Returns the stored response.

        If the budget is exceeded, removes the oldest responses belonging to the tenant with the
        largest total.
        """
        args = (fingerprint, claim, response, self._keep_s, tenant, self._max_bytes)
        stored, dropped = await self._commands.run_script(_COMPLETE, self._keys(name), *args)
        DROPPED.inc(dropped)
        return cast(bytes, stored)

    async def release(self, name: str, claim: str) -> None:
        """Releases a claim without a response. The next request with the key computes the response.

        Raises:
            Unavailable: Redis did not respond. The claim expires with its lease.
        """
        await self._commands.run_script(_RELEASE, self._keys(name), claim)

    async def renew(self, claims: Iterable[str]) -> None:
        """Renews the leases on all of `claims`."""
        await self._commands.run_script(
            _RENEW, [f"{self._prefix}answers:leases"], self.lease_s, *claims
        )

    def _keys(self, name: str) -> tuple[str, ...]:
        index = f"{self._prefix}answers"
        return f"{index}:of:{name}", index, f"{index}:leases"
