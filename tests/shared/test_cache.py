"""Both levels of the cache over a working Redis; test_cache_outage.py covers a Redis that fails."""

import time

import anyio
import msgspec
import pytest
import redis.asyncio

from shared.models.blob import Blob
from shared.models.tasks.embedding import EmbeddingResult
from shared.models.tasks.image import ImageResult
from shared.stores.cache import VALUE_LIMIT_BYTES, Hit, Owed, ResultCache
from shared.stores.redis_client import NO_REDIS
from tests.clock import Clock
from tests.limits import WAIT_LIMIT_S
from tests.metrics import metric

pytestmark = pytest.mark.anyio

PNG = Blob("image/png", data=b"pixels")
BIG_MEMORY = 1 << 20


def vector(fill: bytes = b"v", tokens: int = 3) -> EmbeddingResult:
    return EmbeddingResult(fill * 16, tokens)


async def written(redis_url: str, kind: str) -> str:
    """Waits until there is a key of this kind and returns it."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        with anyio.fail_after(WAIT_LIMIT_S):
            while not (names := await client.keys(f"penstock:{kind}:*")):
                pass
    return names[0] if isinstance(names[0], str) else names[0].decode()


async def test_get_many_names_the_level(redis_url: str) -> None:
    async with (
        ResultCache(redis_url, BIG_MEMORY) as writer,
        ResultCache(redis_url, BIG_MEMORY) as reader,
    ):
        await writer.put_many({"a": vector(b"a"), "b": vector(b"b")}, ttl_s=60)
        # A worker checks in Redis whether its results have been paid for.
        assert await writer.get_many(["a"]) == {"a": Hit(vector(b"a"), "redis")}
        assert await writer.get_many(["a"]) == {"a": Hit(vector(b"a"), "memory")}
        assert await reader.get_many(["a", "b", "c", "a"]) == {
            "a": Hit(vector(b"a"), "redis"),
            "b": Hit(vector(b"b"), "redis"),
        }
        assert (await reader.get_many(["b"]))["b"][1] == "memory"


async def test_image_results_survive_redis(redis_url: str) -> None:
    inline = ImageResult(PNG, 64, 64, seed=3, pixel_steps=9)
    stored = ImageResult(
        Blob("image/png", object_key="results/ab/1.png"), 64, 64, seed=4, pixel_steps=9
    )
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many({"inline": inline, "stored": stored}, ttl_s=60)
        assert await cache.get_many(["inline", "stored"]) == {
            "inline": Hit(inline, "redis"),
            "stored": Hit(stored, "redis"),
        }


async def test_more_results_than_one_round_trip(redis_url: str) -> None:
    results = {f"k{n}": vector(tokens=n) for n in range(1000)}
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many(results, ttl_s=60)
        found = await cache.get_many(results)
    assert {key: hit.result for key, hit in found.items()} == results


async def test_callers_at_once_get_their_own(redis_url: str) -> None:
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many({f"k{n}": vector(tokens=n) for n in range(0, 200, 2)}, ttl_s=60)
        found: dict[int, dict[str, Hit]] = {}

        async def ask(n: int) -> None:
            found[n] = await cache.get_many([f"k{n}", f"k{n + 1}"])

        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(ask, n)
    for n in range(200):
        even = n if n % 2 == 0 else n + 1
        expected = {f"k{even}": Hit(vector(tokens=even), "redis")} if even < 200 else {}
        assert found[n] == expected


async def test_entries_expire_in_both_levels(redis_url: str) -> None:
    clock = Clock(time.time())
    async with (
        ResultCache(redis_url, BIG_MEMORY, clock=clock) as cache,
        ResultCache(redis_url, BIG_MEMORY) as other,
    ):
        await cache.put_many({"a": vector()}, ttl_s=60)
        await other.get_many(["a"])
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            [name] = await client.keys("*")
            assert 55 <= await client.ttl(name) <= 60
        clock.now_s += 61
        assert await cache.get_many(["a"]) == {}


async def test_what_came_from_redis_expires_with_it(redis_url: str) -> None:
    clock = Clock(time.time())
    async with (
        ResultCache(redis_url, BIG_MEMORY) as writer,
        ResultCache(redis_url, BIG_MEMORY, clock=clock) as reader,
    ):
        await writer.put_many({"a": vector()}, ttl_s=60)
        clock.now_s += 50
        assert (await reader.get_many(["a"]))["a"][1] == "redis"
        assert (await reader.get_many(["a"]))["a"][1] == "memory"
        clock.now_s += 11
        assert await reader.get_many(["a"]) == {}


async def test_ttl_of_zero_keeps_nothing(redis_url: str) -> None:
    async with ResultCache(redis_url, BIG_MEMORY) as cache:
        await cache.put_many({"a": vector()}, ttl_s=0)
        assert await cache.get_many(["a"]) == {}


async def test_prefixes_keep_deployments_apart(redis_url: str) -> None:
    async with (
        ResultCache(redis_url, 0, prefix="one:") as one,
        ResultCache(redis_url, 0, prefix="two:") as two,
    ):
        await one.put_many({"a": vector()}, ttl_s=60)
        assert await two.get_many(["a"]) == {}
        assert "a" in await one.get_many(["a"])


async def test_memory_forgets_least_recently_used(redis_url: str) -> None:
    async with ResultCache(redis_url, 2500) as cache:
        for name in "abcde":
            await cache.put_many({name: vector()}, ttl_s=60)
            await cache.get_many([name])
            await cache.get_many(["a"])
        levels = {key: hit.level for key, hit in (await cache.get_many("abcde")).items()}
    assert levels == {"a": "memory", "b": "redis", "c": "memory", "d": "memory", "e": "memory"}


@pytest.mark.parametrize("reads_at_once", [True, False])
async def test_first_hit_of_an_unpaid_result_pays(redis_url: str, reads_at_once: bool) -> None:
    owed = Owed(inference_ms=3.5, batch_size=2)
    async with (
        ResultCache(redis_url, BIG_MEMORY) as worker,
        ResultCache(redis_url, BIG_MEMORY) as one,
        ResultCache(redis_url, BIG_MEMORY) as other,
    ):
        await worker.put_many({"a": vector()}, ttl_s=60)
        one.keep_in_memory({"a": vector()}, ttl_s=60)
        one.mark_unpaid({"a": owed}, ttl_s=60)
        if not reads_at_once:
            await written(redis_url, "unpaid")
        hits = [(await one.get_many(["a"]))["a"]]
        hits += [(await cache.get_many(["a"]))["a"] for cache in (worker, other, one)]
    assert [hit.owed for hit in hits] == [owed, None, None, None]
    receipt = hits[0].receipt()
    assert (receipt.cache, receipt.inference_ms, receipt.batch_size) == ("miss", 3.5, 2)
    assert hits[1].receipt().cache == "redis"


async def test_unpaid_result_is_paid_before_the_worker_has_stored_it(redis_url: str) -> None:
    async with ResultCache(redis_url, BIG_MEMORY) as cache:
        cache.keep_in_memory({"a": vector()}, ttl_s=60)
        cache.mark_unpaid({"a": Owed()}, ttl_s=60)
        assert [hit.owed for hit in (await cache.get_many(["a"])).values()] == [Owed()]
        assert await cache.get_many(["a"]) == {"a": Hit(vector(), "memory")}


async def test_mark_says_nothing_about_a_later_result(redis_url: str) -> None:
    """The later result's request either paid for it or left its own mark."""
    mark, key = Owed(finished_at_s=10.0), "a"
    async with (
        ResultCache(redis_url, BIG_MEMORY) as api,
        ResultCache(redis_url, BIG_MEMORY) as worker,
        ResultCache(redis_url, 0) as other,
    ):
        api.keep_in_memory({key: vector(b"2")}, 60, {key: 20.0})
        api.mark_unpaid({key: mark}, ttl_s=60)
        await written(redis_url, "unpaid")
        assert await api.get_many([key]) == {key: Hit(vector(b"2"), "memory")}
        await worker.put_many({key: vector(b"2")}, 60, {key: 20.0})
        for cache in (worker, other):
            assert await cache.get_many([key]) == {key: Hit(vector(b"2"), "redis")}
        await worker.put_many({key: vector(b"1")}, 60, {key: 10.0})
        assert (await other.get_many([key]))[key].owed == mark


@pytest.mark.parametrize("times_s", [(10.0, 20.0), (20.0, 10.0)])
async def test_mark_of_the_later_result_stays(redis_url: str, times_s: tuple[float, float]) -> None:
    """Requests can finish in an order other than the one in which their results were computed."""
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many({"a": vector()}, 60, {"a": 20.0})
        for finished_at_s in times_s:
            cache.mark_unpaid({"a": Owed(finished_at_s=finished_at_s)}, ttl_s=60)
            await written(redis_url, "unpaid")
        assert (await cache.get_many(["a"]))["a"].owed == Owed(finished_at_s=20.0)
        assert (await cache.get_many(["a"]))["a"].owed is None


async def test_unreadable_mark_is_none(redis_url: str) -> None:
    async with (
        ResultCache(redis_url, 0) as cache,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        await cache.put_many({"a": vector()}, ttl_s=60)
        cache.mark_unpaid({"a": Owed()}, ttl_s=60)
        await client.set(await written(redis_url, "unpaid"), b"\xff not ours")
        assert await cache.get_many(["a"]) == {"a": Hit(vector(), "redis")}


async def test_oversized_result_is_not_kept(redis_url: str) -> None:
    big = EmbeddingResult(bytes(VALUE_LIMIT_BYTES), 1)
    async with ResultCache(redis_url, 10 * VALUE_LIMIT_BYTES) as cache:
        await cache.put_many({"big": big, "small": vector()}, ttl_s=60)
        assert list(await cache.get_many(["big", "small"])) == ["small"]


async def test_unreadable_entry_is_a_miss(redis_url: str) -> None:
    async with (
        ResultCache(redis_url, 0) as cache,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        await cache.put_many({"a": vector(), "b": vector(), "c": vector()}, ttl_s=60)
        names = sorted(await client.keys("*"))
        await client.set(names[0], b"\xff\x00 not ours")
        await client.set(names[1], msgspec.msgpack.encode({"expires_at_s": 1e12}))
        before = metric("penstock_cache_unreadable_total")
        assert list(await cache.get_many(["a", "b", "c"])) == ["c"]
        assert metric("penstock_cache_unreadable_total") - before == 2


def counts() -> tuple[float, ...]:
    hits = [metric("penstock_cache_hits_total", level=level) for level in ("memory", "redis")]
    return (*hits, metric("penstock_cache_misses_total"))


async def test_hits_without_redis_are_counted_as_those_of_memory() -> None:
    async with ResultCache(NO_REDIS, BIG_MEMORY) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        before = counts()
        assert [hit.level for hit in (await cache.get_many(["a", "x"])).values()] == ["memory"]
        assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 0, 1]


async def test_counters_tell_levels_apart(redis_url: str) -> None:
    async with (
        ResultCache(redis_url, BIG_MEMORY) as writer,
        ResultCache(redis_url, BIG_MEMORY) as reader,
    ):
        await writer.put_many({"a": vector(), "b": vector()}, ttl_s=60)
        before = counts()
        await reader.get_many(["a", "x", "y"])
        await reader.get_many(["a", "b"])
        assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 2, 2]
