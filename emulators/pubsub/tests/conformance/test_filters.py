"""Filters through Google's clients."""

from collections.abc import Callable

import pytest
from google.api_core import exceptions
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

from tests.conformance.target import Target
from tests.limits import WAIT_LIMIT_S

Make = Callable[..., str]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('attributes.name = "com"', {"com"}),
        ('attributes.name != "com"', {"net", "absent"}),
        ('hasPrefix(attributes.name, "ne")', {"net"}),
        ("attributes:name", {"com", "net"}),
        ("NOT attributes:name", {"absent"}),
        ('attributes.name = "net" OR -attributes:name', {"net", "absent"}),
    ],
)
def test_filter_keeps(
    target: Target,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
    text: str,
    expected: set[str],
) -> None:
    target.requires("filters")
    topic = make_topic()
    path = make_subscription(topic, filter=text)
    assert subscriber.get_subscription(subscription=path).filter == text
    publisher.publish(topic, b"com", name="com").result(timeout=WAIT_LIMIT_S)
    publisher.publish(topic, b"net", name="net").result(timeout=WAIT_LIMIT_S)
    publisher.publish(topic, b"absent", other="x").result(timeout=WAIT_LIMIT_S)
    pulled = subscriber.pull(
        subscription=path, max_messages=10, timeout=WAIT_LIMIT_S
    ).received_messages
    assert {received.message.data.decode() for received in pulled} == expected


@pytest.mark.parametrize(
    "text",
    [
        "attributes:a and attributes:b",
        "attributes:a AND attributes:b OR attributes:c",
        'contains(attributes.a, "b")',
        "attributes.a = b",
        "attributes:" + "a" * 246,
    ],
)
def test_filter_is_refused(
    target: Target, make_topic: Make, make_subscription: Make, text: str
) -> None:
    target.requires("filters")
    topic = make_topic()
    with pytest.raises(exceptions.InvalidArgument):
        make_subscription(topic, filter=text)
