"""Snapshots, seek and push through Google's clients."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

from tests.endpoint import listening_endpoint
from tests.limits import WAIT_LIMIT_S

Make = Callable[..., str]


def pull_all(subscriber: SubscriberClient, subscription: str) -> list[bytes]:
    pulled = subscriber.pull(
        subscription=subscription, max_messages=10, timeout=WAIT_LIMIT_S
    ).received_messages
    subscriber.acknowledge(
        subscription=subscription, ack_ids=[message.ack_id for message in pulled]
    )
    return sorted(received.message.data for received in pulled)


def pull_at_once(subscriber: SubscriberClient, subscription: str) -> list[bytes]:
    request = {"subscription": subscription, "max_messages": 10, "return_immediately": True}
    return [
        received.message.data for received in subscriber.pull(request=request).received_messages
    ]


def test_seek_to_a_snapshot_brings_its_backlog_back(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
    project: str,
) -> None:
    topic = make_topic()
    path = make_subscription(topic, retain_acked_messages=True)
    publisher.publish(topic, b"before").result(timeout=WAIT_LIMIT_S)
    snapshot = subscriber.create_snapshot(name=f"{project}/snapshots/snap", subscription=path)
    assert snapshot.topic == topic
    publisher.publish(topic, b"after").result(timeout=WAIT_LIMIT_S)
    assert pull_all(subscriber, path) == [b"after", b"before"]
    subscriber.seek(request={"subscription": path, "snapshot": snapshot.name})
    assert pull_all(subscriber, path) == [b"after", b"before"]
    assert [
        listed_snapshot.name for listed_snapshot in subscriber.list_snapshots(project=project)
    ] == [snapshot.name]
    subscriber.delete_snapshot(snapshot=snapshot.name)
    assert list(subscriber.list_snapshots(project=project)) == []


def test_seek_back_in_time_brings_acked_messages_back(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic, retain_acked_messages=True)
    publisher.publish(topic, b"a").result(timeout=WAIT_LIMIT_S)
    assert pull_all(subscriber, path) == [b"a"]
    past = datetime.now(UTC) - timedelta(minutes=5)
    subscriber.seek(request={"subscription": path, "time": past})
    assert pull_all(subscriber, path) == [b"a"]


@pytest.mark.filterwarnings("ignore:The return_immediately flag:DeprecationWarning")
def test_seek_into_the_future_purges(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    publisher.publish(topic, b"a").result(timeout=WAIT_LIMIT_S)
    subscriber.seek(
        request={"subscription": path, "time": datetime.now(UTC) + timedelta(minutes=5)}
    )
    assert pull_at_once(subscriber, path) == []


def test_push_reaches_the_endpoint(
    publisher: PublisherClient, make_topic: Make, make_subscription: Make
) -> None:
    with listening_endpoint() as endpoint:
        topic = make_topic()
        path = make_subscription(topic, push_config={"push_endpoint": endpoint.url})
        message_id = publisher.publish(topic, b"hello", model="m").result(timeout=WAIT_LIMIT_S)
        _, headers, body = endpoint.next_post()
        envelope = json.loads(body)
        assert headers["content-type"].startswith("application/json")
        assert envelope["subscription"] == path
        assert base64.b64decode(envelope["message"]["data"]) == b"hello"
        assert envelope["message"]["attributes"] == {"model": "m"}
        assert envelope["message"]["messageId"] == message_id
        assert envelope["message"]["publishTime"] == envelope["message"]["publish_time"]


def test_push_is_repeated_until_it_is_acked(
    publisher: PublisherClient, make_topic: Make, make_subscription: Make
) -> None:
    with listening_endpoint() as endpoint:
        endpoint.answers = [500, 204]
        topic = make_topic()
        make_subscription(topic, push_config={"push_endpoint": endpoint.url})
        publisher.publish(topic, b"hello").result(timeout=WAIT_LIMIT_S)
        first, second = (json.loads(endpoint.next_post()[2]) for _ in range(2))
        assert first["message"]["messageId"] == second["message"]["messageId"]


def test_unwrapped_push_is_the_bare_data(
    publisher: PublisherClient, make_topic: Make, make_subscription: Make
) -> None:
    with listening_endpoint() as endpoint:
        topic = make_topic()
        push_config = {"push_endpoint": endpoint.url, "no_wrapper": {"write_metadata": True}}
        path = make_subscription(topic, push_config=push_config)
        message_id = publisher.publish(topic, b"hello", model="m").result(timeout=WAIT_LIMIT_S)
        _, headers, body = endpoint.next_post()
        assert body == b"hello"
        assert headers["x-goog-pubsub-message-id"] == message_id
        assert headers["x-goog-pubsub-subscription-name"] == path
        assert headers["model"] == "m"
