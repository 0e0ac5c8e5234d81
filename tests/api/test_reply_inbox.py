"""The reply inbox over the broker in memory and over the embedded Pub/Sub, with a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import redis
from prometheus_client import REGISTRY

from api.dispatch.inbox_lease import InboxLost
from api.dispatch.open_inbox import PendingReply
from api.dispatch.reply_inbox import ReplyInbox
from shared.errors import ConfigurationError, DeadlineExceeded, Unavailable
from shared.message_encoding import encode_reply
from shared.messages import ItemOutcome, Receipt, Reply, ReplyBody
from shared.pubsub.admin import PubSubAdmin
from shared.pubsub.client import PubSubTransport
from shared.pubsub.reply_inbox import make_inbox
from shared.settings import ApiSettings
from shared.transport import Admin, Transport
from tests.fakes import InMemoryTransport
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@dataclass
class Broker:
    transport: Transport
    admin: Admin


@asynccontextmanager
async def embedded(endpoint: str) -> AsyncIterator[Broker]:
    project = f"inbox-{uuid4().hex[:8]}"
    async with (
        PubSubTransport(project, endpoint) as transport,
        PubSubAdmin(project, endpoint) as admin,
    ):
        yield Broker(transport, admin)


@pytest.fixture(params=["memory", "embedded"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "memory":
        memory = InMemoryTransport()
        yield Broker(memory, memory)
    else:
        async with embedded(request.getfixturevalue("pubsub_endpoint")) as opened:
            yield opened


def settings(**given: Any) -> ApiSettings:
    return ApiSettings(**{"reply_slots": 3, "inbox_pool": 0, **given})


async def reply_to(
    broker: Broker, waiter: PendingReply, request_id: str, part: int = 0, worker: str = "w"
) -> None:
    body = ReplyBody([ItemOutcome(0, "succeeded", Receipt())], worker=worker)
    data, attributes = encode_reply(Reply(request_id, part, waiter.slot, body))
    await broker.transport.publish(waiter.inbox, data, attributes)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_inbox_{name}_total", labels) or 0.0


async def test_reply_reaches_its_waiter(broker: Broker) -> None:
    async with ReplyInbox(settings(), broker.transport, broker.admin, "api-1") as inbox:
        assert inbox.ready
        with (
            inbox.waiter("r1", 0) as first,
            inbox.waiter("r1", 1) as second,
            inbox.waiter("r2", 0) as other,
        ):
            await reply_to(broker, other, "r2", 0, "for r2")
            await reply_to(broker, second, "r1", 1, "for r1/1")
            await reply_to(broker, first, "r1", 0, "for r1/0")
            replies = [await waiter.reply(WAIT_LIMIT_S) for waiter in (first, second, other)]
    assert [reply.body.worker for reply in replies] == ["for r1/0", "for r1/1", "for r2"]


async def test_slots_are_exclusive_while_there_are_free_ones() -> None:
    memory = InMemoryTransport()
    async with ReplyInbox(settings(reply_slots=3), memory, memory, "api-1") as inbox:
        exclusive, shared = (
            counted("slots_given", kind="exclusive"),
            counted("slots_given", kind="shared"),
        )
        with inbox.waiter("r1", 0) as a, inbox.waiter("r2", 0) as b, inbox.waiter("r2", 1) as b2:
            assert a.slot != b.slot
            assert b2.slot == b.slot, "the parts of one request stand on one slot"
            with inbox.waiter("r3", 0) as c, inbox.waiter("r4", 0) as d, inbox.waiter("r5", 0) as e:
                assert len({a.slot, b.slot, c.slot}) == 3
                assert len({d.slot, e.slot}) == 2, "the least used slot is shared first"
        assert counted("slots_given", kind="exclusive") - exclusive == 3
        assert counted("slots_given", kind="shared") - shared == 2
        with inbox.waiter("r6", 0) as a, inbox.waiter("r7", 0) as b, inbox.waiter("r8", 0) as c:
            assert len({a.slot, b.slot, c.slot}) == 3, "slots come back"


async def test_one_slot_serves_all(broker: Broker) -> None:
    async with ReplyInbox(
        settings(reply_slots=1), broker.transport, broker.admin, "api-1"
    ) as inbox:
        with inbox.waiter("r1", 0) as first, inbox.waiter("r2", 0) as second:
            await reply_to(broker, second, "r2")
            await reply_to(broker, first, "r1")
            assert (await first.reply(5)).request_id == "r1"
            assert (await second.reply(5)).request_id == "r2"


async def test_late_unknown_double_and_broken_replies_are_dropped(broker: Broker) -> None:
    outcomes = ("unknown", "duplicate", "undecodable", "delivered")
    before = {outcome: counted("replies", outcome=outcome) for outcome in outcomes}
    async with ReplyInbox(
        settings(reply_slots=1), broker.transport, broker.admin, "api-1"
    ) as inbox:
        with inbox.waiter("late", 0) as waiter:
            pass
        await reply_to(broker, waiter, "late")
        with inbox.waiter("r1", 0) as waiter, inbox.waiter("r2", 0) as last:
            await broker.transport.publish(waiter.inbox, b"{", {"request_id": "r1", "part": "0"})
            await broker.transport.publish(waiter.inbox, b"no attributes", {})
            await reply_to(broker, waiter, "r1", worker="first")
            await reply_to(broker, waiter, "r1", worker="second")
            await reply_to(broker, last, "r2")
            await last.reply(5)
            assert (await waiter.reply(WAIT_LIMIT_S)).body.worker == "first"
    after = {outcome: counted("replies", outcome=outcome) - before[outcome] for outcome in outcomes}
    assert after == {"unknown": 2, "duplicate": 1, "undecodable": 1, "delivered": 2}


async def test_no_reply_in_time() -> None:
    memory = InMemoryTransport()
    async with ReplyInbox(settings(), memory, memory, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter:
            with pytest.raises(DeadlineExceeded):
                await waiter.reply(0.01)
            await reply_to(Broker(memory, memory), waiter, "r1")
            assert (await waiter.reply(WAIT_LIMIT_S)).request_id == "r1"


async def test_own_inbox_is_removed_at_close(broker: Broker) -> None:
    async with ReplyInbox(settings(), broker.transport, broker.admin, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter:
            slots = [f"{waiter.inbox}.slot.{number}" for number in range(3)]
        assert all([await broker.admin.subscription_exists(slot) for slot in slots])
    assert not any([await broker.admin.subscription_exists(slot) for slot in slots])


async def test_pool_gives_each_instance_another_inbox(broker: Broker, redis_url: str) -> None:
    pool = settings(inbox_pool=2, redis_url=redis_url)
    for number in range(2):
        await make_inbox(broker.admin, str(number), 3)
    async with AsyncExitStack() as stack:
        inboxes = [
            await stack.enter_async_context(
                ReplyInbox(pool, broker.transport, broker.admin, f"api-{number}")
            )
            for number in range(3)
        ]
        topics = []
        for inbox in inboxes:
            with inbox.waiter("r1", 0) as waiter:
                topics.append(waiter.inbox)
                await reply_to(broker, waiter, "r1", worker=waiter.inbox)
                assert (await waiter.reply(WAIT_LIMIT_S)).body.worker == waiter.inbox
    assert set(topics[:2]) == {"inbox.0", "inbox.1"}
    assert topics[2].startswith("inbox.api-2-"), "the pool is empty, so the third made its own"
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("penstock:inbox:*") == [], "released at close"


async def test_pool_of_another_region_starts_where_it_is_told(
    broker: Broker, redis_url: str
) -> None:
    pool = settings(inbox_pool=1, inbox_first=7, redis_url=redis_url)
    await make_inbox(broker.admin, "7", 3)
    async with ReplyInbox(pool, broker.transport, broker.admin, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter:
            assert waiter.inbox == "inbox.7"


async def test_lost_lease_moves_to_another_inbox(broker: Broker, redis_url: str) -> None:
    pool = settings(inbox_pool=1, redis_url=redis_url, inbox_lease_s=1.5)
    await make_inbox(broker.admin, "0", 3)
    async with ReplyInbox(pool, broker.transport, broker.admin, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter, redis.Redis.from_url(redis_url) as client:
            assert waiter.inbox == "inbox.0"
            client.set("penstock:inbox:0", "somebody else")
            with pytest.raises(InboxLost):
                await waiter.reply(WAIT_LIMIT_S)
        async with asyncio.timeout(WAIT_LIMIT_S):
            topic = await _next_inbox(inbox)
        assert topic.startswith("inbox.api-1-")
        with redis.Redis.from_url(redis_url) as client:
            assert client.get("penstock:inbox:0") == b"somebody else"


async def test_lease_is_kept_while_redis_forgets(redis_url: str) -> None:
    memory = InMemoryTransport()
    await make_inbox(memory, "0", 1)
    pool = settings(inbox_pool=1, redis_url=redis_url, inbox_lease_s=1.5, reply_slots=1)
    async with (
        ReplyInbox(pool, memory, memory, "api-1") as inbox,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        await client.flushall()
        async with asyncio.timeout(WAIT_LIMIT_S):
            await _held_by(client, b"api-1")
        assert inbox.ready


async def test_pool_without_redis_makes_its_own() -> None:
    memory = InMemoryTransport()
    pool = settings(inbox_pool=1, redis_url="redis://127.0.0.1:1/0")
    async with ReplyInbox(pool, memory, memory, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter:
            assert waiter.inbox.startswith("inbox.api-1-")


async def test_inbox_that_is_deleted_is_replaced(broker: Broker) -> None:
    async with ReplyInbox(settings(), broker.transport, broker.admin, "api-1") as inbox:
        with inbox.waiter("r1", 0) as waiter:
            for number in range(3):
                await broker.admin.delete_subscription(f"{waiter.inbox}.slot.{number}")
            with pytest.raises(InboxLost):
                await waiter.reply(WAIT_LIMIT_S)
        async with asyncio.timeout(WAIT_LIMIT_S):
            assert await _next_inbox(inbox) != waiter.inbox


async def test_no_rights_are_said_at_start() -> None:
    class Forbidding(InMemoryTransport):
        async def ensure_topic(self, topic_id: str) -> bool:
            raise ConfigurationError("PERMISSION_DENIED")

    broker = Forbidding()
    with pytest.raises(ConfigurationError):
        await ReplyInbox(settings(), broker, broker, "api-1").__aenter__()


async def test_start_goes_on_without_a_broker() -> None:
    class Down(InMemoryTransport):
        is_down = True

        async def ensure_topic(self, topic_id: str) -> bool:
            if self.is_down:
                raise Unavailable
            return await super().ensure_topic(topic_id)

    broker = Down()
    async with ReplyInbox(settings(), broker, broker, "api-1") as inbox:
        assert not inbox.ready
        with pytest.raises(Unavailable), inbox.waiter("r1", 0):
            pass
        broker.is_down = False
        async with asyncio.timeout(WAIT_LIMIT_S):
            await _next_inbox(inbox)
        assert inbox.ready


async def test_eighty_slots_open_fast(pubsub_endpoint: str) -> None:
    async with embedded(pubsub_endpoint) as broker:
        started_s = asyncio.get_running_loop().time()
        async with ReplyInbox(
            settings(reply_slots=80), broker.transport, broker.admin, "api-1"
        ) as inbox:
            took_s = asyncio.get_running_loop().time() - started_s
            assert inbox.ready
        assert took_s < 40, (
            "far above what it takes, below one slot after another with a second each"
        )


async def _next_inbox(inbox: ReplyInbox) -> str:
    while True:
        try:
            with inbox.waiter("next", 0) as waiter:
                return waiter.inbox
        except Unavailable:
            await asyncio.sleep(0.02)


async def _held_by(client: redis.asyncio.Redis, instance: bytes) -> None:
    while True:
        if await client.get("penstock:inbox:0") == instance:
            return
        await asyncio.sleep(0.01)
