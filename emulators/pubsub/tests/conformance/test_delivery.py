"""Publishing and receiving with Google's handwritten client, as applications do."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError, AcknowledgeStatus
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.pubsub_v1.types import FlowControl

from tests.conformance.target import Target
from tests.limits import WAIT_LIMIT_S

Make = Callable[..., str]
# Deprecated in the client, but the only way to see that a backlog is empty without waiting.
PULL_AT_ONCE = "ignore:The return_immediately flag:DeprecationWarning"


@contextmanager
def subscribed(
    subscriber: SubscriberClient,
    subscription: str,
    callback: Callable[[Message], None],
    **options: Any,
) -> Iterator[None]:
    """Receives messages in the background until the block ends."""
    streaming = subscriber.subscribe(subscription, callback, **options)
    try:
        yield
    finally:
        streaming.cancel()
        streaming.result(timeout=WAIT_LIMIT_S)


def pulled_data(subscriber: SubscriberClient, subscription: str, count: int) -> list[bytes]:
    """Pulls and acks until `count` messages arrive; a pull may return fewer than are waiting."""
    data: list[bytes] = []
    while len(data) < count:
        pulled = subscriber.pull(
            subscription=subscription, max_messages=100, timeout=WAIT_LIMIT_S
        ).received_messages
        data += [received.message.data for received in pulled]
        if pulled:
            subscriber.acknowledge(
                subscription=subscription, ack_ids=[message.ack_id for message in pulled]
            )
    return data


def pull_at_once(subscriber: SubscriberClient, subscription: str) -> list[bytes]:
    request = {"subscription": subscription, "max_messages": 10, "return_immediately": True}
    return [
        received.message.data for received in subscriber.pull(request=request).received_messages
    ]


def test_hundred_messages_reach_the_callback_once_each(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    received: queue.Queue[Message] = queue.Queue()

    def callback(message: Message) -> None:
        message.ack()
        received.put(message)

    with subscribed(subscriber, path, callback):
        ids = [publisher.publish(topic, str(number).encode(), kind="test") for number in range(100)]
        messages = [received.get(timeout=WAIT_LIMIT_S) for _ in range(100)]
        assert {message.message_id for message in messages} == {
            future.result(timeout=WAIT_LIMIT_S) for future in ids
        }
        assert {message.attributes["kind"] for message in messages} == {"test"}
        assert received.empty()


def test_nacked_message_comes_again(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    received: queue.Queue[str] = queue.Queue()

    def callback(message: Message) -> None:
        received.put(message.message_id)
        if received.qsize() < 2:
            message.nack()
        else:
            message.ack()

    with subscribed(subscriber, path, callback):
        publisher.publish(topic, b"again")
        first, second = (received.get(timeout=WAIT_LIMIT_S) for _ in range(2))
        assert first == second


def test_flow_control_holds_the_second_message_back(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    received: queue.Queue[Message] = queue.Queue()
    for future in [publisher.publish(topic, data) for data in (b"1", b"2")]:
        future.result(timeout=WAIT_LIMIT_S)
    with subscribed(subscriber, path, received.put, flow_control=FlowControl(max_messages=1)):
        first = received.get(timeout=WAIT_LIMIT_S)
        with pytest.raises(queue.Empty):
            received.get(timeout=0.3)
        first.ack()
        second = received.get(timeout=WAIT_LIMIT_S)
        assert {first.data, second.data} == {b"1", b"2"}
        second.ack()


def test_stream_of_a_deleted_subscription_ends_with_not_found(
    subscriber: SubscriberClient, make_topic: Make, make_subscription: Make
) -> None:
    path = make_subscription(make_topic())
    streaming = subscriber.subscribe(path, lambda message: message.ack())
    with pytest.raises(FutureTimeoutError):
        streaming.result(timeout=0.3)
    subscriber.delete_subscription(subscription=path)
    with pytest.raises(exceptions.NotFound):
        streaming.result(timeout=WAIT_LIMIT_S)


@pytest.mark.filterwarnings(PULL_AT_ONCE)
def test_pull_ack_and_lease_end(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    publisher.publish(topic, b"a").result(timeout=WAIT_LIMIT_S)
    (first,) = subscriber.pull(subscription=path, max_messages=10).received_messages
    subscriber.modify_ack_deadline(
        subscription=path, ack_ids=[first.ack_id], ack_deadline_seconds=1
    )
    (second,) = subscriber.pull(
        subscription=path, max_messages=10, timeout=WAIT_LIMIT_S
    ).received_messages
    assert second.message.message_id == first.message.message_id
    assert second.ack_id != first.ack_id
    subscriber.acknowledge(subscription=path, ack_ids=[second.ack_id])
    assert pull_at_once(subscriber, path) == []


def test_ack_of_an_expired_id_is_no_error(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    publisher.publish(topic, b"a").result(timeout=WAIT_LIMIT_S)
    (first,) = subscriber.pull(subscription=path, max_messages=10).received_messages
    subscriber.modify_ack_deadline(
        subscription=path, ack_ids=[first.ack_id], ack_deadline_seconds=0
    )
    subscriber.pull(subscription=path, max_messages=10, timeout=WAIT_LIMIT_S)
    subscriber.acknowledge(subscription=path, ack_ids=[first.ack_id])


def test_every_subscription_gets_every_message(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    paths = [make_subscription(topic, f"sub-{number}") for number in range(3)]
    for future in [publisher.publish(topic, data) for data in (b"1", b"2")]:
        future.result(timeout=WAIT_LIMIT_S)
    for path in paths:
        assert sorted(pulled_data(subscriber, path, 2)) == [b"1", b"2"]


@pytest.mark.filterwarnings(PULL_AT_ONCE)
def test_failing_message_is_dead_lettered_with_its_attempts(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic, dead = make_topic(), make_topic("dead")
    policy = {"dead_letter_topic": dead, "max_delivery_attempts": 5}
    path = make_subscription(topic, dead_letter_policy=policy)
    morgue = make_subscription(dead, "morgue")
    publisher.publish(topic, b"poison", model="m").result(timeout=WAIT_LIMIT_S)
    attempts = []
    for _ in range(5):
        (pulled,) = subscriber.pull(
            subscription=path, max_messages=1, timeout=WAIT_LIMIT_S
        ).received_messages
        attempts.append(pulled.delivery_attempt)
        subscriber.modify_ack_deadline(
            subscription=path, ack_ids=[pulled.ack_id], ack_deadline_seconds=0
        )
    assert attempts == [1, 2, 3, 4, 5]
    # The emulator forwards a message on its sixth delivery, so another pull is needed.
    assert pull_at_once(subscriber, path) == []
    letters: queue.Queue[Message] = queue.Queue()
    with subscribed(subscriber, morgue, letters.put):
        letter = letters.get(timeout=WAIT_LIMIT_S)
        letter.ack()
    assert letter.data == b"poison"
    assert letter.attributes["model"] == "m"
    assert letter.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert letter.attributes["CloudPubSubDeadLetterSourceSubscription"] == "workers"


def test_ordering_key_keeps_the_order(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic, enable_message_ordering=True)
    received: queue.Queue[bytes] = queue.Queue()

    def callback(message: Message) -> None:
        received.put(message.data)
        message.ack()

    with subscribed(subscriber, path, callback):
        for number in range(20):
            publisher.publish(topic, str(number).encode(), ordering_key="k")
        data = [received.get(timeout=WAIT_LIMIT_S) for _ in range(20)]
        assert data == [str(number).encode() for number in range(20)]


def test_exactly_once_acks_are_confirmed(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic, enable_exactly_once_delivery=True)
    received: queue.Queue[Message] = queue.Queue()
    with subscribed(subscriber, path, received.put):
        publisher.publish(topic, b"once")
        message = received.get(timeout=WAIT_LIMIT_S)
        assert message.ack_with_response().result(timeout=WAIT_LIMIT_S) is AcknowledgeStatus.SUCCESS
        with pytest.raises(AcknowledgeError) as refusal:
            message.modify_ack_deadline_with_response(30).result(timeout=WAIT_LIMIT_S)
        assert refusal.value.error_code is AcknowledgeStatus.INVALID_ACK_ID


def test_exactly_once_refuses_an_older_id_with_its_reason(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic, enable_exactly_once_delivery=True)
    publisher.publish(topic, b"once").result(timeout=WAIT_LIMIT_S)
    (first,) = subscriber.pull(subscription=path, max_messages=1).received_messages
    subscriber.modify_ack_deadline(
        subscription=path, ack_ids=[first.ack_id], ack_deadline_seconds=0
    )
    (second,) = subscriber.pull(
        subscription=path, max_messages=1, timeout=WAIT_LIMIT_S
    ).received_messages
    with pytest.raises(exceptions.InvalidArgument) as refusal:
        subscriber.acknowledge(subscription=path, ack_ids=[first.ack_id])
    assert refusal.value.reason == "EXACTLY_ONCE_ACKID_FAILURE"
    assert refusal.value.metadata == {first.ack_id: "PERMANENT_FAILURE_INVALID_ACK_ID"}
    subscriber.acknowledge(subscription=path, ack_ids=[second.ack_id])


@pytest.mark.filterwarnings(PULL_AT_ONCE)
def test_retry_policy_delays_the_redelivery(
    target: Target,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    target.requires("retry policy")
    topic = make_topic()
    backoff = {"seconds": 600}
    path = make_subscription(
        topic, retry_policy={"minimum_backoff": backoff, "maximum_backoff": backoff}
    )
    publisher.publish(topic, b"a").result(timeout=WAIT_LIMIT_S)
    (first,) = subscriber.pull(subscription=path, max_messages=1).received_messages
    subscriber.modify_ack_deadline(
        subscription=path, ack_ids=[first.ack_id], ack_deadline_seconds=0
    )
    assert pull_at_once(subscriber, path) == []
