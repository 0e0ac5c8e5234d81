"""The transport's contract: the same tests on the in-memory broker, the embedded Pub/Sub, RabbitMQ
and Google's emulator.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from uuid import uuid4

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.transport import (
    BATCH_FILTER,
    INTERACTIVE_FILTER,
    Admin,
    ReceivedMessage,
    Subscription,
    SubscriptionSettings,
    Transport,
    slot_filter,
)
from shared.errors import BadInput, ConfigurationError, InputTooLarge, Unavailable
from tests.limits import WAIT_LIMIT_S
from tests.shared.receiving import take

pytestmark = pytest.mark.anyio


@dataclass
class Broker:
    kind: str
    transport: Transport
    admin: Admin
    ids: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    async def topic(self) -> str:
        topic_id = f"topic.{next(self.ids)}"
        await self.admin.ensure_topic(topic_id)
        return topic_id

    async def subscription(self, topic_id: str, **settings: object) -> str:
        subscription_id = f"subscription.{next(self.ids)}"
        wanted = SubscriptionSettings(topic_id, **settings)  # type: ignore[arg-type]
        await self.admin.ensure_subscription(subscription_id, wanted)
        return subscription_id


@pytest.fixture(
    params=[
        "memory",
        "embedded",
        pytest.param("rabbitmq", marks=pytest.mark.slow),
        pytest.param("google", marks=[pytest.mark.slow, pytest.mark.google_emulator]),
    ]
)
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "memory":
        memory = InMemoryBroker()
        yield Broker("memory", memory, memory)
        return
    project = f"contract-{uuid4().hex[:8]}"
    if request.param == "rabbitmq":
        url = request.getfixturevalue("rabbitmq_server").url
        async with RabbitTransport(project, url) as rabbit, RabbitAdmin(project, url) as makes:
            yield Broker("rabbitmq", rabbit, makes)
        return
    fixture = "pubsub_endpoint" if request.param == "embedded" else "google_emulator"
    endpoint = request.getfixturevalue(fixture)
    async with (
        PubSubTransport(project, endpoint) as transport,
        PubSubAdmin(project, endpoint) as admin,
    ):
        yield Broker(request.param, transport, admin)


async def test_message_arrives_as_it_was_sent(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        assert subscription.is_connected
        message_id = await broker.transport.publish(
            topic, b"\x00data\xff", {"model": "m", "é": "ü"}
        )
        [message] = await take(subscription, 1)
        subscription.ack(message)
    assert (message.data, message.attributes) == (b"\x00data\xff", {"model": "m", "é": "ü"})
    assert message.message_id == message_id
    assert message.publish_time_s > 1_700_000_000


async def test_message_waits_for_its_subscriber(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    await broker.transport.publish(topic, b"1", {})
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        assert [message.data for message in await take(subscription, 1)] == [b"1"]


async def test_acked_messages_do_not_come_again(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    async with broker.transport.subscribe(jobs, max_messages=100, ack_linger_s=0.5) as subscription:
        await asyncio.gather(
            *(broker.transport.publish(topic, b"%d" % number, {}) for number in range(50))
        )
        for message in await take(subscription, 50):
            subscription.ack(message)
            subscription.ack(message)
    await broker.transport.publish(topic, b"last", {})
    async with broker.transport.subscribe(jobs, max_messages=100) as subscription:
        assert [message.data for message in await take(subscription, 1)] == [b"last"]


async def test_nacked_message_comes_again(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        await broker.transport.publish(topic, b"1", {})
        [first] = await take(subscription, 1)
        subscription.nack(first)
        [again] = await take(subscription, 1)
        subscription.ack(again)
    assert (again.message_id, again.data) == (first.message_id, b"1")
    assert again.ack_id != first.ack_id


async def test_closing_hands_back_what_is_in_hand(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    for number in range(3):
        await broker.transport.publish(topic, b"%d" % number, {})
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        await take(subscription, 1)
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        assert {message.data for message in await take(subscription, 3)} == {b"0", b"1", b"2"}


async def test_stop_ends_the_iteration_and_acks_still_count(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    for number in range(3):
        await broker.transport.publish(topic, b"%d" % number, {})
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        [message] = await take(subscription, 1)
        await subscription.stop()
        assert [left async for left in subscription] == []
        assert not subscription.is_connected
        async with broker.transport.subscribe(jobs, max_messages=10) as other:
            rest = await take(other, 2)
            for one in rest:
                other.ack(one)
        subscription.ack(message)
    assert {message.data, *(one.data for one in rest)} == {b"0", b"1", b"2"}
    await broker.transport.publish(topic, b"last", {})
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        assert [message.data for message in await take(subscription, 1)] == [b"last"]


async def test_flow_control_leaves_the_rest_to_others(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator gives a stream more than it asked for")
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(broker.transport.subscribe(jobs, max_messages=2))
            for _ in range(2)
        ]
        for number in range(4):
            await broker.transport.publish(topic, b"%d" % number, {})
        held = [await take(subscription, 2) for subscription in opened]
        await broker.transport.publish(topic, b"next", {})
        opened[1].ack(held[1][0])
        assert [message.data for message in await take(opened[1], 1)] == [b"next"]
    assert {message.data for messages in held for message in messages} == {b"0", b"1", b"2", b"3"}


async def test_order_of_a_key_is_kept(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic, is_ordered=True)
    async with broker.transport.subscribe(jobs, max_messages=100) as subscription:
        await asyncio.gather(
            *(
                broker.transport.publish(topic, b"%d" % number, {}, ordering_key="key")
                for number in range(30)
            )
        )
        seen = []
        for _ in range(30):
            [message] = await take(subscription, 1)
            subscription.ack(message)
            seen.append(int(message.data))
    assert seen == list(range(30))
    assert message.ordering_key == "key"


async def test_slot_filter_lets_its_own_through(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator has no filters before gcloud 555")
    topic = await broker.topic()
    slots = [await broker.subscription(topic, filter=slot_filter(slot, 2)) for slot in range(2)]
    for slot in ("1", "0", "1"):
        await broker.transport.publish(topic, slot.encode(), {"slot": slot})
    await broker.transport.publish(topic, b"no slot", {})
    async with (
        broker.transport.subscribe(slots[0], max_messages=9) as first,
        broker.transport.subscribe(slots[1], max_messages=9) as second,
    ):
        assert [message.data for message in await take(second, 2)] == [b"1", b"1"]
        assert [message.data for message in await take(first, 1)] == [b"0"]


async def test_priorities_share_what_is_published(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator has no filters before gcloud 555")
    topic = await broker.topic()
    filters = (INTERACTIVE_FILTER, BATCH_FILTER)
    priorities = [await broker.subscription(topic, filter=one) for one in filters]
    for data, attributes in ((b"1", {}), (b"2", {"lane": "batch"}), (b"3", {"lane": "other"})):
        await broker.transport.publish(topic, data, attributes)
    async with (
        broker.transport.subscribe(priorities[0], max_messages=9) as interactive,
        broker.transport.subscribe(priorities[1], max_messages=9) as batch,
    ):
        assert {message.data for message in await take(interactive, 2)} == {b"1", b"3"}
        assert [message.data for message in await take(batch, 1)] == [b"2"]


@pytest.mark.parametrize("text", ["attributes.lane = batch", "lane = 1", "attributes"])
async def test_filter_that_cannot_be_read_is_refused(broker: Broker, text: str) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator has no filters before gcloud 555")
    topic = await broker.topic()
    with pytest.raises(BadInput):
        await broker.subscription(topic, filter=text)


async def test_each_subscription_gets_every_message(broker: Broker) -> None:
    topic = await broker.topic()
    names = [await broker.subscription(topic) for _ in range(2)]
    ids = {await broker.transport.publish(topic, b"%d" % number, {}) for number in range(3)}
    for name in names:
        async with broker.transport.subscribe(name, max_messages=9) as subscription:
            messages = await take(subscription, 3)
            for message in messages:
                subscription.ack(message)
        assert {message.message_id for message in messages} == ids


async def test_message_that_comes_again_comes_before_those_of_its_key(broker: Broker) -> None:
    if broker.kind in ("rabbitmq", "google"):
        pytest.skip("this broker keeps no order over redeliveries, and Penstock needs none")
    topic = await broker.topic()
    jobs = await broker.subscription(topic, is_ordered=True)
    for number in range(3):
        await broker.transport.publish(topic, b"%d" % number, {}, ordering_key="key")
    async with broker.transport.subscribe(jobs, max_messages=9) as subscription:
        first = await take(subscription, 2)
        subscription.nack(first[0])
        seen = [b""]
        while seen[-3:] != [b"0", b"1", b"2"]:  # messages in flight may arrive first
            [message] = await take(subscription, 1)
            seen.append(message.data)
    assert [message.data for message in first] == [b"0", b"1"]
    assert len(seen) <= 5


async def test_messages_of_a_key_stay_with_one_subscriber(broker: Broker) -> None:
    if broker.kind == "rabbitmq":
        pytest.skip("RabbitMQ has no ordering keys")
    topic = await broker.topic()
    jobs = await broker.subscription(topic, is_ordered=True)
    arrived: asyncio.Queue[tuple[int, ReceivedMessage]] = asyncio.Queue()

    async def receive(number: int, subscription: Subscription) -> None:
        async for message in subscription:
            arrived.put_nowait((number, message))

    async with (
        broker.transport.subscribe(jobs, max_messages=9) as first,
        broker.transport.subscribe(jobs, max_messages=9) as second,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(receive(*one)) for one in enumerate((first, second))]
        for number in range(6):
            await broker.transport.publish(topic, b"%d" % number, {}, ordering_key="key")
        async with asyncio.timeout(WAIT_LIMIT_S):
            got = [await arrived.get() for _ in range(6)]
        for task in tasks:
            task.cancel()
    assert len({number for number, _ in got}) == 1
    assert [message.data for _, message in got] == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_message_is_dead_lettered_after_its_attempts(broker: Broker) -> None:
    topic, dead = await broker.topic(), await broker.topic()
    keep = await broker.subscription(dead)
    jobs = await broker.subscription(topic, dead_letter_topic_id=dead, max_delivery_attempts=5)
    await broker.transport.publish(topic, b"poison", {"request_id": "r1"})
    attempts = []
    async with broker.transport.subscribe(jobs, max_messages=1) as subscription:
        for _ in range(5):
            [message] = await take(subscription, 1)
            attempts.append(message.delivery_attempt)
            subscription.nack(message)
        async with broker.transport.subscribe(keep, max_messages=1) as kept:
            [letter] = await take(kept, 1)
    assert attempts == [1, 2, 3, 4, 5]
    assert (letter.data, letter.attributes["request_id"]) == (b"poison", "r1")


async def test_unknown_topic_refuses(broker: Broker) -> None:
    with pytest.raises(BadInput):
        await broker.transport.publish("nowhere", b"1", {})


async def test_empty_message_alone_is_refused(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator takes empty messages")
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    sent = [
        broker.transport.publish(topic, data, {})
        for data in (b"1", b"2", b"3", b"4", b"5", b"", b"6")
    ]
    outcomes = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str] * 5 + [BadInput, str]
    async with broker.transport.subscribe(jobs, max_messages=10) as subscription:
        assert {message.data for message in await take(subscription, 6)} == {
            b"1",
            b"2",
            b"3",
            b"4",
            b"5",
            b"6",
        }


@pytest.mark.parametrize(
    "attributes", [{"a": "\u2588" * 342}, {"a" * 257: "x"}], ids=["value", "name"]
)
async def test_attribute_too_long_is_refused(broker: Broker, attributes: dict[str, str]) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator takes attributes of any length")
    topic = await broker.topic()
    with pytest.raises(BadInput):
        await broker.transport.publish(topic, b"1", attributes)
    # The in-memory broker accepts only input that both other brokers accept.
    longest = 256 if broker.kind == "embedded" else 128
    assert await broker.transport.publish(topic, b"1", {"a" * longest: "\u2588" * 341})


async def test_message_too_large_is_refused(broker: Broker) -> None:
    with pytest.raises(InputTooLarge):
        await broker.transport.publish(await broker.topic(), bytes(10_000_001), {})


async def test_large_messages_share_no_request(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    async with broker.transport.subscribe(jobs, max_messages=20) as subscription:
        await asyncio.gather(
            *(broker.transport.publish(topic, bytes(2_000_000), {"n": str(n)}) for n in range(12))
        )
        messages = await take(subscription, 12)
        for message in messages:
            subscription.ack(message)
    assert {message.attributes["n"] for message in messages} == {str(n) for n in range(12)}
    assert all(len(message.data) == 2_000_000 for message in messages)


async def test_subscription_that_is_not_there_ends_the_iteration(broker: Broker) -> None:
    async with broker.transport.subscribe("nowhere", max_messages=1) as subscription:
        with pytest.raises(Unavailable):
            await take(subscription, 1)
        assert not subscription.is_connected


@pytest.mark.parametrize("name", ["googlish", "CC", "x-death", ""])
async def test_attribute_that_a_broker_reads_itself_is_refused(broker: Broker, name: str) -> None:
    reserved = {"embedded": ("googlish", ""), "rabbitmq": ("CC", "x-death", "")}
    if name not in reserved.get(broker.kind, ("googlish", "CC", "x-death", "")):
        pytest.skip("this broker takes it")
    if broker.kind == "google":
        pytest.skip("this emulator takes any name")
    topic = await broker.topic()
    with pytest.raises(BadInput):
        await broker.transport.publish(topic, b"1", {name: "elsewhere"})


async def test_too_many_attributes_are_refused(broker: Broker) -> None:
    if broker.kind == "google":
        pytest.skip("this emulator takes as many as there are")
    topic = await broker.topic()
    attributes = {f"name {number}": "" for number in range(101)}
    with pytest.raises(BadInput):
        await broker.transport.publish(topic, b"1", attributes)
    attributes.popitem()
    assert await broker.transport.publish(topic, b"1", attributes)


@pytest.mark.parametrize(
    "settings",
    [
        {"ack_deadline_s": 9},
        {"ack_deadline_s": 601},
        {"retention_s": 599},
        {"expires_after_s": 60},
        {"filter": 'attributes.slot = "1', "is_ordered": True},
        {"dead_letter_topic_id": "topic.0", "max_delivery_attempts": 4},
        {"dead_letter_topic_id": "nowhere"},
    ],
    ids=str,
)
async def test_settings_out_of_bounds_are_refused(
    broker: Broker, settings: dict[str, object]
) -> None:
    if broker.kind not in ("memory", "embedded"):
        pytest.skip("this broker does not check them")
    topic = await broker.topic()
    with pytest.raises(BadInput):
        await broker.subscription(topic, **settings)


@pytest.mark.parametrize("name", ["ab", "1st", "a topic", "google.jobs", "a" * 256])
async def test_name_that_pubsub_does_not_take_is_refused(broker: Broker, name: str) -> None:
    if broker.kind not in ("memory", "embedded"):
        pytest.skip("this broker does not check them")
    topic = await broker.topic()
    with pytest.raises(BadInput):
        await broker.admin.ensure_topic(name)
    with pytest.raises(BadInput):
        await broker.admin.ensure_subscription(name, SubscriptionSettings(topic))


async def test_topic_and_filter_of_a_subscription_cannot_change(broker: Broker) -> None:
    if broker.kind in ("rabbitmq", "google"):
        pytest.skip("this broker does not say what it has, or has no filters")
    topic = await broker.topic()
    jobs = await broker.subscription(topic, filter=BATCH_FILTER)
    for other in (SubscriptionSettings(topic), SubscriptionSettings(await broker.topic())):
        with pytest.raises(ConfigurationError):
            await broker.admin.ensure_subscription(jobs, other)


async def test_subscription_outlives_its_topic(broker: Broker) -> None:
    topic = await broker.topic()
    jobs = await broker.subscription(topic)
    await broker.transport.publish(topic, b"1", {})
    assert await broker.admin.delete_topic(topic)
    async with broker.transport.subscribe(jobs, max_messages=1) as subscription:
        [message] = await take(subscription, 1)
        subscription.ack(message)
    assert message.data == b"1"


async def test_missing_subscriptions_are_named_in_their_order(broker: Broker) -> None:
    jobs = await broker.subscription(await broker.topic())
    assert await broker.admin.missing_subscriptions(["zzz", jobs, "aaa"]) == ["zzz", "aaa"]


async def test_topics_and_subscriptions_are_made_once(broker: Broker) -> None:
    assert await broker.admin.ensure_topic("once")
    assert not await broker.admin.ensure_topic("once")
    assert await broker.admin.ensure_subscription("once.all", SubscriptionSettings("once"))
    assert not await broker.admin.ensure_subscription("once.all", SubscriptionSettings("once"))
    assert await broker.admin.subscription_exists("once.all")
    assert await broker.admin.delete_subscription("once.all")
    assert not await broker.admin.delete_subscription("once.all")
    assert not await broker.admin.subscription_exists("once.all")
    assert await broker.admin.delete_topic("once")
    assert not await broker.admin.delete_topic("once")
    with pytest.raises(BadInput):
        await broker.admin.ensure_subscription("once.all", SubscriptionSettings("once"))
