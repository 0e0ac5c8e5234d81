"""Topics and subscriptions as resources: names, defaults, updates, lists, deletion."""

from typing import Any

import pytest

from pubsub_emulator.errors import (
    FailedPrecondition,
    InvalidArgument,
    PubsubError,
    ResourceExists,
    ResourceNotFound,
    Unimplemented,
)
from pubsub_emulator.protos import BigQueryConfig
from tests.world import PROJECT, World, subscription_path, topic_path

TABLE = {"table": "p.d.t"}


def world_with_bigquery() -> World:
    world = World(bigquery_endpoint="http://localhost:9")
    world.topic()
    return world


def get(world: World, subscription_id: str = "workers") -> Any:
    path = subscription_path(subscription_id)
    return world.call("GetSubscription", "GetSubscriptionRequest", subscription=path)


def update(world: World, *paths: str, **fields: Any) -> Any:
    subscription = {"name": subscription_path("workers"), **fields}
    mask = {"paths": list(paths)}
    return world.call(
        "UpdateSubscription",
        "UpdateSubscriptionRequest",
        subscription=subscription,
        update_mask=mask,
    )


@pytest.mark.parametrize(
    "name",
    [
        "jobs",
        "projects/p/topics/",
        "projects/p/topics/ab",
        "projects/p/topics/1abc",
        "projects/p/topics/google-news",
        "projects/p/topics/sp ace",
        "projects/p/topics/" + "a" * 256,
        "projects//topics/abc",
        "projects/p/subscriptions/abc",
        "projects/p/topics/abc/more",
    ],
)
def test_invalid_topic_name_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        World().call("CreateTopic", "Topic", name=name)
    assert f"(name={name})" in str(refusal.value)


@pytest.mark.parametrize("topic_id", ["abc", "A.b~c+d%e_f-g", "a" * 255])
def test_valid_topic_name_is_taken(topic_id: str) -> None:
    assert World().topic(topic_id) == topic_path(topic_id)


def test_defaults_are_the_services(world: World) -> None:
    subscription = get(world)
    assert subscription.ack_deadline_seconds == 10
    assert subscription.message_retention_duration.seconds == 7 * 86400
    assert subscription.expiration_policy.ttl.seconds == 31 * 86400
    assert subscription.state == subscription.State.Value("ACTIVE")
    assert subscription.HasField("push_config")
    assert not subscription.HasField("retry_policy")


def test_second_of_a_name_is_refused(world: World) -> None:
    with pytest.raises(
        ResourceExists, match=r"Resource already exists in the project \(resource=jobs\)\."
    ):
        world.topic()
    with pytest.raises(ResourceExists, match=r"\(resource=workers\)"):
        world.subscription()


def test_subscription_needs_its_topic() -> None:
    with pytest.raises(ResourceNotFound, match=r"Resource not found \(resource=jobs\)\."):
        World().subscription()


@pytest.mark.parametrize("deadline_s", [-1, 9, 601])
def test_ack_deadline_out_of_range_is_refused(deadline_s: int) -> None:
    world = World()
    world.topic()
    with pytest.raises(
        InvalidArgument, match=f"ack_deadline_seconds is too .* You passed {deadline_s} "
    ):
        world.subscription(ack_deadline_seconds=deadline_s)


@pytest.mark.parametrize(
    "labels", [{"Upper": "x"}, {"1digit": "x"}, {"k": "Upper"}, {"k" * 64: ""}]
)
def test_invalid_labels_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="label"):
        World().topic(labels=labels)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("ftp://x/y", "localhost:80", "http://", "http://h:99999/", "http://[::1"),
        *("http://h/a b", "http://h/\u00fc", "http://h/\n", "http://h/\0"),
    ],
)
def test_invalid_push_endpoint_is_refused(endpoint: str) -> None:
    world = World()
    world.topic()
    with pytest.raises(InvalidArgument, match="push endpoint"):
        world.subscription(push_config={"push_endpoint": endpoint})


def test_features_without_an_implementation_are_refused_by_name() -> None:
    world = World()
    world.topic()
    with pytest.raises(Unimplemented, match="cloud_storage_config"):
        world.subscription(cloud_storage_config={"bucket": "b"})
    with pytest.raises(Unimplemented, match="message_transforms"):
        world.topic("changed", message_transforms=[{"disabled": True}])


def test_bigquery_subscription_is_refused_by_a_server_without_a_bigquery() -> None:
    world = World()
    world.topic()
    with pytest.raises(Unimplemented, match="--bigquery-endpoint"):
        world.subscription(bigquery_config=TABLE)


@pytest.mark.parametrize("table", ["", "t", "d.t", "p:d.t", "p.d.", "p..t", "p.d.t.u/v"])
def test_invalid_bigquery_table_is_refused(table: str) -> None:
    with pytest.raises(InvalidArgument, match=r"BigQuery table given \(table="):
        world_with_bigquery().subscription(bigquery_config={"table": table, "write_metadata": True})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"bigquery_config": TABLE | {"use_topic_schema": True, "use_table_schema": True}},
            "use_topic_schema and use_table_schema",
        ),
        (
            {"bigquery_config": TABLE, "push_config": {"push_endpoint": "http://localhost:9/x"}},
            "push_config and bigquery_config",
        ),
        ({"bigquery_config": TABLE, "enable_exactly_once_delivery": True}, "Exactly-once"),
    ],
)
def test_settings_that_bigquery_excludes_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        world_with_bigquery().subscription(**fields)


def test_columns_of_the_topics_schema_are_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match="use_topic_schema"):
        world_with_bigquery().subscription(bigquery_config=TABLE | {"use_topic_schema": True})


def test_bigquery_subscription_is_shown_and_can_not_be_pulled() -> None:
    world = world_with_bigquery()
    config = TABLE | {"use_table_schema": True, "drop_unknown_fields": True}
    world.subscription(bigquery_config={**config, "state": "NOT_FOUND"})
    created = get(world)
    assert created.bigquery_config == BigQueryConfig(**config, state="ACTIVE")
    assert created.state == created.State.Value("ACTIVE")
    with pytest.raises(FailedPrecondition, match="type=BIGQUERY"):
        world.pull()
    push = {"push_endpoint": "http://localhost:9/x"}
    request = {"subscription": subscription_path("workers"), "push_config": push}
    with pytest.raises(InvalidArgument, match="push_config and bigquery_config"):
        world.call("ModifyPushConfig", "ModifyPushConfigRequest", **request)


def test_update_turns_a_subscription_to_bigquery_and_back() -> None:
    world = world_with_bigquery()
    world.subscription()
    reader = world.consumer()
    world.broker.pullable(subscription_path("workers")).join(reader)
    assert update(world, "bigquery_config", bigquery_config=TABLE).bigquery_config.table == "p.d.t"
    assert isinstance(reader.ended, FailedPrecondition)
    assert not update(world, "bigquery_config").HasField("bigquery_config")
    assert world.pull() == []


def test_update_changes_the_masked_fields_only(world: World) -> None:
    subscription = update(
        world, "ack_deadline_seconds", ack_deadline_seconds=60, labels={"env": "test"}
    )
    assert subscription.ack_deadline_seconds == 60
    assert not subscription.labels


def test_update_replaces_labels_and_clears_what_is_unset(world: World) -> None:
    update(world, "labels", "retry_policy", labels={"a": "1", "b": "2"}, retry_policy={})
    subscription = update(world, "labels", "retry_policy", labels={"c": "3"})
    assert dict(subscription.labels) == {"c": "3"}
    assert not subscription.HasField("retry_policy")


def test_update_of_one_nested_field(world: World) -> None:
    subscription = update(
        world,
        "push_config.push_endpoint",
        push_config={"push_endpoint": "http://localhost:9/x", "attributes": {"a": "b"}},
    )
    assert subscription.push_config.push_endpoint == "http://localhost:9/x"
    assert not subscription.push_config.attributes


@pytest.mark.parametrize(
    "field", ["filter", "topic", "name", "enable_message_ordering", "detached"]
)
def test_update_of_what_is_for_ever_is_refused(world: World, field: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"the {field} field in the Subscription is not mutable"
    ):
        update(world, field)


def test_update_of_an_unknown_field_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="pushConfig is not a known Subscription field"):
        update(world, "pushConfig")


@pytest.mark.parametrize(
    "path", ["labels.a", "ack_deadline_seconds.x", "push_config.x", "expiration_policy.ttl.x"]
)
def test_update_of_a_path_that_leads_nowhere_is_refused(world: World, path: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{path} is not a path to a"):
        update(world, path)


@pytest.mark.parametrize(
    "field",
    [
        {"expiration_policy": {"ttl": {"seconds": 400_000_000_000}}},
        {"expiration_policy": {"ttl": {"seconds": 3_000_000, "nanos": -1}}},
        {"retry_policy": {"minimum_backoff": {"seconds": -1}}},
        {"message_retention_duration": {"seconds": 700_000, "nanos": 2_000_000_000}},
    ],
)
def test_duration_that_is_none_is_refused(field: dict[str, Any]) -> None:
    world = World()
    world.topic()
    with pytest.raises(InvalidArgument, match=next(iter(field))):
        world.subscription(**field)


def test_update_without_a_mask_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="update_mask"):
        update(world)


def test_refused_update_changes_nothing(world: World) -> None:
    with pytest.raises(InvalidArgument):
        update(world, "ack_deadline_seconds", "labels", ack_deadline_seconds=5, labels={"a": "b"})
    assert get(world).ack_deadline_seconds == 10
    assert not get(world).labels


def test_topic_update(world: World) -> None:
    topic = {"name": topic_path("jobs"), "labels": {"env": "test"}, "kms_key_name": "ignored"}
    request = {"topic": topic, "update_mask": {"paths": ["labels"]}}
    updated = world.call("UpdateTopic", "UpdateTopicRequest", **request)
    assert dict(updated.labels) == {"env": "test"}
    assert updated.kms_key_name == ""


def test_deleted_topic_leaves_its_subscription_with_the_backlog(world: World) -> None:
    world.publish("a")
    world.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("jobs"))
    assert get(world).topic == "_deleted-topic_"
    assert world.pull_data() == ["a"]
    world.topic()
    world.publish("b")
    assert world.pull() == []
    assert update(world, "labels", labels={"a": "b"}).topic == "_deleted-topic_"


def test_publish_to_a_missing_topic_is_refused() -> None:
    with pytest.raises(ResourceNotFound, match=r"Resource not found \(resource=jobs\)\."):
        World().publish("a")


def test_deleted_subscription_is_gone_and_its_name_free(world: World) -> None:
    world.publish("a")
    path = subscription_path("workers")
    world.call("DeleteSubscription", "DeleteSubscriptionRequest", subscription=path)
    with pytest.raises(ResourceNotFound):
        get(world)
    assert world.broker.registry.storage.held_bytes == 0
    world.subscription()
    assert world.pull() == []


def test_deleting_ends_consumers_with_not_found(world: World) -> None:
    reader = world.consumer()
    world.broker.pullable(subscription_path("workers")).join(reader)
    world.take(reader)
    path = subscription_path("workers")
    world.call("DeleteSubscription", "DeleteSubscriptionRequest", subscription=path)
    assert reader.wakes == 1
    assert isinstance(reader.ended, ResourceNotFound)


def test_detached_subscription_drops_everything_and_refuses_pulls(world: World) -> None:
    world.publish("a")
    pulled = world.pull()
    path = subscription_path("workers")
    world.call("DetachSubscription", "DetachSubscriptionRequest", subscription=path)
    world.publish("b")
    assert get(world).detached
    assert world.broker.registry.storage.held_bytes == 0
    with pytest.raises(FailedPrecondition, match="detached"):
        world.pull()
    with pytest.raises(FailedPrecondition, match="detached"):
        world.ack(pulled)
    listed = world.call(
        "ListTopicSubscriptions", "ListTopicSubscriptionsRequest", topic=topic_path("jobs")
    )
    assert list(listed.subscriptions) == []


def test_push_subscription_can_not_be_pulled(world: World) -> None:
    reader = world.consumer()
    world.broker.pullable(subscription_path("workers")).join(reader)
    request = {
        "subscription": subscription_path("workers"),
        "push_config": {"push_endpoint": "http://localhost:9/x"},
    }
    world.call("ModifyPushConfig", "ModifyPushConfigRequest", **request)
    assert isinstance(reader.ended, FailedPrecondition)
    with pytest.raises(FailedPrecondition, match="type=PUSH"):
        world.pull()
    world.call(
        "ModifyPushConfig", "ModifyPushConfigRequest", subscription=subscription_path("workers")
    )
    assert world.pull() == []


def test_lists_are_paged_by_name_and_bound_to_the_project() -> None:
    world = World()
    for number in range(5):
        world.topic(f"topic-{number}")
    world.call("CreateTopic", "Topic", name="projects/elsewhere/topics/topic-9")
    names, token, pages = [], "", 0
    while True:
        request = {"project": PROJECT, "page_size": 2, "page_token": token}
        page = world.call("ListTopics", "ListTopicsRequest", **request)
        names += [topic.name for topic in page.topics]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert names == [topic_path(f"topic-{number}") for number in range(5)]
    assert pages == 3


def test_subscriptions_are_listed_by_project_and_by_topic(world: World) -> None:
    world.topic("other")
    world.subscription("elsewhere", "other")
    listed = world.call("ListSubscriptions", "ListSubscriptionsRequest", project=PROJECT)
    assert [subscription.name for subscription in listed.subscriptions] == [
        subscription_path("elsewhere"),
        subscription_path("workers"),
    ]
    of_topic = world.call(
        "ListTopicSubscriptions", "ListTopicSubscriptionsRequest", topic=topic_path("jobs")
    )
    assert list(of_topic.subscriptions) == [subscription_path("workers")]


@pytest.mark.parametrize(
    "fields", [{"page_size": -1}, {"page_token": "no token"}, {"project": "test-project"}]
)
def test_wrong_list_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        World().call("ListTopics", "ListTopicsRequest", **{"project": PROJECT, **fields})


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("GetTopic", "GetTopicRequest", "topic"),
        ("DeleteTopic", "DeleteTopicRequest", "topic"),
        ("ListTopicSubscriptions", "ListTopicSubscriptionsRequest", "topic"),
        ("ListTopicSnapshots", "ListTopicSnapshotsRequest", "topic"),
        ("GetSubscription", "GetSubscriptionRequest", "subscription"),
        ("DeleteSubscription", "DeleteSubscriptionRequest", "subscription"),
        ("DetachSubscription", "DetachSubscriptionRequest", "subscription"),
        ("ModifyPushConfig", "ModifyPushConfigRequest", "subscription"),
        ("Acknowledge", "AcknowledgeRequest", "subscription"),
        ("ModifyAckDeadline", "ModifyAckDeadlineRequest", "subscription"),
        ("CreateSnapshot", "CreateSnapshotRequest", "subscription"),
        ("Seek", "SeekRequest", "subscription"),
        ("GetSnapshot", "GetSnapshotRequest", "snapshot"),
        ("DeleteSnapshot", "DeleteSnapshotRequest", "snapshot"),
    ],
)
def test_missing_resource_is_not_found_and_wrong_name_is_invalid(
    name: str, kind: str, field: str
) -> None:
    world = World()
    with pytest.raises(ResourceNotFound, match=r"Resource not found \(resource=missing\)\."):
        world.call(name, kind, **{field: f"{PROJECT}/{field}s/missing"})
    with pytest.raises(InvalidArgument):
        world.call(name, kind, **{field: "nonsense"})


def test_every_refusal_has_a_known_status() -> None:
    import grpc

    pending, statuses = [PubsubError], set()
    while pending:
        error = pending.pop()
        pending += error.__subclasses__()
        statuses.add(error.status)
    assert statuses <= set(grpc.StatusCode.__members__)
