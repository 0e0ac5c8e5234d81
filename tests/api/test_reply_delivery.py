"""Guarantees about replies, on both of an inbox's topics, with the in-memory broker and the
embedded Pub/Sub, and a real Redis.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis

from api.dispatch import reply_inbox
from api.dispatch.reply_inbox import ERRORS, InboxLost
from infra.local.redis_server import RedisServer
from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import make_inbox
from shared.errors import ConfigurationError, DeadlineExceeded, Unavailable
from shared.models.entry import Replies
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest
from tests.api.inboxes import Broker, counted, in_memory, next_inbox, until
from tests.limits import REDIS_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

OUTCOMES = ("unknown", "duplicate", "undecodable", "delivered")


@pytest.fixture(autouse=True)
def slow_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances wait for a slow Redis instead of creating their own inboxes."""
    monkeypatch.setattr(reply_inbox, "REDIS_LIMIT_S", REDIS_LIMIT_S)


@pytest.fixture(params=["direct", "slots"])
def replies(request: pytest.FixtureRequest) -> Replies:
    chosen: Replies = request.param
    return chosen


async def test_reply_reaches_its_waiter(broker: Broker, replies: Replies) -> None:
    async with broker.instance() as inbox:
        assert inbox.ready
        with (
            inbox.waiter("r1", 0, replies) as first,
            inbox.waiter("r1", 1, replies) as second,
            inbox.waiter("r2", 0, replies) as other,
        ):
            await broker.reply_to(other, "r2", 0, "for r2")
            await broker.reply_to(second, "r1", 1, "for r1/1")
            await broker.reply_to(first, "r1", 0, "for r1/0")
            got = [await waiter.reply(WAIT_LIMIT_S) for waiter in (first, second, other)]
    assert [reply.body.worker for reply in got] == ["for r1/0", "for r1/1", "for r2"]


async def test_requests_of_both_kinds_at_once(broker: Broker) -> None:
    async with broker.instance(reply_slots=1) as inbox:
        with inbox.waiter("a", 0, "direct") as a, inbox.waiter("b", 0, "slots") as b:
            assert (a.inbox, a.slot, b.slot) == (f"{b.inbox}.direct", "", "0")
            await broker.reply_to(b, "b")
            await broker.reply_to(a, "a")
            assert (await a.reply(WAIT_LIMIT_S)).request_id == "a"
            assert (await b.reply(WAIT_LIMIT_S)).request_id == "b"


async def test_late_unknown_double_and_broken_replies_are_dropped(
    broker: Broker, replies: Replies
) -> None:
    before = {outcome: counted("replies", outcome=outcome) for outcome in OUTCOMES}
    async with broker.instance(reply_slots=1) as inbox:
        with inbox.waiter("late", 0, replies) as waiter:
            pass
        await broker.reply_to(waiter, "late")
        with inbox.waiter("r1", 0, replies) as waiter, inbox.waiter("r2", 0, replies) as last:
            await broker.transport.publish(waiter.inbox, b"{", {"request_id": "r1", "part": "0"})
            await broker.transport.publish(waiter.inbox, b"no attributes", {})
            await broker.reply_to(waiter, "r1", worker="first")
            await broker.reply_to(waiter, "r1", worker="second")
            await broker.reply_to(last, "r2")
            await last.reply(WAIT_LIMIT_S)
            assert (await waiter.reply(WAIT_LIMIT_S)).body.worker == "first"
    after = {outcome: counted("replies", outcome=outcome) - before[outcome] for outcome in OUTCOMES}
    assert after == {"unknown": 2, "duplicate": 1, "undecodable": 1, "delivered": 2}


async def test_reply_after_a_first_wait(replies: Replies) -> None:
    broker = in_memory()
    async with broker.instance() as inbox:
        with inbox.waiter("r1", 0, replies) as waiter:
            with pytest.raises(DeadlineExceeded):
                await waiter.reply(0.01)
            await broker.reply_to(waiter, "r1")
            assert (await waiter.reply(WAIT_LIMIT_S)).request_id == "r1"


async def test_news_of_the_record_end_one_wait(replies: Replies) -> None:
    broker = in_memory()
    async with broker.instance() as inbox:
        with inbox.waiter("r1", 0, replies) as waiter:
            waiter.look()  # before anything waits, so the next wait ends immediately
            with pytest.raises(DeadlineExceeded):
                await waiter.reply(WAIT_LIMIT_S)
            waiting = asyncio.create_task(waiter.reply(WAIT_LIMIT_S))
            await asyncio.sleep(0)
            waiter.look()
            with pytest.raises(DeadlineExceeded):
                await waiting
            waiting = asyncio.create_task(waiter.reply(WAIT_LIMIT_S))
            await broker.reply_to(waiter, "r1")
            assert (await waiting).request_id == "r1"


async def test_instances_get_their_own_replies_only(
    broker: Broker, replies: Replies, redis_url: str
) -> None:
    for number in range(2):
        await make_inbox(broker.admin, str(number), 3)
    before = counted("replies", outcome="unknown")
    async with (
        broker.instance("api-1", inbox_pool=2, redis_url=redis_url) as first,
        broker.instance("api-2", inbox_pool=2, redis_url=redis_url) as second,
    ):
        # The IDs are deliberately the same; only their inboxes differ.
        with first.waiter("r", 0, replies) as one, second.waiter("r", 0, replies) as other:
            assert one.inbox != other.inbox
            await broker.reply_to(other, "r", worker="second")
            assert (await other.reply(WAIT_LIMIT_S)).body.worker == "second"
            await broker.reply_to(one, "r", worker="first")
            assert (await one.reply(WAIT_LIMIT_S)).body.worker == "first"
    assert counted("replies", outcome="unknown") == before


async def test_no_inbox_is_leased_twice(broker: Broker, redis_url: str) -> None:
    for number in range(3):
        await make_inbox(broker.admin, str(number), 1)
    async with AsyncExitStack() as stack:
        names = [f"api-{number}" for number in range(6)]
        pool = {"inbox_pool": 3, "redis_url": redis_url, "reply_slots": 1}
        instances = [broker.instance(name, **pool) for name in names]
        await asyncio.gather(*map(stack.enter_async_context, instances))
        held = [await next_inbox(each, "direct") for each in instances]
    assert len(set(held)) == 6
    assert {f"inbox.{number}.direct" for number in range(3)} < set(held)


async def test_restarted_instance_is_not_confused_by_what_the_last_one_left(
    broker: Broker, replies: Replies, redis_url: str
) -> None:
    await make_inbox(broker.admin, "0", 3)
    pool = {"inbox_pool": 1, "redis_url": redis_url}
    async with broker.instance("api-1", **pool) as inbox:
        with inbox.waiter("old", 0, replies) as old:
            assert await broker.is_answered(inbox, "r1", replies)
    await broker.reply_to(old, "old")
    before = counted("replies", outcome="unknown")
    async with broker.instance("api-2", **pool) as inbox:
        with inbox.waiter("new", 0, replies) as new:
            assert new.inbox == old.inbox
            await broker.reply_to(new, "new")
            assert (await new.reply(WAIT_LIMIT_S)).request_id == "new"
        await until(lambda: counted("replies", outcome="unknown") > before)


async def test_lost_lease_ends_the_waits_and_the_other_holder_gets_all_replies(
    broker: Broker, replies: Replies, redis_url: str
) -> None:
    await make_inbox(broker.admin, "0", 3)
    pool = {"inbox_pool": 1, "redis_url": redis_url, "inbox_lease_s": 1.5}
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(broker.instance("api-1", **pool))
        with first.waiter("r1", 0, replies) as waiter:
            with redis.Redis.from_url(redis_url) as client:
                client.delete("penstock:inbox:0")
            second = await stack.enter_async_context(broker.instance("api-2", **pool))
            with pytest.raises(InboxLost):
                await waiter.reply(WAIT_LIMIT_S)
        assert (await next_inbox(first, replies)).startswith("inbox.api-1-")
        for number in range(20):
            assert await broker.is_answered(second, f"s{number}", replies)
        assert (await next_inbox(second, "slots")) == "inbox.0"


async def test_deleted_subscription_replaces_the_inbox(broker: Broker, replies: Replies) -> None:
    async with broker.instance() as inbox:
        with inbox.waiter("r1", 0, replies) as waiter:
            place = f".slot.{waiter.slot}" if waiter.slot else ""
            await broker.admin.delete_subscription(f"{waiter.inbox}{place}")
            with pytest.raises(InboxLost):
                await waiter.reply(WAIT_LIMIT_S)
        assert await next_inbox(inbox, replies) != waiter.inbox
        assert await broker.is_answered(inbox, "r2", replies)


async def test_replies_come_while_redis_is_away(
    broker: Broker, replies: Replies, tmp_path: Path
) -> None:
    await make_inbox(broker.admin, "0", 3)
    with RedisServer(tmp_path, tmp_path) as server:
        pool = {"inbox_pool": 1, "redis_url": server.url, "inbox_lease_s": 0.3}
        async with broker.instance("api-1", **pool) as inbox:
            failed = errors_of_redis()
            server.kill()
            await until(lambda: errors_of_redis() >= failed + 2)  # two renewals
            assert inbox.ready
            assert await broker.is_answered(inbox, "r1", replies)
            assert await next_inbox(inbox) == "inbox.0"


async def test_used_up_pool_refuses_and_the_next_free_inbox_is_taken(
    replies: Replies, redis_url: str
) -> None:
    class Cloud(InMemoryBroker):
        """A project where instances create no resources."""

        async def ensure_topic(self, topic_id: str) -> bool:
            raise ConfigurationError("PERMISSION_DENIED")

    made = InMemoryBroker()
    await make_inbox(made, "0", 3)
    broker, pool = Broker(made, Cloud()), {"inbox_pool": 1, "redis_url": redis_url}
    async with AsyncExitStack() as later:
        async with broker.instance("api-1", **pool) as first:
            assert first.ready
            second = await later.enter_async_context(broker.instance("api-2", **pool))
            assert not second.ready
            with pytest.raises(Unavailable), second.waiter("r1", 0, replies):
                pass
        assert await next_inbox(second) == "inbox.0"
        assert await broker.is_answered(second, "r1", replies)


async def test_older_release_with_more_slots_shares_the_pool(
    broker: Broker, redis_url: str
) -> None:
    for number in range(2):
        await make_inbox(broker.admin, str(number), 9)
    pool = {"inbox_pool": 2, "redis_url": redis_url}
    async with (
        broker.instance("older", reply_slots=9, **pool) as older,
        broker.instance("newer", reply_slots=2, **pool) as newer,
    ):
        for inbox, slots in ((older, 9), (newer, 2)):
            for number in range(slots + 1):
                assert await broker.is_answered(inbox, f"r{number}", "slots")
        assert await broker.is_answered(newer, "direct", "direct")


async def test_job_names_the_topic_that_its_model_replies_to(api: ApiUnderTest) -> None:
    await api.http.post("/v1/embeddings", json={"model": TEXT_MODEL.name, "input": "a"})
    await api.http.post("/v1/images/generations", json={"model": IMAGE_MODEL.name, "prompt": "a"})
    text, image = (job.envelope for job in api.worker.jobs)
    assert (text.inbox.endswith(".direct"), text.slot) == (True, "")
    assert (image.inbox.endswith(".direct"), image.slot) == (False, "0")


def errors_of_redis() -> float:
    return sum(
        sample.value
        for metric in ERRORS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
