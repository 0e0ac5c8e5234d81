"""The cache while its Redis is missing, stops, hangs or rejects commands: nothing fails, nothing
waits long, and everything recovers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
import redis.asyncio

from infra.local.process import free_port
from infra.local.redis_server import RedisServer
from shared.errors import ConfigurationError
from shared.models.tasks.embedding import EmbeddingResult
from shared.stores import redis_client
from shared.stores.cache import Hit, Owed, ResultCache
from shared.stores.redis_client import NO_REDIS
from tests.gated_link import GatedLink
from tests.limits import REDIS_LIMIT_S, WAIT_LIMIT_S
from tests.metrics import metric
from tests.record_stores import RecordStores
from tests.waiting import until

pytestmark = pytest.mark.anyio

BIG_MEMORY = 1 << 20


def vector() -> EmbeddingResult:
    return EmbeddingResult(b"v" * 16, 3)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may stop and pause."""
    with RedisServer(tmp_path, tmp_path) as server:
        yield server


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    """Retries until the condition holds; each call does the work that makes it true."""
    with anyio.fail_after(WAIT_LIMIT_S):
        while not await condition():
            pass


@asynccontextmanager
async def quick_cache(url: str, timeout_s: float = REDIS_LIMIT_S) -> AsyncIterator[ResultCache]:
    async with ResultCache(url, 0, timeout_s=timeout_s, retry_s=0.01) as cache:
        yield cache


async def trip(cache: ResultCache) -> None:
    with anyio.fail_after(WAIT_LIMIT_S):
        while cache.is_up:
            assert await cache.get_many(["k"]) == {}


async def test_eviction_policy_is_checked_once_redis_answers(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds even if no call noticed that Redis was unreachable at the start."""
    link, refused = GatedLink(urlsplit(own_redis.url).port or 0), asyncio.Event()

    async def refuse_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if refused.is_set():
            await link.serve(reader, writer)
        else:
            writer.transport.abort()
            refused.set()

    async with (
        redis.asyncio.Redis.from_url(own_redis.url) as client,
        await asyncio.start_server(refuse_first, "127.0.0.1", 0) as server,
    ):
        await client.config_set("maxmemory-policy", "allkeys-lru")
        port = server.sockets[0].getsockname()[1]
        async with RecordStores(f"redis://127.0.0.1:{port}", retry_s=0.01) as stores:
            await until(lambda: "may lose data" in caplog.text)
            assert stores.redis.is_up
        link.cut()


async def test_unpaid_result_is_computed_again_without_redis() -> None:
    """Another caller may have paid for it, but that is unknown. Unmarked results are hits."""
    async with ResultCache(NO_REDIS, BIG_MEMORY) as cache:
        await trip(cache)
        await cache.put_many({"a": vector(), "b": vector()}, ttl_s=60)
        cache.mark_unpaid({"a": Owed()}, ttl_s=60)
        assert await cache.get_many(["a", "b"]) == {"b": Hit(vector(), "memory")}


async def test_opens_without_redis_and_finds_it_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, tmp_path, free_port())
    async with ResultCache(server.url, BIG_MEMORY, retry_s=0.01) as cache:
        await trip(cache)
        await cache.put_many({"a": vector()}, ttl_s=60)
        assert await cache.get_many(["a"]) == {"a": Hit(vector(), "memory")}
        with server:
            assert await cache.wait_up(WAIT_LIMIT_S)
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
        assert await cache.wait_up(WAIT_LIMIT_S)
        await cache.put_many({"a": vector()}, ttl_s=60)
        assert "a" in await cache.get_many(["a"])
        assert metric("penstock_cache_redis_up") == 1


async def test_hanging_redis_costs_a_bounded_wait_then_none(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url, timeout_s=0.5) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        own_redis.pause()
        with anyio.fail_after(WAIT_LIMIT_S):
            await trip(cache)
            # With the breaker open, nothing waits: this takes far less time than one limit per
            # call.
            for _ in range(1000):
                assert await cache.get_many(["a"]) == {}
                await cache.put_many({"b": vector()}, ttl_s=60)
        own_redis.resume()
        assert await cache.wait_up(WAIT_LIMIT_S)
        assert "a" in await cache.get_many(["a"])


async def test_a_crowd_of_callers_is_let_go(own_redis: RedisServer) -> None:
    async with quick_cache(own_redis.url, timeout_s=0.5) as cache:
        own_redis.pause()
        with anyio.fail_after(WAIT_LIMIT_S):
            async with anyio.create_task_group() as group:
                for n in range(3000):
                    group.start_soon(cache.get_many, [f"k{n}"])

        async def is_open() -> bool:
            return not await cache.get_many(["k"]) and not cache.is_up

        await wait_for(is_open)


async def test_refused_write_is_an_error_but_no_reason_to_stop_asking(
    own_redis: RedisServer,
) -> None:
    async with (
        quick_cache(own_redis.url) as cache,
        redis.asyncio.Redis.from_url(own_redis.url) as client,
    ):
        await cache.put_many({"a": vector()}, ttl_s=60)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", 1)
        errors = metric("penstock_cache_errors_total", operation="put")
        for _ in range(redis_client.FAILURES + 1):
            await cache.put_many({"b": vector()}, ttl_s=60)
        assert (
            metric("penstock_cache_errors_total", operation="put") - errors
            == redis_client.FAILURES + 1
        )
        assert cache.is_up
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


async def test_answer_that_came_while_the_process_was_held_up_counts(
    own_redis: RedisServer,
) -> None:
    timeout_s = 0.5
    async with ResultCache(own_redis.url, 0, timeout_s=timeout_s) as cache:
        await cache.put_many({"a": vector()}, ttl_s=60)
        with redis.Redis.from_url(own_redis.url) as client:
            client.config_resetstat()
            own_redis.pause()
            asking = asyncio.create_task(cache.get_many(["a"]))
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            own_redis.resume()
            # No task runs from here on: both the response and the timer come due while this process
            # is blocked.
            while "cmdstat_mget" not in client.info("commandstats"):
                pass
            time.sleep(1.2 * timeout_s)  # noqa: ASYNC251
        assert "a" in await asking


async def test_wrong_url_is_refused_at_start() -> None:
    with pytest.raises(ConfigurationError, match=r"^PENSTOCK_REDIS_URL: ") as caught:
        async with ResultCache("http://localhost", 0):
            pass
    assert caught.value.field == "redis_url"
    with pytest.raises(ConfigurationError, match=r"^PENSTOCK_RECORDS_URL: ") as caught:
        async with RecordStores("http://localhost"):
            pass
    assert caught.value.field == "records_url"
