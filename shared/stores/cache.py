"""The result cache used by the API and workers: first this process's memory, then Redis.

The cache is queried for each item before a job is published, and again before the item is
processed. The worker that computed a result stores it. A result in the object store is cached as
its object_key, which keeps entries small, but objects must outlive the longest TTL. Nothing here
fails or delays a request, because lookups count as misses if Redis is unreachable or slow. The
Redis level reads and writes many raw values at once.

A result is unpaid if nobody was charged for it, because the response was never delivered. An unpaid
result is marked in Redis, under a separate key alongside the entry. The first hit takes the mark
and is charged like a miss. A mark doesn't apply to a result computed after the one it was created
for. Releases that don't support marks charge for such a hit like any other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
from prometheus_client import Counter, Gauge

from shared.errors import MALFORMED, BadInput
from shared.messages import Receipt
from shared.models.catalog import AdaptedModel, Model
from shared.models.tasks import Input, Result
from shared.money.charge import SHARED
from shared.stores.redis_client import KEY_PREFIX, Call, RedisLink, RedisStore, RoundTrip, unwrap

WRITE_ENTRIES = 128
"""Maximum number of entries to write in one round trip."""

ERRORS = Counter(
    "penstock_cache_errors_total", "Failed round trips to Redis, by operation.", ["operation"]
)
UP = Gauge("penstock_cache_redis_up", "1 while Redis is being asked, 0 while the breaker is open.")


CLOSE_LIMIT_S = 1.0
"""How long closing the cache waits for marks that are still being written."""

KEY_SCHEME = 2
"""Part of every key. Incremented when a code change alters a model's results."""
ENTRY_SCHEMA = 1
"""Part of every Redis key.

Incremented when the encoding changes, so that two releases never read each other's entries.
"""
VALUE_LIMIT_BYTES = 1024 * 1024
"""Larger entries are kept out of both levels because they belong in the object store."""
MEMORY_OVERHEAD_BYTES = 512
"""Per-entry overhead of Python objects in memory, in bytes (about 450 as measured for one vector).
"""

NO_TIMES: Mapping[str, float | None] = MappingProxyType({})
"""For results without a known completion time."""

Level = Literal["memory", "redis"]

HITS = Counter("penstock_cache_hits_total", "Items answered from the cache, by level.", ["level"])
_IN_MEMORY, _IN_REDIS = HITS.labels("memory"), HITS.labels("redis")
MISSES = Counter("penstock_cache_misses_total", "Items found in neither level.")
UNREADABLE = Counter(
    "penstock_cache_unreadable_total",
    "Entries in Redis that could not be decoded, each counted as a miss, and undecodable "
    "marks of unpaid results.",
)

COMPUTED = "miss"
"""`Receipt.cache` of a result charged in full."""


class RedisLevel:
    """Gets and puts many values at once. Never raises and never waits long."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._reads = link.batcher("get", _plan_reads)
        self._writes = link.batcher("put", _plan_writes)
        self._takes = link.batcher("take", _plan_takes)

    async def get(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """Returns the values of `keys` in order, with None for missing ones.

        Returns None if Redis did not respond.
        """
        return await self._reads.call(keys) if self._link.is_up else None

    async def take(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """Returns and deletes values. With concurrent callers, only one gets each value.

        Returns None if Redis did not respond.
        """
        return await self._takes.call(keys) if self._link.is_up else None

    async def put(self, values: Mapping[str, bytes], ttl_s: int) -> None:
        """Sets `values` to expire after `ttl_s`.

        If Redis is down, the values are lost and counted as errors.
        """
        writes = [Call(("SET", key, value, "EX", ttl_s)) for key, value in values.items()]
        # Packing a SET takes about 20 us. Packing is done in chunks, so that other tasks don't wait
        # long for the event loop.
        for start in range(0, len(writes), WRITE_ENTRIES):
            if self._link.is_up:
                await self._writes.call(writes[start : start + WRITE_ENTRIES])


def _plan_reads(keys: list[str]) -> RoundTrip[bytes | None]:
    return RoundTrip([Call(("MGET", *keys))], lambda replies: unwrap(replies[0]))


def _plan_takes(keys: list[str]) -> RoundTrip[bytes | None]:
    return RoundTrip([Call(("GETDEL", key)) for key in keys], _unwrap_all)


def _plan_writes(writes: list[Call]) -> RoundTrip[object]:
    return RoundTrip(writes, _unwrap_all)


def _unwrap_all(replies: list[Any]) -> list[Any]:
    return [unwrap(reply) for reply in replies]


def cache_key(model: Model, input: Input, tenant: str, purges: int = 0) -> str:
    """Returns the key for the result of `input` on `model`. See `cache_keys`."""
    (key,) = cache_keys(model, [input], tenant, purges)
    return key


def cache_keys(model: Model, inputs: Iterable[Input], tenant: str, purges: int = 0) -> list[str]:
    """Returns the keys for the results of `inputs` on `model`: 256-bit BLAKE2b (RFC 7693) in hex.

    A key covers everything that affects the output: the model's name, revision, source, adapter,
    precision, tolerance, width, and shortcuts, and all fields of the input. A source image is
    identified by the digest of its data, or by its object_key if the digest is unknown. Therefore,
    compute the key before moving the data to the object store.

    The backend is not part of the key. The backend changes a result by less than the tolerance, and
    with `auto`, the API doesn't know each worker's backend. A key identifies a result at this
    precision and within this tolerance.

    Args:
        tenant: caller's tenant. Part of the key only if the model's cache scope is `tenant`.
        purges: how many times this revision's cached results have been purged
            (shared/stores/withdrawals.py). Part of the key only if above 0.

    Raises:
        BadInput: text contains lone surrogates, which can't be encoded.
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
        *([model.adapter.version] if isinstance(model, AdaptedModel) else ()),
    )
    # The array (KEY_SCHEME, owner, which, form), or with `purges` at its end. In MessagePack, a
    # short array is one byte with its length, and then its elements.
    encode = msgspec.msgpack.encode
    array = b"\x95" if purges else b"\x94"
    before = array + encode(KEY_SCHEME) + encode(owner) + encode(which)
    after = encode(purges) if purges else b""
    try:
        return [
            blake2b(before + encode(input.cache_form()) + after, digest_size=32).hexdigest()
            for input in inputs
        ]
    except UnicodeEncodeError as error:
        raise BadInput(
            "the text must be valid Unicode without lone surrogates", field="input"
        ) from error


class CacheEntry(msgspec.Struct, array_like=True):
    """The value stored under a key in Redis, as MessagePack.

    The expiry time makes in-memory entries expire together with those in Redis.
    """

    expires_at_s: float
    result: Result
    finished_at_s: float | None = None
    """Unix time at which the result's batch finished. None if unknown, as in entries from release
    0.1.0.
    """


class Owed(msgspec.Struct, array_like=True, frozen=True):
    """An unpaid result's mark, including compute time, which may affect the price."""

    inference_ms: float | None = None
    """Milliseconds spent computing the result's batch."""
    batch_size: int | None = None
    """Items in that batch."""
    finished_at_s: float | None = None
    """Unix time at which that batch finished. None if not known."""

    def is_of(self, entry: CacheEntry) -> bool:
        """Returns whether the mark belongs to this entry rather than one that it replaced."""
        own_s, entry_s = self.finished_at_s, entry.finished_at_s
        return own_s is None or entry_s is None or own_s >= entry_s

    def is_older(self, other: Owed | None) -> bool:
        """Returns whether another mark for the same key belongs to a later result."""
        return other is not None and (self.finished_at_s or 0.0) < (other.finished_at_s or 0.0)


class Hit(NamedTuple):
    """A cached result. `owed` is set if this hit must pay for the result."""

    result: Result
    level: Level
    owed: Owed | None = None

    @property
    def repeated(self) -> Hit:
        """Returns the same result for another item, which is not charged for it again."""
        return Hit(self.result, self.level)

    def receipt(self, **fields: Any) -> Receipt:
        """Returns the hit's receipt, which is the same as for a miss if this hit is charged.

        Args:
            **fields: other fields of the receipt.
        """
        if self.owed is None:
            receipt = Receipt(cache=self.level, **fields)
        else:
            receipt = Receipt(
                cache=COMPUTED,
                inference_ms=self.owed.inference_ms,
                batch_size=self.owed.batch_size,
                finished_at_s=self.owed.finished_at_s,
                **fields,
            )
        receipt.count(self.result)
        return receipt


def compute_owed(receipt: Receipt) -> Owed | None:
    """Returns the amount left unpaid if the result with this receipt is not delivered.

    None if another item pays for the result, so it was not going to be charged in full.
    """
    if receipt.cache in SHARED:
        return None
    return Owed(receipt.inference_ms, receipt.batch_size, receipt.finished_at_s)


class ResultCache(RedisStore):
    """Two levels of results by cache_key: an async context manager that opens even without Redis.

    Args:
        memory_bytes: limit for the memory level, or 0 to turn it off.
        prefix: prefix for every Redis key, so that several deployments can share one Redis.
        timeout_s: time limit for one round trip to Redis.
        retry_s: upper bound of the first pause before a background retry.
    """

    def __init__(
        self,
        redis_url: str,
        memory_bytes: int,
        *,
        prefix: str = KEY_PREFIX,
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
        self._unpaid_prefix = f"{prefix}unpaid:{ENTRY_SCHEMA}:"
        self._mark_tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks that write marks, or determine which ones to write, keyed by cache key."""
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(CacheEntry)
        self._owed_decoder = msgspec.msgpack.Decoder(Owed)

    async def __aexit__(self, *exc: object) -> None:
        try:
            if marking := set(self._mark_tasks.values()):
                await asyncio.wait(marking, timeout=CLOSE_LIMIT_S)
        finally:
            await super().__aexit__(*exc)

    async def get_many(self, keys: Iterable[str]) -> dict[str, Hit]:
        """Returns the cached results. Never raises.

        Takes the marks of unpaid results; the caller must then charge for those hits or mark them
        again. Waits for Redis for at most a few round-trip time limits, and doesn't wait at all
        while the breaker is open. Other callers share the results, so they must not be modified.
        """
        keys = list(dict.fromkeys(keys))
        while self._mark_tasks and (
            marking := {self._mark_tasks[key] for key in keys if key in self._mark_tasks}
        ):
            await asyncio.wait(marking)
        hits = self._in_memory(keys)
        if missing := [key for key in keys if key not in hits]:
            from_redis = await self._from_redis(missing)
            hits |= from_redis
            MISSES.inc(len(missing) - len(from_redis))
        return hits

    def list_in_memory(self, keys: Iterable[str]) -> list[str]:
        """Returns the keys whose results are in this process's memory."""
        now_s = self._clock()
        return [key for key in keys if self._memory.get(key, now_s) is not None]

    def _in_memory(self, keys: Iterable[str]) -> dict[str, Hit]:
        """Returns results in memory that are known to be paid for."""
        now_s, hits = self._clock(), dict[str, Hit]()
        for key in keys:
            cached = self._memory.get(key, now_s)
            if cached is not None and cached.state == "paid":
                hits[key] = Hit(cached.entry.result, "memory")
        if hits:
            _IN_MEMORY.inc(len(hits))
        return hits

    async def _from_redis(self, keys: list[str]) -> dict[str, Hit]:
        """Returns results from Redis, and keeps them in memory for as long as Redis would.

        A result in memory may not be in Redis yet, but its mark is. Without Redis, only results
        marked by this process count as unpaid.
        """
        names = [prefix + key for prefix in (self._prefix, self._unpaid_prefix) for key in keys]
        values = await self._redis.get(names)
        now_s = self._clock()
        if values is None:
            list_in_memory = ((key, self._memory.get(key, now_s)) for key in keys)
            hits = {
                key: Hit(cached.entry.result, "memory")
                for key, cached in list_in_memory
                if cached is not None and cached.state == "unknown"
            }
            _IN_MEMORY.inc(len(hits))
            return hits
        entries, marked = dict[str, _Kept](), dict[str, _Kept]()
        for key, value, mark in zip(keys, values, values[len(keys) :], strict=False):
            cached = self._decode_kept(value, now_s) or self._memory.get(key, now_s)
            if cached is not None:
                entries[key] = cached
                if (owed_for := self._decode_mark(mark)) and owed_for.is_of(cached.entry):
                    marked[key] = cached
        if not entries:
            return {}
        owed = await self._take_marks(marked) if marked else {}
        if owed is None:  # it is unknown whether they have been paid for, so they are recomputed
            entries, owed = {key: item for key, item in entries.items() if key not in marked}, {}
        for key, cached in entries.items():
            self._memory.put(key, cached._replace(state="paid"))
        _IN_REDIS.inc(len(entries))
        return {
            key: Hit(cached.entry.result, "redis", owed.get(key)) for key, cached in entries.items()
        }

    def _decode_kept(self, value: bytes | None, now_s: float) -> _Kept | None:
        if value is None:
            return None
        try:
            entry = self._decoder.decode(value)
        except MALFORMED:
            UNREADABLE.inc()
            return None
        return _Kept(entry, len(value)) if entry.expires_at_s > now_s else None

    def _decode_mark(self, value: bytes | None) -> Owed | None:
        if value is None:
            return None
        try:
            return self._owed_decoder.decode(value)
        except MALFORMED:
            UNREADABLE.inc()
            return None

    async def _take_marks(self, marked: Mapping[str, _Kept]) -> dict[str, Owed] | None:
        """Takes marks. Marks that another caller took first are omitted.

        If the caller is canceled while waiting, any marks taken are restored.

        Args:
            marked: entries that are marked, keyed by cache key.

        Returns:
            None if Redis did not respond.
        """
        taking = asyncio.create_task(self._take(list(marked)))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            left_s = max(cached.entry.expires_at_s for cached in marked.values()) - self._clock()
            giving_back = asyncio.create_task(self._give_back(taking, max(1, math.ceil(left_s))))
            self.await_marks(marked, giving_back)
            raise

    async def _take(self, keys: Sequence[str]) -> dict[str, Owed] | None:
        values = await self._redis.take([self._unpaid_prefix + key for key in keys])
        if values is None:
            return None
        marks = zip(keys, map(self._decode_mark, values), strict=True)
        return {key: mark for key, mark in marks if mark is not None}

    async def _give_back(self, taking: asyncio.Task[dict[str, Owed] | None], ttl_s: int) -> None:
        """Restores marks taken for a caller that was canceled."""
        self.mark_unpaid(await taking or {}, ttl_s)

    def mark_unpaid(self, owed: Mapping[str, Owed], ttl_s: int) -> None:
        """Marks results as unpaid, so that the first hit on each one is charged. Never raises.

        The marks are written to Redis in the background. Hits in this process wait until the marks
        are written.

        Args:
            ttl_s: how long the results are kept, in seconds.
        """
        if not owed or ttl_s <= 0:
            return
        for key, mark in owed.items():
            self._memory.mark_unpaid(key, mark)
        self.await_marks(owed, asyncio.create_task(self._write_marks(owed, ttl_s)))

    def await_marks(self, keys: Collection[str], marking: asyncio.Task[None]) -> None:
        """Makes hits in this process wait for a task that finds and marks unpaid results."""
        self._mark_tasks |= dict.fromkeys(keys, marking)
        marking.add_done_callback(lambda _: self._forget_marking(keys, marking))

    async def _write_marks(self, owed: Mapping[str, Owed], ttl_s: int) -> None:
        """Writes marks, unless Redis already has a mark for a later result."""
        names = [self._unpaid_prefix + key for key in owed]
        existing = await self._redis.get(names) or [None] * len(names)
        marks = {
            name: msgspec.msgpack.encode(mark)
            for name, mark, old in zip(names, owed.values(), existing, strict=True)
            if not mark.is_older(self._decode_mark(old))
        }
        await self._redis.put(marks, ttl_s)

    def _forget_marking(self, keys: Collection[str], marking: asyncio.Task[None]) -> None:
        for key in keys:
            if self._mark_tasks.get(key) is marking:
                del self._mark_tasks[key]

    async def put_many(
        self,
        results: Mapping[str, Result],
        ttl_s: int,
        finished_at_s: Mapping[str, float | None] = NO_TIMES,
    ) -> None:
        """Stores results in both levels. Never raises, and waits like get_many.

        Args:
            ttl_s: how many seconds to keep the results, or 0 to not store them.
            finished_at_s: Unix times at which they were finished, keyed by cache key, to
                distinguish their marks from those for earlier results. Missing: not known.
        """
        if values := self._keep(results, ttl_s, finished_at_s, is_known=False):
            await self._redis.put(
                {self._prefix + key: value for key, value in values.items()}, ttl_s
            )

    def keep_in_memory(
        self,
        results: Mapping[str, Result],
        ttl_s: int,
        finished_at_s: Mapping[str, float | None] = NO_TIMES,
    ) -> None:
        """Like `put_many`, but only in this process's memory. Unpaid results are marked later."""
        self._keep(results, ttl_s, finished_at_s, is_known=True)

    def _keep(
        self,
        results: Mapping[str, Result],
        ttl_s: int,
        finished_at_s: Mapping[str, float | None],
        *,
        is_known: bool,
    ) -> dict[str, bytes]:
        """Returns the stored entries, encoded for Redis."""
        if ttl_s <= 0:
            return {}
        expires_at_s, values = self._clock() + ttl_s, dict[str, bytes]()
        for key, result in results.items():
            entry = CacheEntry(expires_at_s, result, finished_at_s.get(key))
            value = msgspec.msgpack.encode(entry)
            if len(value) <= VALUE_LIMIT_BYTES:
                self._memory.put(key, _Kept(entry, len(value), "paid" if is_known else "unknown"))
                values[key] = value
        return values


class _Kept(NamedTuple):
    entry: CacheEntry
    value_bytes: int
    state: Literal["paid", "unknown", "unpaid"] = "paid"
    """A worker does not know whether its results were delivered.

    Redis stores that information as marks.
    """


class _Memory:
    """The least recently used entries, up to `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, _Kept] = OrderedDict()

    def get(self, key: str, now_s: float) -> _Kept | None:
        cached = self._entries.get(key)
        if cached is None:
            return None
        if cached.entry.expires_at_s <= now_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return cached

    def put(self, key: str, entry: _Kept) -> None:
        if key in self._entries:
            self._drop(key)
        size_bytes = entry.value_bytes + MEMORY_OVERHEAD_BYTES
        if size_bytes > self._limit_bytes:
            return
        self._entries[key] = entry
        self._used_bytes += size_bytes
        while self._used_bytes > self._limit_bytes:
            self._drop(next(iter(self._entries)))

    def mark_unpaid(self, key: str, mark: Owed) -> None:
        cached = self._entries.get(key)
        if cached is not None and mark.is_of(cached.entry):
            self._entries[key] = cached._replace(state="unpaid")

    def _drop(self, key: str) -> None:
        cached = self._entries.pop(key, None)
        if cached is not None:
            self._used_bytes -= cached.value_bytes + MEMORY_OVERHEAD_BYTES
