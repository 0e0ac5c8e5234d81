"""Features that only the in-memory broker has: lost leases, outages, unsupported calls.

Behavior shared by all brokers is covered in tests/shared/test_brokers.py.
"""

import asyncio

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import ReceivedMessage, Subscription, SubscriptionSettings
from shared.errors import BadInput, Unavailable
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


async def broker_with(**settings: object) -> InMemoryBroker:
    broker = InMemoryBroker()
    await broker.ensure_topic("dead")
    await broker.ensure_topic("jobs")
    await broker.ensure_subscription("keep", SubscriptionSettings("dead"))
    await broker.ensure_subscription("jobs", SubscriptionSettings("jobs", **settings))  # type: ignore[arg-type]
    return broker


async def take(subscription: Subscription, count: int) -> list[ReceivedMessage]:
    messages = aiter(subscription)
    async with asyncio.timeout(WAIT_LIMIT_S):
        return [await anext(messages) for _ in range(count)]


async def test_message_whose_lease_ran_out_comes_again_elsewhere() -> None:
    broker = await broker_with()
    await broker.publish("jobs", b"1", {})
    async with broker.subscribe("jobs", max_messages=1) as stuck:
        [message] = await take(stuck, 1)
        async with broker.subscribe("jobs", max_messages=1) as other:
            await stuck.stop()
            broker.expire_leases("jobs")  # ends only the leases of open subscribers
            assert not message.lost
            stuck.nack(message)
            [again] = await take(other, 1)
    assert (again.message_id, again.ack_id == message.ack_id) == (message.message_id, False)


async def test_holder_hears_that_it_lost_its_lease_and_its_ack_is_worth_nothing() -> None:
    broker = await broker_with()
    await broker.publish("jobs", b"1", {})
    async with broker.subscribe("jobs", max_messages=1) as subscription:
        [message] = await take(subscription, 1)
        broker.expire_leases("jobs")
        assert (message.lost, subscription.lost) == (True, 1)
        subscription.ack(message)
        subscription.nack(message)
        [again] = await take(subscription, 1)
        assert not again.lost
        subscription.ack(again)
        assert broker.backlog("jobs") == 0


async def test_what_was_not_read_yet_is_read_once_after_its_lease_ran_out() -> None:
    broker = await broker_with()
    for data in (b"1", b"2"):
        await broker.publish("jobs", data, {})
    async with broker.subscribe("jobs", max_messages=2) as subscription:
        broker.expire_leases("jobs")
        assert [message.data for message in await take(subscription, 2)] == [b"1", b"2"]
        assert subscription.lost == 2


async def test_lost_leases_count_as_attempts() -> None:
    broker = await broker_with(dead_letter_topic_id="dead")
    await broker.publish("jobs", b"poison", {})
    async with broker.subscribe("jobs", max_messages=1) as subscription:
        for attempt in range(1, 6):
            [message] = await take(subscription, 1)
            assert message.delivery_attempt == attempt
            broker.expire_leases("jobs")
    async with broker.subscribe("keep", max_messages=1) as letters:
        assert [letter.data for letter in await take(letters, 1)] == [b"poison"]
    assert broker.backlog("jobs") == 0


async def test_outage_refuses_each_publish_until_it_is_over() -> None:
    broker = await broker_with()
    broker.outage = Unavailable("the broker is away")
    with pytest.raises(Unavailable, match="away"):
        await broker.publish("jobs", b"1", {})
    assert (broker.published, broker.backlog("jobs")) == (0, 0)
    broker.outage = None
    await broker.publish("jobs", b"1", {})
    assert (broker.published, broker.backlog("jobs")) == (1, 1)


async def test_bytes_bound_what_a_subscriber_holds() -> None:
    broker = await broker_with()
    for _ in range(3):
        await broker.publish("jobs", bytes(10), {})
    async with broker.subscribe("jobs", max_messages=9, max_bytes=15) as subscription:
        assert broker.backlog("jobs") == 1
        [first, _] = await take(subscription, 2)
        subscription.ack(first)
        assert broker.backlog("jobs") == 0


async def test_order_of_keys_is_kept_beside_other_keys() -> None:
    """A key that is waiting for its holder does not hold up other keys."""
    broker = await broker_with(is_ordered=True)
    async with broker.subscribe("jobs", max_messages=1) as first:
        await broker.publish("jobs", b"a1", {}, ordering_key="a")
        await broker.publish("jobs", b"a2", {}, ordering_key="a")
        await broker.publish("jobs", b"b1", {}, ordering_key="b")
        async with broker.subscribe("jobs", max_messages=9) as second:
            [held] = await take(first, 1)
            assert [message.data for message in await take(second, 1)] == [b"b1"]
            assert broker.backlog("jobs") == 1
            first.ack(held)
            # It is now free and goes to the next subscriber in turn.
            assert broker.backlog("jobs") == 0


async def test_push_is_refused() -> None:
    broker = await broker_with()
    settings = SubscriptionSettings("jobs", push_endpoint="http://127.0.0.1/")
    with pytest.raises(BadInput, match="push"):
        await broker.ensure_subscription("pushed", settings)


async def test_subscriber_of_a_deleted_subscription_hears_of_it() -> None:
    broker = await broker_with()
    async with broker.subscribe("jobs", max_messages=1) as subscription:
        assert await broker.delete_subscription("jobs")
        with pytest.raises(Unavailable):
            await take(subscription, 1)
        assert not subscription.is_connected
