import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import redis.asyncio
from prometheus_client import REGISTRY

from infra.local.process import free_port
from infra.local.redis import RedisServer
from shared import cache_redis
from shared.cache import VALUE_LIMIT_BYTES, ResultCache, cache_key
from shared.catalogue import Model
from shared.errors import BadInput, ConfigurationError
from shared.messages import Blob, EmbeddingResult, ImageInput, ImageResult, Input, TextInput, TokensInput

pytestmark = pytest.mark.anyio

MODEL = Model.model_validate(
    {"name": "mini", "task": "embedding", "source": "local:mini", "dimensions": 4, "batch": {"max_tokens": 64}}
)
PNG = Blob("image/png", data=b"pixels")
BIG_MEMORY = 1 << 20


def drawing(**params: Any) -> ImageInput:
    usual: dict[str, Any] = {"prompt": "a boat", "width": 64, "height": 64, "steps": 4, "guidance_scale": 7.5}
    return ImageInput(**usual | {"seed": 3, "scheduler": "ddim", "strength": 0.5} | params)


def vector(fill: bytes = b"v", tokens: int = 3) -> EmbeddingResult:
    return EmbeddingResult(fill * 16, tokens)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may stop and pause."""
    with RedisServer(tmp_path, tmp_path) as server:
        yield server


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


# Keys


def test_key_is_256_bits_and_repeatable() -> None:
    key = cache_key(MODEL, TextInput("a cat"), "t")
    assert len(bytes.fromhex(key)) == 32
    assert key == cache_key(MODEL, TextInput("a cat"), "t")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "mini2"},
        {"revision": "2"},
        {"source": "local:other"},
        {"precision": "bf16"},
        {"dimensions": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_changes_with_model(change: dict[str, object]) -> None:
    other = MODEL.model_copy(update=change)
    assert cache_key(other, TextInput("a cat"), "t") != cache_key(MODEL, TextInput("a cat"), "t")


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a boat "},
        {"negative_prompt": "fog"},
        {"width": 72},
        {"height": 72},
        {"steps": 5},
        {"guidance_scale": 7.6},
        {"seed": 4},
        {"scheduler": "euler"},
        {"image": PNG},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_changes_with_image_params(change: dict[str, object]) -> None:
    assert cache_key(MODEL, drawing(**change), "t") != cache_key(MODEL, drawing(), "t")


def test_key_covers_source_image_and_strength() -> None:
    drawn_from = [
        drawing(image=image, strength=strength)
        for image in (PNG, Blob("image/png", data=b"others"), Blob("image/png", object_key="inputs/1.png"))
        for strength in (0.5, 0.6)
    ]
    assert len({cache_key(MODEL, input, "t") for input in drawn_from}) == len(drawn_from)


def test_key_ignores_what_changes_no_pixel() -> None:
    without_source = drawing(strength=0.9)
    whole_number = drawing(guidance_scale=7)
    assert cache_key(MODEL, without_source, "t") == cache_key(MODEL, drawing(), "t")
    assert cache_key(MODEL, whole_number, "t") == cache_key(MODEL, drawing(guidance_scale=7.0), "t")


def test_key_tells_text_from_tokens() -> None:
    inputs: list[Input] = [TextInput("1"), TokensInput([1]), TokensInput([1, 2]), TokensInput([12]), TextInput("")]
    assert len({cache_key(MODEL, input, "t") for input in inputs}) == len(inputs)


def test_key_scope_decides_about_tenant() -> None:
    private = MODEL.model_copy(update={"cache": MODEL.cache.model_copy(update={"scope": "tenant"})})
    text = TextInput("a cat")
    assert cache_key(MODEL, text, "a") == cache_key(MODEL, text, "b")
    assert cache_key(private, text, "a") != cache_key(private, text, "b")


def test_key_refuses_lone_surrogate() -> None:
    with pytest.raises(BadInput, match="Unicode"):
        cache_key(MODEL, TextInput("\ud800"), "t")


# Both levels


async def test_get_many_names_the_level(redis_url: str) -> None:
    async with ResultCache(redis_url, BIG_MEMORY) as writer, ResultCache(redis_url, BIG_MEMORY) as reader:
        await writer.put_many({"a": vector(b"a"), "b": vector(b"b")}, ttl_s=60)
        assert await writer.get_many(["a"]) == {"a": (vector(b"a"), "memory")}
        assert await reader.get_many(["a", "b", "c", "a"]) == {
            "a": (vector(b"a"), "redis"),
            "b": (vector(b"b"), "redis"),
        }
        assert (await reader.get_many(["b"]))["b"][1] == "memory"


async def test_image_results_survive_redis(redis_url: str) -> None:
    inline = ImageResult(PNG, 64, 64, seed=3, pixel_steps=9)
    stored = ImageResult(Blob("image/png", object_key="results/ab/1.png"), 64, 64, seed=4, pixel_steps=9)
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many({"inline": inline, "stored": stored}, ttl_s=60)
        assert await cache.get_many(["inline", "stored"]) == {"inline": (inline, "redis"), "stored": (stored, "redis")}


async def test_more_results_than_one_round_trip(redis_url: str) -> None:
    results = {f"k{n}": vector(tokens=n) for n in range(1000)}
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many(results, ttl_s=60)
        found = await cache.get_many(results)
    assert {key: result for key, (result, _) in found.items()} == results


async def test_callers_at_once_get_their_own(redis_url: str) -> None:
    async with ResultCache(redis_url, 0) as cache:
        await cache.put_many({f"k{n}": vector(tokens=n) for n in range(0, 200, 2)}, ttl_s=60)
        found: dict[int, dict[str, tuple[object, str]]] = {}

        async def ask(n: int) -> None:
            found[n] = dict(await cache.get_many([f"k{n}", f"k{n + 1}"]))

        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(ask, n)
    for n in range(200):
        even = n if n % 2 == 0 else n + 1
        expected = {f"k{even}": (vector(tokens=even), "redis")} if even < 200 else {}
        assert found[n] == expected


async def test_entries_expire_in_both_levels(redis_url: str) -> None:
    clock = Clock()
    async with ResultCache(redis_url, BIG_MEMORY, clock=clock) as cache, ResultCache(redis_url, BIG_MEMORY) as other:
        await cache.put_many({"a": vector()}, ttl_s=60)
        await other.get_many(["a"])
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            [name] = await client.keys("*")
            assert 55 <= await client.ttl(name) <= 60
        clock.now_s += 61
        assert await cache.get_many(["a"]) == {}


async def test_what_came_from_redis_expires_with_it(redis_url: str) -> None:
    clock = Clock()
    async with ResultCache(redis_url, BIG_MEMORY) as writer, ResultCache(redis_url, BIG_MEMORY, clock=clock) as reader:
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
    async with ResultCache(redis_url, 0, prefix="one:") as one, ResultCache(redis_url, 0, prefix="two:") as two:
        await one.put_many({"a": vector()}, ttl_s=60)
        assert await two.get_many(["a"]) == {}
        assert "a" in await one.get_many(["a"])


async def test_memory_forgets_least_recently_used(redis_url: str) -> None:
    async with ResultCache(redis_url, 2500) as cache:
        for name in "abcde":
            await cache.put_many({name: vector()}, ttl_s=60)
            await cache.get_many(["a"])
        levels = {key: level for key, (_, level) in (await cache.get_many("abcde")).items()}
    assert levels == {"a": "memory", "b": "redis", "c": "memory", "d": "memory", "e": "memory"}


async def test_oversized_result_is_not_kept(redis_url: str) -> None:
    big = EmbeddingResult(bytes(VALUE_LIMIT_BYTES), 1)
    async with ResultCache(redis_url, 10 * VALUE_LIMIT_BYTES) as cache:
        await cache.put_many({"big": big, "small": vector()}, ttl_s=60)
        assert list(await cache.get_many(["big", "small"])) == ["small"]


async def test_unreadable_entry_is_a_miss(redis_url: str) -> None:
    async with ResultCache(redis_url, 0) as cache, redis.asyncio.Redis.from_url(redis_url) as client:
        await cache.put_many({"a": vector(), "b": vector(), "c": vector()}, ttl_s=60)
        names = sorted(await client.keys("*"))
        await client.set(names[0], b"\xff\x00 not ours")
        await client.set(names[1], msgspec.msgpack.encode({"expires_at_s": 1e12}))
        before = metric("penstock_cache_unreadable_total")
        assert list(await cache.get_many(["a", "b", "c"])) == ["c"]
        assert metric("penstock_cache_unreadable_total") - before == 2


async def test_counters_tell_levels_apart(redis_url: str) -> None:
    def counts() -> tuple[float, ...]:
        hits = [metric("penstock_cache_hits_total", level=level) for level in ("memory", "redis")]
        return (*hits, metric("penstock_cache_misses_total"))

    async with ResultCache(redis_url, BIG_MEMORY) as writer, ResultCache(redis_url, BIG_MEMORY) as reader:
        await writer.put_many({"a": vector(), "b": vector()}, ttl_s=60)
        before = counts()
        await reader.get_many(["a", "x", "y"])
        await reader.get_many(["a", "b"])
        assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 2, 2]


# Redis out of reach


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks until it holds; each asking is the work that makes it hold."""
    with anyio.fail_after(8):
        while not await condition():
            pass


@asynccontextmanager
async def quick_cache(url: str) -> AsyncIterator[ResultCache]:
    async with ResultCache(url, 0, retry_s=0.01) as cache:
        yield cache


async def trip(cache: ResultCache) -> None:
    """Asks until the breaker opens."""
    with anyio.fail_after(8):
        while cache.redis_is_up:
            assert await cache.get_many(["k"]) == {}


async def test_opens_without_redis_and_finds_it_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, tmp_path, free_port())
    async with ResultCache(server.url, BIG_MEMORY, retry_s=0.01) as cache:
        await trip(cache)
        await cache.put_many({"a": vector()}, ttl_s=60)
        assert await cache.get_many(["a"]) == {"a": (vector(), "memory")}
        with server:
            assert await cache.wait_redis(8)
            async with quick_cache(server.url) as other:
                await cache.put_many({"b": vector()}, ttl_s=60)
                assert (await other.get_many(["b"]))["b"][1] == "redis"


async def test_redis_stops_and_comes_back(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        assert "a" in await cache.get_many(["a"])
        errors = metric("penstock_cache_errors_total", operation="get")
        own_redis.stop()
        await trip(cache)
        assert metric("penstock_cache_errors_total", operation="get") > errors
        assert metric("penstock_cache_redis_up") == 0
        own_redis.start()
        assert await cache.wait_redis(8)
        await cache.put_many({"a": vector()}, ttl_s=60)
        assert "a" in await cache.get_many(["a"])
        assert metric("penstock_cache_redis_up") == 1


async def test_hanging_redis_costs_a_bounded_wait_then_none(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        own_redis.pause()
        with anyio.fail_after(5):
            await trip(cache)
            # With the breaker open nothing waits: far fewer seconds than one limit each would take.
            for _ in range(1000):
                assert await cache.get_many(["a"]) == {}
                await cache.put_many({"b": vector()}, ttl_s=60)
        own_redis.resume()
        assert await cache.wait_redis(8)
        assert "a" in await cache.get_many(["a"])


async def test_a_crowd_of_callers_is_let_go(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url) as cache:
        own_redis.pause()
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for n in range(3000):
                    group.start_soon(cache.get_many, [f"k{n}"])

        async def is_open() -> bool:
            return not await cache.get_many(["k"]) and not cache.redis_is_up

        await wait_for(is_open)


async def test_refused_write_is_an_error_but_no_reason_to_stop_asking(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url) as cache, redis.asyncio.Redis.from_url(own_redis.url) as client:
        await cache.put_many({"a": vector()}, ttl_s=60)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", 1)
        errors = metric("penstock_cache_errors_total", operation="put")
        for _ in range(cache_redis.FAILURES + 1):
            await cache.put_many({"b": vector()}, ttl_s=60)
        assert metric("penstock_cache_errors_total", operation="put") - errors == cache_redis.FAILURES + 1
        assert cache.redis_is_up
        assert "a" in await cache.get_many(["a"])


async def test_cancelled_caller_leaves_the_others_alone(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        own_redis.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(cache.get_many, ["a"])
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        own_redis.resume()

        async def answers() -> bool:
            return "a" in await cache.get_many(["a"])

        await wait_for(answers)


async def test_answer_that_came_while_the_process_was_held_up_counts(redis_url: str) -> None:
    timeout_s = 0.05
    async with ResultCache(redis_url, 0, timeout_s=timeout_s) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        with redis.Redis.from_url(redis_url) as client:
            client.config_resetstat()
            asking = asyncio.create_task(cache.get_many(["a"]))
            while "cmdstat_mget" not in client.info("commandstats"):
                await anyio.lowlevel.checkpoint()
            # Redis has answered; now this process stands still for longer than the limit, timers and answer both wait.
            time.sleep(3 * timeout_s)  # noqa: ASYNC251
        assert "a" in await asking


async def test_wrong_url_is_refused_at_start() -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_REDIS_URL"):
        async with ResultCache("http://localhost", 0):
            pass
