"""Answers to requests that carry an Idempotency-Key, in Redis, so that any instance can give them again.

An entry is a hash, known by tenant and key. Fields: `fingerprint` (of the request), `claim` (whose request computes, or
computed, the answer) and `answer` (once there is one). A claim lives as long as its instance renews its lease; all the
leases of an instance are renewed by one call. Redis's own clock counts, so instances need not agree on the time.

Nothing here has a TTL: Redis evicts what has one when it is full (volatile-lru), and an answer is promised. Entries
that are over go a few with each new one, by the index of ends. All answers together have a budget of bytes, see
shared/retention.py. Claims do not count: only those of instances that died stay without an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Literal, NamedTuple, Self, cast

from prometheus_client import Counter, Gauge

from shared.retention import BUDGET_BYTES, ENTRY_BYTES, FUNCTIONS
from shared.stores.redis_client import RedisLink

ERRORS = Counter(
    "penstock_answers_errors_total", "Round trips to Redis about kept answers that failed, by operation.", ["operation"]
)
DROPPED = Counter("penstock_answers_dropped_total", "Kept answers dropped before their time, for lack of room.")
UP = Gauge("penstock_answers_redis_up", "1 while Redis is being asked for kept answers, 0 while the breaker is open.")

_NOW = "local t = redis.call('TIME'); local now = tonumber(t[1]) + tonumber(t[2]) / 1000000\n"

_BUDGET = "local function forget() end\n" + FUNCTIONS

_CLAIM = (
    _BUDGET
    + _NOW
    + """
local ends_of = KEYS[2] .. ':ends'
drop_expired(KEYS[2], now)
local ends = redis.call('ZSCORE', ends_of, KEYS[1])
if ends and tonumber(ends) > now then
  local f = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer', 'claim')
  if f[1] ~= ARGV[1] then return {'differs', ''} end
  if f[2] then return {'answered', f[2]} end
  local lease = redis.call('ZSCORE', KEYS[3], f[3])
  if lease and tonumber(lease) > now then return {'running', ''} end
end
drop(KEYS[2], KEYS[1])
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'claim', ARGV[2])
redis.call('ZADD', ends_of, now + ARGV[3], KEYS[1])
redis.call('ZADD', KEYS[3], now + ARGV[4], ARGV[2])
return {'ours', ''}
"""
)
"""KEYS: entry, store, leases. ARGV: fingerprint, claim, keep_s, lease_s."""

_SETTLE = (
    _BUDGET
    + _NOW
    + f"""
redis.call('ZREM', KEYS[3], ARGV[2])
local f = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer')
if f[1] and f[1] ~= ARGV[1] then return {{'', 0}} end
if f[2] then return {{f[2], 0}} end
local bytes = #ARGV[3] + {ENTRY_BYTES}
local _, dropped = make_room(KEYS[2], bytes, tonumber(ARGV[6]), now)
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'claim', ARGV[2], 'answer', ARGV[3])
keep(KEYS[2], KEYS[1], ARGV[5], bytes, now)
redis.call('ZADD', KEYS[2] .. ':ends', now + ARGV[4], KEYS[1])
return {{ARGV[3], dropped}}
"""
)
"""KEYS: entry, store, leases. ARGV: fingerprint, claim, answer, keep_s, tenant, budget of the store.

Returns the answer that counts, and how many others were dropped for it.

The first answer stays, whoever gives it: one whose lease ran out may still be before the one that took over.
"""

_FREE = """
redis.call('ZREM', KEYS[3], ARGV[1])
local f = redis.call('HMGET', KEYS[1], 'claim', 'answer')
if f[1] ~= ARGV[1] or f[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2] .. ':ends', KEYS[1])
return 1
"""
"""KEYS: entry, store, leases. ARGV: claim."""

_RENEW = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
return 1
"""
)
"""KEYS: leases. ARGV: lease_s, claims."""


class Claim(NamedTuple):
    """What a request learns of its key.

    `ours`: it is to compute the answer. `running`: somebody does. `answered`: `answer` is it. `differs`: the key stands
    for another request.
    """

    state: Literal["ours", "running", "answered", "differs"]
    answer: bytes


class AnswerStore:
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
        self._link = RedisLink("answers", redis_url, timeout_s=timeout_s, retry_s=retry_s, up=UP, errors=ERRORS)
        self._scripts = self._link.scripts("the store of answers, which an Idempotency-Key needs,")
        self._prefix = prefix
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self.lease_s = lease_s

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.__aexit__(kind, error, trace)

    async def claim(self, name: str, fingerprint: str, claim: str) -> Claim:
        """Asks for the right to answer; `claim` is a name that is never used again.

        Raises:
            Unavailable: Redis did not answer; where it had taken the claim, that lapses with its lease.
        """
        found = await self._scripts.run(_CLAIM, self._keys(name), fingerprint, claim, self._keep_s, self.lease_s)
        state, answer = found
        return Claim(state.decode(), answer)

    async def settle(self, name: str, tenant: str, fingerprint: str, claim: str, answer: bytes) -> bytes:
        """Keeps `answer`; returns the one that counts, another's where that was first.

        Where the budget is used up, the oldest answers go, of the tenant whose answers take most.

        Raises:
            Unavailable: Redis did not answer.
        """
        args = (fingerprint, claim, answer, self._keep_s, tenant, self._max_bytes)
        kept, dropped = await self._scripts.run(_SETTLE, self._keys(name), *args)
        DROPPED.inc(dropped)
        return cast(bytes, kept)

    async def free(self, name: str, claim: str) -> None:
        """Lets a claim go without an answer: who asks next computes.

        Raises:
            Unavailable: Redis did not answer; the claim lapses with its lease.
        """
        await self._scripts.run(_FREE, self._keys(name), claim)

    async def renew(self, claims: Iterable[str]) -> None:
        """Renews the leases of `claims`.

        Raises:
            Unavailable: Redis did not answer.
        """
        await self._scripts.run(_RENEW, (f"{self._prefix}answers:leases",), self.lease_s, *claims)

    def _keys(self, name: str) -> tuple[str, ...]:
        index = f"{self._prefix}answers"
        return f"{index}:of:{name}", index, f"{index}:leases"
