"""The result cache of API and workers: the memory of this process first, then Redis.

It is asked per item before a job is published, and again before the item is computed. The worker
that computed a result fills it. A result in the object store is kept as its object_key. So an entry
is small, and objects must outlive the longest TTL. Nothing here fails or delays a request: if Redis
is gone or slow, a counter counts misses. The Redis level reads and writes many raw values at once.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec
from prometheus_client import Counter, Gauge
from redis.exceptions import ResponseError

from shared.catalog import Model
from shared.errors import BadInput
from shared.stores.redis_client import RedisLink, RedisStore
from shared.tasks import Input, Result

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
        (values,) = await self._link.exchange([("MGET", *keys)])
        return cast("list[bytes | None]", _checked(values))

    async def _send_writes(self, writes: list[_Write]) -> list[bool]:
        commands = [("SET", one.key, one.value, "EX", one.ttl_s) for one in writes]
        return [bool(_checked(answer)) for answer in await self._link.exchange(commands)]


def _checked(answer: object) -> object:
    """Returns an answer of Redis. Raises it if it is a refusal."""
    if isinstance(answer, ResponseError):
        raise answer
    return answer


KEY_SCHEME = 2
"""Part of every key. Raised when a model's code changes the results of the same inputs."""
ENTRY_SCHEMA = 1
"""Part of every Redis key.

Raised when the encoding changes, so that two releases never read each other's entries.
"""
VALUE_LIMIT_BYTES = 1024 * 1024
"""A larger entry stays out of both levels: it belongs in the object store."""
MEMORY_OVERHEAD_BYTES = 512
"""The bytes that Python's objects add to an entry in memory (measured: about 450 for one
vector)."""

Level = Literal["memory", "redis"]

HITS = Counter("penstock_cache_hits_total", "Items answered from the cache, by level.", ["level"])
_IN_MEMORY, _IN_REDIS = HITS.labels("memory"), HITS.labels("redis")
MISSES = Counter("penstock_cache_misses_total", "Items that neither level had.")
UNREADABLE = Counter(
    "penstock_cache_unreadable_total", "Entries in Redis that could not be decoded; each is a miss."
)


def cache_key(model: Model, input: Input, tenant: str, purges: int = 0) -> str:
    """Returns the key of the result of `input` on `model`: 256 bits of BLAKE2b (RFC 7693) in hex.

    The key covers everything that changes the output: name, revision, source, precision, tolerance,
    width and shortcuts of the model, and all fields of the input. A source image counts by the
    digest of its bytes, or by its object_key if only that is known. So compute the key before the
    bytes move to the object store.

    The backend is not part of the key. It changes a result by less than the tolerance, and with
    `auto` the API does not know the backend of each worker. A key promises a result of this
    precision within this tolerance.

    Args:
        model: the entry of the catalog that serves the item.
        input: the item's input.
        tenant: the caller's tenant. Part of the key only if the model's cache scope is `tenant`.
        purges: how often what the cache had of this revision was purged
            (shared/stores/withdrawals.py). Part of the key only if it was.

    Raises:
        BadInput: a text has lone surrogates, which no encoding can represent.
    """
    owner = tenant if model.cache.scope == "tenant" else ""
    which = (
        model.name,
        model.revision,
        model.source,
        model.precision,
        model.result_tolerance,
        model.dimensions,
        *model.image.shortcuts,
    )
    parts = (KEY_SCHEME, owner, which, input.cache_form())
    try:
        canonical = msgspec.msgpack.encode((*parts, purges) if purges else parts)
    except UnicodeEncodeError as error:
        raise BadInput("the text is not valid Unicode (a lone surrogate)", field="input") from error
    return hashlib.blake2b(canonical, digest_size=32).hexdigest()


class CacheEntry(msgspec.Struct, array_like=True):
    """The value of a key in Redis, as MessagePack.

    With the time, memory expires together with Redis.
    """

    expires_at_s: float
    result: Result


class ResultCache(RedisStore):
    """Two levels of results by cache_key: an async context manager that opens without Redis too.

    Args:
        redis_url: `redis://`, `rediss://` or `unix://` URL.
        memory_bytes: bound of the memory level. 0 turns it off.
        prefix: starts every Redis key, for several deployments on one Redis.
        timeout_s: limit of one round trip to Redis.
        retry_s: bound of the first pause of the background retry.
        clock: unix time, for tests.
    """

    def __init__(
        self,
        redis_url: str,
        memory_bytes: int,
        *,
        prefix: str = "penstock:",
        timeout_s: float = 0.05,
        retry_s: float = 0.25,
        clock: Callable[[], float] = time.time,
    ) -> None:
        link = RedisLink(
            "cache", redis_url, timeout_s=timeout_s, retry_s=retry_s, up=UP, errors=ERRORS
        )
        super().__init__(link)
        self._redis = RedisLevel(link)
        self._memory = _Memory(memory_bytes)
        self._prefix = f"{prefix}result:{ENTRY_SCHEMA}:"
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(CacheEntry)

    async def get_many(self, keys: Iterable[str]) -> dict[str, tuple[Result, Level]]:
        """Returns the cached results, each with its level. Never raises.

        Waits at most a few round-trip limits for Redis, and not at all while the breaker is open.
        Other callers share the results, so they must not be changed.
        """
        now_s, keys = self._clock(), list(dict.fromkeys(keys))
        hits = self.in_memory(keys)
        if missing := [key for key in keys if key not in hits]:
            from_redis = self._read(
                missing, await self._redis.get([self._prefix + key for key in missing]), now_s
            )
            _IN_REDIS.inc(len(from_redis))
            MISSES.inc(len(missing) - len(from_redis))
            hits |= {key: (result, "redis") for key, result in from_redis.items()}
        return hits

    def in_memory(self, keys: Iterable[str]) -> dict[str, tuple[Result, Level]]:
        """Like get_many, from this process's memory only."""
        now_s, hits = self._clock(), dict[str, tuple[Result, Level]]()
        for key in keys:
            result = self._memory.get(key, now_s)
            if result is not None:
                hits[key] = (result, "memory")
        _IN_MEMORY.inc(len(hits))
        return hits

    def _read(self, keys: list[str], values: list[bytes | None], now_s: float) -> dict[str, Result]:
        """Decodes what Redis had and keeps it in memory for as long as Redis would."""
        results: dict[str, Result] = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            try:
                entry = self._decoder.decode(value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                UNREADABLE.inc()
                continue
            if entry.expires_at_s > now_s:
                self._memory.put(key, entry, len(value))
                results[key] = entry.result
        return results

    async def put_many(self, results: Mapping[str, Result], ttl_s: int) -> None:
        """Keeps `results` for `ttl_s` seconds (0: not at all) in both levels.

        Never raises, and waits as get_many does.
        """
        if values := self.keep_in_memory(results, ttl_s):
            await self._redis.put(
                {self._prefix + key: value for key, value in values.items()}, ttl_s
            )

    def keep_in_memory(self, results: Mapping[str, Result], ttl_s: int) -> dict[str, bytes]:
        """Does the same in this process's memory only.

        Returns the entries it kept, encoded for Redis.
        """
        if ttl_s <= 0:
            return {}
        expires_at_s, values = self._clock() + ttl_s, dict[str, bytes]()
        for key, result in results.items():
            entry = CacheEntry(expires_at_s, result)
            value = msgspec.msgpack.encode(entry)
            if len(value) <= VALUE_LIMIT_BYTES:
                self._memory.put(key, entry, len(value))
                values[key] = value
        return values


class _Memory:
    """The least recently used entries, at most `limit_bytes` of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, tuple[CacheEntry, int]] = OrderedDict()

    def get(self, key: str, now_s: float) -> Result | None:
        entry, _ = self._entries.get(key, (None, 0))
        if entry is None:
            return None
        if entry.expires_at_s <= now_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.result

    def put(self, key: str, entry: CacheEntry, value_bytes: int) -> None:
        self._drop(key)
        size_bytes = value_bytes + MEMORY_OVERHEAD_BYTES
        if size_bytes > self._limit_bytes:
            return
        self._entries[key] = (entry, size_bytes)
        self._used_bytes += size_bytes
        while self._used_bytes > self._limit_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._used_bytes -= freed_bytes

    def _drop(self, key: str) -> None:
        _, freed_bytes = self._entries.pop(key, (None, 0))
        self._used_bytes -= freed_bytes
