"""Answers to requests that carry an Idempotency-Key, in Redis, so that any instance can give them again.

An entry is a hash, known by tenant and key. Fields: `fingerprint` (of the request), `claim` (whose request computes, or
computed, the answer) and `answer` (once there is one). A claim lives as long as its instance renews its lease; all the
leases of an instance are renewed by one call. Redis's own clock counts, so instances need not agree on the time.

Nothing here has a TTL: Redis evicts what has one when it is full (volatile-lru), and an answer is promised. Entries
that are over go a few with each new one, by the index of ends. All answers together have a budget of bytes
(shared/retention.py). Claims do not count: only those of instances that died stay without an answer. The
scripts are beside this file (*.lua).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from prometheus_client import Counter, Gauge

from shared.retention import BUDGET_BYTES
from shared.stores.redis_client import RedisLink, RedisStore
from shared.stores.redis_scripts import load_script

ERRORS = Counter(
    "penstock_answers_errors_total", "Round trips to Redis about kept answers that failed, by operation.", ["operation"]
)
DROPPED = Counter("penstock_answers_dropped_total", "Kept answers dropped before their time, for lack of room.")
UP = Gauge("penstock_answers_redis_up", "1 while Redis is being asked for kept answers, 0 while the breaker is open.")

_RETENTION, _NOW = "shared/stores/retention.lua", "api/idempotency/now.lua"
_CLAIM = load_script(_RETENTION, _NOW, "api/idempotency/claim.lua")
_SETTLE = load_script(_RETENTION, _NOW, "api/idempotency/settle.lua")
_FREE = load_script("api/idempotency/free.lua")
_RENEW = load_script(_NOW, "api/idempotency/renew.lua")


class KeyClaim(NamedTuple):
    """What a request learns of its key.

    `ours`: it is to compute the answer. `running`: somebody does. `answered`: `answer` is it. `differs`: the key stands
    for another request.
    """

    state: Literal["ours", "running", "answered", "differs"]
    answer: bytes


class IdempotencyStore(RedisStore):
    """The entries in one Redis; an async context manager, cheap to open with or without Redis.

    Args:
        redis_url: `redis://`, `rediss://` or `unix://` URL.
        keep_s: how long an answer is kept.
        lease_s: a claim that is not renewed for so long is free again.
        max_bytes: the budget of all answers.
        prefix: put before every key, for several deployments on one Redis.
        timeout_s: the longest that one round trip may take.
        retry_s: first pause before a Redis that failed is tried again, in the background.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        keep_s: float,
        lease_s: float,
        max_bytes: int = BUDGET_BYTES,
        prefix: str = "penstock:",
        timeout_s: float = 0.25,
        retry_s: float = 0.25,
    ) -> None:
        limits = {"timeout_s": timeout_s, "retry_s": retry_s}
        super().__init__(RedisLink("answers", redis_url, **limits, up=UP, errors=ERRORS, field="records_url"))
        self._commands = self._link.commands("the store of answers, which an Idempotency-Key needs,")
        self._prefix = prefix
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self.lease_s = lease_s

    async def claim(self, name: str, fingerprint: str, claim: str) -> KeyClaim:
        """Asks for the right to answer; `claim` is a name that is never used again.

        Raises:
            Unavailable: Redis did not answer; where it had taken the claim, that lapses with its lease.
        """
        args = (fingerprint, claim, self._keep_s, self.lease_s)
        state, answer = await self._commands.run_script(_CLAIM, self._keys(name), *args)
        return KeyClaim(state.decode(), answer)

    async def settle(self, name: str, tenant: str, fingerprint: str, claim: str, answer: bytes) -> bytes:
        """Keeps `answer`; returns the one that counts, another's where that was first.

        Where the budget is used up, the oldest answers go, of the tenant whose answers take most.

        Raises:
            Unavailable: Redis did not answer.
        """
        args = (fingerprint, claim, answer, self._keep_s, tenant, self._max_bytes)
        kept, dropped = await self._commands.run_script(_SETTLE, self._keys(name), *args)
        DROPPED.inc(dropped)
        return cast(bytes, kept)

    async def free(self, name: str, claim: str) -> None:
        """Lets a claim go without an answer: who asks next computes.

        Raises:
            Unavailable: Redis did not answer; the claim lapses with its lease.
        """
        await self._commands.run_script(_FREE, self._keys(name), claim)

    async def renew(self, claims: Iterable[str]) -> None:
        """Renews the leases of `claims`.

        Raises:
            Unavailable: Redis did not answer.
        """
        await self._commands.run_script(_RENEW, [f"{self._prefix}answers:leases"], self.lease_s, *claims)

    def _keys(self, name: str) -> tuple[str, ...]:
        index = f"{self._prefix}answers"
        return f"{index}:of:{name}", index, f"{index}:leases"
