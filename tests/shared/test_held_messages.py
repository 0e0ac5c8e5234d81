"""A subscription can hold more or fewer messages while open, and its round trip is measured."""

import asyncio

import pytest

from shared.broker.transport import ReceivedMessage, Subscription
from tests.limits import WAIT_LIMIT_S
from tests.shared.receiving import take
from tests.shared.test_brokers import Broker, broker

__all__ = ["broker"]

pytestmark = pytest.mark.anyio

ROUNDS, MESSAGES = 50, 120


async def jobs_of(broker: Broker) -> tuple[str, str]:
    topic = await broker.topic()
    return topic, await broker.subscription(topic)


async def publish(broker: Broker, topic: str, count: int) -> None:
    sent = (broker.transport.publish(topic, b"%d" % number, {}) for number in range(count))
    await asyncio.gather(*sent)


async def test_more_is_held_at_once(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator gives a stream more than it asked for")
    topic, jobs = await jobs_of(broker)
    async with broker.transport.subscribe(jobs, max_messages=4) as subscription:
        await publish(broker, topic, 20)
        first = await take(subscription, 4)
        subscription.hold(16)
        more = await take(subscription, 12)
        # The rest are for other subscriptions: this one is at its maximum.
        async with broker.transport.subscribe(jobs, max_messages=20) as other:
            rest = await take(other, 4)
    data = {message.data for message in (*first, *more, *rest)}
    assert data == {b"%d" % number for number in range(20)}


async def test_fewer_are_held_when_the_first_are_acked(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator gives a stream more than it asked for")
    topic, jobs = await jobs_of(broker)
    async with broker.transport.subscribe(jobs, max_messages=2) as subscription:
        subscription.hold(10)
        await publish(broker, topic, 10)
        for message in await take(subscription, 10):
            subscription.ack(message)
        subscription.hold(2)
        async with broker.transport.subscribe(jobs, max_messages=20) as other:
            # Streams end in the background, so they may still be open during the first rounds.
            for _ in range(ROUNDS):
                await publish(broker, topic, 10)
                mine = await shared_out(10, subscription, other)
                if mine <= 2:
                    break
    assert mine <= 2


async def shared_out(count: int, *subscriptions: Subscription) -> int:
    """Receives `count` messages, acks them once all have arrived, and returns how many came through
    the first subscription.
    """
    held: list[tuple[Subscription, ReceivedMessage]] = []

    async def receive(subscription: Subscription) -> None:
        async for message in subscription:
            held.append((subscription, message))
            if len(held) == count:
                full.set()

    full = asyncio.Event()
    receiving = [asyncio.create_task(receive(one)) for one in subscriptions]
    async with asyncio.timeout(WAIT_LIMIT_S):
        await full.wait()
    for task in receiving:
        task.cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    for subscription, message in held:
        subscription.ack(message)
    return sum(subscription is subscriptions[0] for subscription, _ in held)


async def test_nothing_is_lost_or_double_while_it_changes(broker: Broker) -> None:
    topic, jobs = await jobs_of(broker)
    seen = list[bytes]()
    async with broker.transport.subscribe(jobs, max_messages=2, ack_linger_s=0.01) as subscription:
        publishing = asyncio.create_task(publish(broker, topic, MESSAGES))
        async with asyncio.timeout(WAIT_LIMIT_S):
            async for message in subscription:
                seen.append(message.data)
                subscription.ack(message)
                # Up in steps that need more streams than allowed, and back down.
                subscription.hold(2 + min(len(seen), MESSAGES - len(seen)))
                if len(seen) == MESSAGES:
                    break
        await publishing
    assert sorted(seen) == sorted(b"%d" % number for number in range(MESSAGES))


async def test_round_trips_are_measured(broker: Broker) -> None:
    topic, jobs = await jobs_of(broker)
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        for _ in range(3):  # each ack gets its response before the next is sent
            await publish(broker, topic, 1)
            [message] = await take(subscription, 1)
            subscription.ack(message)
    if broker.kind != "memory":
        for measured in (subscription.round_trip, broker.transport.round_trip):
            assert 0 < measured.mean_s < WAIT_LIMIT_S
