"""Withdrawn revisions in Redis, and how every process learns about them."""

import asyncio
from pathlib import Path

import pytest
import redis

from infra.local.redis_server import RedisServer
from shared.errors import ModelWithdrawn, Unavailable, UndecodableMessage
from shared.models.catalog import Model
from shared.models.tasks.embedding import TextInput
from shared.stores.cache import cache_key
from shared.stores.redis_client import NO_REDIS, RedisLink
from shared.stores.withdrawals import (
    ERRORS,
    UP,
    LiveWithdrawals,
    Withdrawal,
    WithdrawalStore,
)
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

NEVER_S = 3600.0
TEXT = TextInput("a cat")


def withdrawal(model: Model = TEXT_MODEL) -> Withdrawal:
    return Withdrawal(model.name, model.revision, 1.0, "user x")


async def test_withdrawal_is_learned_and_undone(redis_url: str) -> None:
    store = WithdrawalStore(redis_url)
    told: list[bool] = []
    async with LiveWithdrawals(store, refresh_s=NEVER_S) as live:
        live.on_withdrawn(lambda: told.append(live.is_withdrawn(TEXT_MODEL)))
        live.check(TEXT_MODEL)
        assert await store.withdraw(withdrawal())
        live.check(TEXT_MODEL)
        await live.refresh()
        with pytest.raises(ModelWithdrawn, match="'all-MiniLM-L6-v2' was withdrawn by the op"):
            live.check(TEXT_MODEL)
        live.check(IMAGE_MODEL)
        live.check(TEXT_MODEL.model_copy(update={"revision": "next"}))
        assert told == [True]
        assert await store.undo(TEXT_MODEL.name, TEXT_MODEL.revision)
        assert not await store.undo(TEXT_MODEL.name, TEXT_MODEL.revision)
        await live.refresh()
        live.check(TEXT_MODEL)
        assert told == [True]


async def test_fields_of_a_newer_release_are_skipped(redis_url: str) -> None:
    async with WithdrawalStore(redis_url) as store:
        assert await store.withdraw(withdrawal())
        with redis.Redis.from_url(redis_url) as client:
            (key,) = client.keys("*models:withdrawn")
            client.hset(key, "frozen:all-MiniLM-L6-v2:1", '{"since": 1}')
        withdrawals = await store.read()
    assert withdrawals is not None
    assert list(withdrawals.withdrawn) == [f"{TEXT_MODEL.name}:{TEXT_MODEL.revision}"]


async def test_a_field_that_nests_too_deep_is_undecodable(redis_url: str) -> None:
    async with WithdrawalStore(redis_url) as store:
        assert await store.withdraw(withdrawal())
        with redis.Redis.from_url(redis_url) as client:
            (key,) = client.keys("*models:withdrawn")
            client.hset(key, "withdrawn:x:1", '{"more": ' + "[" * 100_000)
        with pytest.raises(UndecodableMessage):
            await store.read()


async def test_a_word_that_redis_cant_get_ends_its_call(redis_url: str) -> None:
    """Calls of the same round trip end too, and later ones work."""
    link = RedisLink("test", redis_url, retry_s=0.25, up=UP, errors=ERRORS, field="records_url")
    async with link, asyncio.timeout(WAIT_LIMIT_S):
        commands = link.commands("the store")
        ends = await asyncio.gather(
            commands.run("SET", "a", "\ud800"), commands.run("PING"), return_exceptions=True
        )
        assert [type(end) for end in ends] == [Unavailable, Unavailable]
        assert await commands.run("SET", "a", "b")


async def test_second_withdrawal_changes_nothing(redis_url: str) -> None:
    async with WithdrawalStore(redis_url) as store:
        assert await store.withdraw(withdrawal())
        before = await store.read()
        assert not await store.withdraw(Withdrawal(TEXT_MODEL.name, TEXT_MODEL.revision, 2.0, "y"))
        assert await store.read() == before


async def test_what_was_cached_has_another_key_for_ever(redis_url: str) -> None:
    store = WithdrawalStore(redis_url)
    async with LiveWithdrawals(store, refresh_s=NEVER_S) as live:
        keys = []
        for _ in range(3):
            await live.refresh()
            keys.append(cache_key(TEXT_MODEL, TEXT, "acme", live.purges(TEXT_MODEL)))
            await store.withdraw(withdrawal())
            await store.undo(TEXT_MODEL.name, TEXT_MODEL.revision)
        assert keys[0] == cache_key(TEXT_MODEL, TEXT, "acme"), "a key of before is another now"
        assert len(set(keys)) == 3
        assert live.purges(IMAGE_MODEL) == 0


async def test_redis_that_lost_it_ends_no_withdrawal(redis_url: str) -> None:
    store = WithdrawalStore(redis_url)
    await store.__aenter__()
    await store.withdraw(withdrawal())
    async with LiveWithdrawals(WithdrawalStore(redis_url), refresh_s=NEVER_S) as live:
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        await live.refresh()
        assert live.is_withdrawn(TEXT_MODEL)
    await store.__aexit__(None, None, None)


async def test_redis_out_of_reach_ends_no_withdrawal(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tmp_path, persist=True) as server:
        store = WithdrawalStore(server.url, retry_s=0.01)
        async with LiveWithdrawals(store, refresh_s=NEVER_S) as live:
            await store.withdraw(withdrawal())
            await live.refresh()
            server.kill()
            await live.refresh()
            assert live.is_withdrawn(TEXT_MODEL)
            server.stop()
            server.start()
            async with LiveWithdrawals(WithdrawalStore(server.url)) as later:
                assert later.is_withdrawn(TEXT_MODEL), "it does not outlive a restart"


async def test_without_redis_nothing_is_withdrawn() -> None:
    async with LiveWithdrawals(WithdrawalStore(NO_REDIS)) as live:
        live.check(TEXT_MODEL)
        assert live.purges(TEXT_MODEL) == 0
