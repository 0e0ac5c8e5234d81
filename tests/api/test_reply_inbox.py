"""An instance obtains and returns its inbox, with the in-memory broker and the embedded Pub/Sub,
and a real Redis. Guarantees for callers are in test_reply_delivery.py.
"""

import asyncio
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial

import pytest
import redis

from api.dispatch.reply_inbox import PendingReply, ReplyInbox
from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import SubscriptionSettings, make_inbox
from shared.errors import BadInput, ConfigurationError, Unavailable
from shared.stores.redis_client import NO_REDIS
from tests.api.inboxes import Broker, counted, in_memory, next_inbox
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


def waiting_at_slot(
    inbox: ReplyInbox, request_id: str, job_index: int = 0
) -> AbstractContextManager[PendingReply]:
    return inbox.waiter(request_id, job_index, "slots")


async def test_slots_are_exclusive_while_there_are_free_ones() -> None:
    async with in_memory().instance(reply_slots=3) as inbox:
        slot = partial(waiting_at_slot, inbox)
        exclusive, shared = (
            counted("slots_given", kind="exclusive"),
            counted("slots_given", kind="shared"),
        )
        with slot("r1") as a, slot("r2") as b, slot("r2", 1) as b2:
            assert a.slot != b.slot
            assert b2.slot == b.slot, "the parts of one request stand on one slot"
            with slot("r3") as c, slot("r4") as d, slot("r5") as e:
                assert len({a.slot, b.slot, c.slot}) == 3
                assert len({d.slot, e.slot}) == 2, "the least used slot is shared first"
        assert counted("slots_given", kind="exclusive") - exclusive == 3
        assert counted("slots_given", kind="shared") - shared == 2
        with slot("r6") as a, slot("r7") as b, slot("r8") as c:
            assert len({a.slot, b.slot, c.slot}) == 3, "slots come back"


async def test_one_slot_serves_all(broker: Broker) -> None:
    async with broker.instance(reply_slots=1) as inbox:
        with inbox.waiter("r1", 0, "slots") as first, inbox.waiter("r2", 0, "slots") as second:
            await broker.reply_to(second, "r2")
            await broker.reply_to(first, "r1")
            assert (await first.reply(WAIT_LIMIT_S)).request_id == "r1"
            assert (await second.reply(WAIT_LIMIT_S)).request_id == "r2"


async def test_own_inbox_is_removed_at_close(broker: Broker) -> None:
    async with broker.instance() as inbox:
        topic = await next_inbox(inbox)
        names = [f"{topic}.direct", *(f"{topic}.slot.{number}" for number in range(3))]
        assert all([await broker.admin.subscription_exists(name) for name in names])
    assert not any([await broker.admin.subscription_exists(name) for name in names])
    for name in (topic, f"{topic}.direct"):
        with pytest.raises(BadInput, match=r"NOT_FOUND|does not exist"):
            await broker.transport.publish(name, b"late", {})


async def test_pool_gives_each_instance_another_inbox(broker: Broker, redis_url: str) -> None:
    pool = {"inbox_pool": 2, "redis_url": redis_url}
    for number in range(2):
        await make_inbox(broker.admin, str(number), 3)
    async with AsyncExitStack() as stack:
        inboxes = [
            await stack.enter_async_context(broker.instance(f"api-{number}", **pool))
            for number in range(3)
        ]
        topics = [await next_inbox(inbox) for inbox in inboxes]
    assert set(topics[:2]) == {"inbox.0", "inbox.1"}
    assert topics[2].startswith("inbox.api-2-"), "the pool is empty, so the third made its own"
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("penstock:inbox:*") == [], "released at close"


async def test_pool_of_another_region_starts_where_it_is_told(
    broker: Broker, redis_url: str
) -> None:
    await make_inbox(broker.admin, "7", 3)
    async with broker.instance(inbox_pool=1, inbox_first=7, redis_url=redis_url) as inbox:
        assert await next_inbox(inbox) == "inbox.7"
        assert await next_inbox(inbox, "direct") == "inbox.7.direct"


async def test_lease_is_kept_while_redis_forgets(redis_url: str) -> None:
    broker = in_memory()
    await make_inbox(broker.admin, "0", 1)
    pool = {"inbox_pool": 1, "redis_url": redis_url, "inbox_lease_s": 1.5, "reply_slots": 1}
    async with (
        broker.instance("api-1", **pool) as inbox,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        await client.flushall()
        async with asyncio.timeout(WAIT_LIMIT_S):
            await _held_by(client, b"api-1")
        assert inbox.ready


async def test_pool_without_redis_makes_its_own() -> None:
    async with in_memory().instance(inbox_pool=1, redis_url=NO_REDIS) as inbox:
        assert (await next_inbox(inbox)).startswith("inbox.api-1-")


async def test_no_rights_are_said_at_start() -> None:
    class Forbidding(InMemoryBroker):
        async def ensure_topic(self, topic_id: str) -> bool:
            raise ConfigurationError("PERMISSION_DENIED")

    broker = Forbidding()
    with pytest.raises(ConfigurationError):
        await Broker(broker, broker).instance().__aenter__()


async def test_start_goes_on_without_a_broker() -> None:
    class Down(InMemoryBroker):
        is_down = True

        async def ensure_topic(self, topic_id: str) -> bool:
            if self.is_down:
                raise Unavailable
            return await super().ensure_topic(topic_id)

    broker = Down()
    async with Broker(broker, broker).instance() as inbox:
        assert not inbox.ready
        with pytest.raises(Unavailable), inbox.waiter("r1", 0, "direct"):
            pass
        broker.is_down = False
        await next_inbox(inbox)
        assert inbox.ready


async def test_eighty_slots_open_at_once() -> None:
    class Waiting(InMemoryBroker):
        """Answers the first call only when calls for all subscriptions have begun."""

        def __init__(self) -> None:
            super().__init__()
            self.begun, self.all_begun = 0, asyncio.Event()

        async def ensure_subscription(
            self, subscription_id: str, settings: SubscriptionSettings
        ) -> bool:
            self.begun += 1
            if self.begun == 80 + 1:  # one more for direct replies
                self.all_begun.set()
            await self.all_begun.wait()
            return await super().ensure_subscription(subscription_id, settings)

    broker = Waiting()
    async with asyncio.timeout(WAIT_LIMIT_S):
        async with Broker(broker, broker).instance(reply_slots=80) as inbox:
            assert inbox.ready


async def _held_by(client: redis.asyncio.Redis, instance: bytes) -> None:
    while True:
        if await client.get("penstock:inbox:0") == instance:
            return
        await asyncio.sleep(0.01)
