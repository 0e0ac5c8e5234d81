"""Topics, subscriptions and snapshots as resources, through Google's clients."""

from collections.abc import Callable

import pytest
from google.api_core import exceptions
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from google.pubsub_v1 import PublisherClient as GapicPublisherClient

from tests.conformance.target import Target
from tests.limits import WAIT_LIMIT_S

Make = Callable[..., str]


def test_topic_is_made_shown_listed_and_deleted(
    publisher: PublisherClient, make_topic: Make, project: str
) -> None:
    path = make_topic(labels={"env": "test"})
    assert publisher.get_topic(topic=path).labels == {"env": "test"}
    assert [topic.name for topic in publisher.list_topics(project=project)] == [path]
    publisher.delete_topic(topic=path)
    assert list(publisher.list_topics(project=project)) == []
    with pytest.raises(exceptions.NotFound):
        publisher.get_topic(topic=path)


def test_names_taken_are_refused(make_topic: Make, make_subscription: Make) -> None:
    topic = make_topic()
    make_subscription(topic)
    with pytest.raises(exceptions.AlreadyExists):
        make_topic()
    with pytest.raises(exceptions.AlreadyExists):
        make_subscription(topic)


@pytest.mark.parametrize("topic_id", ["ab", "1abc", "googtopic", "sp ace"])
def test_invalid_names_are_refused(make_topic: Make, topic_id: str) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        make_topic(topic_id)


def test_missing_resources_are_not_found(
    publisher: PublisherClient, subscriber: SubscriberClient, project: str
) -> None:
    with pytest.raises(exceptions.NotFound):
        publisher.delete_topic(topic=f"{project}/topics/missing")
    with pytest.raises(exceptions.NotFound):
        publisher.publish(f"{project}/topics/missing", b"x").result(timeout=WAIT_LIMIT_S)
    with pytest.raises(exceptions.NotFound):
        subscriber.get_subscription(subscription=f"{project}/subscriptions/missing")
    with pytest.raises(exceptions.NotFound):
        subscriber.pull(subscription=f"{project}/subscriptions/missing", max_messages=1)
    with pytest.raises(exceptions.NotFound):
        subscriber.delete_subscription(subscription=f"{project}/subscriptions/missing")


def test_subscription_needs_a_topic(make_subscription: Make, project: str) -> None:
    with pytest.raises(exceptions.NotFound):
        make_subscription(f"{project}/topics/missing")


def test_subscription_shows_the_defaults(
    subscriber: SubscriberClient, make_topic: Make, make_subscription: Make
) -> None:
    topic = make_topic()
    subscription = subscriber.get_subscription(subscription=make_subscription(topic))
    assert subscription.topic == topic
    assert subscription.ack_deadline_seconds == 10
    assert subscription.message_retention_duration.days == 7
    assert not subscription.enable_message_ordering
    assert subscription.filter == ""


def test_ack_deadline_out_of_range_is_refused(
    target: Target, make_topic: Make, make_subscription: Make
) -> None:
    target.requires("range of the ack deadline")
    topic = make_topic()
    for deadline_s in (9, 601):
        with pytest.raises(exceptions.InvalidArgument):
            make_subscription(topic, ack_deadline_seconds=deadline_s)


def test_dead_letter_attempts_out_of_range_are_refused(
    target: Target, make_topic: Make, make_subscription: Make
) -> None:
    target.requires("INVALID_ARGUMENT for delivery attempts")
    topic = make_topic()
    for attempts in (4, 101):
        policy = {"dead_letter_topic": topic, "max_delivery_attempts": attempts}
        with pytest.raises(exceptions.InvalidArgument):
            make_subscription(topic, dead_letter_policy=policy)


def test_subscription_is_updated_by_mask(
    subscriber: SubscriberClient, make_topic: Make, make_subscription: Make
) -> None:
    path = make_subscription(make_topic(), ack_deadline_seconds=20)
    update = {"name": path, "ack_deadline_seconds": 60, "labels": {"env": "test"}}
    request = {"subscription": update, "update_mask": {"paths": ["ack_deadline_seconds"]}}
    subscriber.update_subscription(request=request)
    subscription = subscriber.get_subscription(subscription=path)
    assert subscription.ack_deadline_seconds == 60
    assert subscription.labels == {}


def test_update_of_the_filter_is_refused(
    subscriber: SubscriberClient, make_topic: Make, make_subscription: Make
) -> None:
    path = make_subscription(make_topic(), filter='attributes.a = "b"')
    update = {"name": path, "filter": 'attributes.a = "b"'}
    with pytest.raises(exceptions.InvalidArgument):
        subscriber.update_subscription(
            request={"subscription": update, "update_mask": {"paths": ["filter"]}}
        )


def test_topic_is_updated(target: Target, publisher: PublisherClient, make_topic: Make) -> None:
    target.requires("UpdateTopic")
    path = make_topic()
    update = {"name": path, "labels": {"env": "test"}}
    publisher.update_topic(request={"topic": update, "update_mask": {"paths": ["labels"]}})
    assert publisher.get_topic(topic=path).labels == {"env": "test"}


def test_expiration_below_a_day_is_refused(
    target: Target, make_topic: Make, make_subscription: Make
) -> None:
    target.requires("expiration policy")
    topic = make_topic()
    with pytest.raises(exceptions.InvalidArgument):
        make_subscription(topic, expiration_policy={"ttl": {"seconds": 86399}})


def test_retention_out_of_range_is_refused(make_topic: Make, make_subscription: Make) -> None:
    topic = make_topic()
    for duration_s in (599, 31 * 86400 + 1):
        with pytest.raises(exceptions.InvalidArgument):
            make_subscription(topic, message_retention_duration={"seconds": duration_s})


def test_deleted_topic_is_shown_as_such_and_its_backlog_stays(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic()
    path = make_subscription(topic)
    publisher.publish(topic, b"kept").result(timeout=WAIT_LIMIT_S)
    publisher.delete_topic(topic=topic)
    assert subscriber.get_subscription(subscription=path).topic == "_deleted-topic_"
    pulled = subscriber.pull(subscription=path, max_messages=10).received_messages
    assert [received.message.data for received in pulled] == [b"kept"]


def test_lists_are_paged(
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
    project: str,
) -> None:
    topics = [make_topic(f"topic-{number}") for number in range(5)]
    subscriptions = [make_subscription(topics[0], f"sub-{number}") for number in range(5)]
    pages = list(publisher.list_topics(request={"project": project, "page_size": 2}).pages)
    assert max(len(page.topics) for page in pages) == 2
    assert sorted(topic.name for page in pages for topic in page.topics) == topics
    listed = subscriber.list_subscriptions(request={"project": project, "page_size": 2})
    assert sorted(resource.name for resource in listed) == subscriptions
    of_topic = publisher.list_topic_subscriptions(request={"topic": topics[0], "page_size": 2})
    assert sorted(of_topic) == subscriptions
    assert list(publisher.list_topic_subscriptions(topic=topics[1])) == []


def test_detached_subscription_refuses_pulls(
    target: Target,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    target.requires("DetachSubscription")
    path = make_subscription(make_topic())
    publisher.detach_subscription(request={"subscription": path})
    assert subscriber.get_subscription(subscription=path).detached
    with pytest.raises(exceptions.FailedPrecondition):
        subscriber.pull(subscription=path, max_messages=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": b""},
        {"data": b"x", "attributes": {"k" * 257: "v"}},
        {"data": b"x", "attributes": {"k": "v" * 1025}},
    ],
    ids=["empty", "long key", "long value"],
)
def test_publish_out_of_bounds_is_refused(
    target: Target, publisher: PublisherClient, make_topic: Make, fields: dict[str, object]
) -> None:
    if "attributes" in fields:
        target.requires("attribute limits")
    with pytest.raises(exceptions.InvalidArgument):
        GapicPublisherClient.publish(publisher, topic=make_topic(), messages=[fields])
