"""Snapshots and seek: going back, going forward, and the messages kept for seeking."""

from typing import Any

import pytest

from pubsub_emulator.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExists,
    ResourceNotFound,
)
from pubsub_emulator.protos import message_class
from tests.world import World, message, snapshot_path, subscription_path, topic_path

DAY_S = 86400


def retaining_world(**fields: Any) -> World:
    world = World()
    world.topic()
    world.subscription(retain_acked_messages=True, **fields)
    return world


def seek_to(world: World, time_s: float, subscription_id: str = "workers") -> None:
    request = message_class("SeekRequest")(subscription=subscription_path(subscription_id))
    request.time.FromMicroseconds(int(time_s * 1e6))
    world.broker.call("Seek", request)


def seek_to_snapshot(world: World, snapshot_id: str, subscription_id: str = "workers") -> None:
    path = subscription_path(subscription_id)
    world.call("Seek", "SeekRequest", subscription=path, snapshot=snapshot_path(snapshot_id))


def snapshot(world: World, snapshot_id: str = "before", subscription_id: str = "workers") -> Any:
    return world.call(
        "CreateSnapshot",
        "CreateSnapshotRequest",
        name=snapshot_path(snapshot_id),
        subscription=subscription_path(subscription_id),
    )


def test_seek_back_redelivers_acked_messages_in_order() -> None:
    world = retaining_world()
    world.publish("a", "b")
    world.ack(world.pull())
    start_s = world.now_s
    world.advance(1)
    world.publish("c")
    seek_to(world, start_s)
    assert world.pull_data() == ["a", "b", "c"]


def test_memory_is_counted_once_for_each_delivery_whatever_a_seek_does() -> None:
    world = World()
    world.topic()
    world.subscription(enable_message_ordering=True)
    storage = world.broker.registry.storage
    world.publish(*(message(text, ordering_key="k") for text in "abc"))
    held_bytes = storage.held_bytes
    start_s = world.now_s - 1
    snapshot(world)
    world.pull(max_messages=2)
    for _ in range(2):
        seek_to(world, start_s)
        seek_to_snapshot(world, "before")
        assert storage.held_bytes == held_bytes
    world.call("DeleteSnapshot", "DeleteSnapshotRequest", snapshot=snapshot_path("before"))
    seek_to(world, world.now_s + 1)
    assert storage.held_bytes == 0


def test_seek_back_without_retaining_brings_nothing(world: World) -> None:
    world.publish("a")
    world.ack(world.pull())
    seek_to(world, world.now_s - 1)
    assert world.pull() == []


def test_seek_forward_acks_what_is_older() -> None:
    world = retaining_world()
    world.publish("a")
    world.advance(10)
    middle_s = world.now_s
    world.publish("b")
    seek_to(world, middle_s)
    assert world.pull_data() == ["b"]
    world.advance(10)
    seek_to(world, middle_s - 10)
    assert world.pull_data() == ["a", "b"]


def test_seek_into_the_future_purges(world: World) -> None:
    world.publish("a")
    seek_to(world, world.now_s + 3600)
    assert world.pull() == []


def test_message_in_flight_comes_back_at_once_and_its_old_ack_does_not_count() -> None:
    world = World()
    world.topic()
    world.subscription()
    snapshot(world)
    world.publish("a")
    pulled = world.pull()
    seek_to_snapshot(world, "before")
    world.ack(pulled)
    assert world.pull_data() == ["a"]
    seek_to(world, world.now_s - 1)
    assert world.pull_data() == ["a"]


def test_message_in_flight_gives_its_place_in_the_flow_control_back() -> None:
    world = World()
    world.topic()
    world.subscription()
    world.publish("a")
    stream = world.consumer(max_messages=1)
    world.take(stream)
    assert world.take(stream) == []
    wakes = stream.wakes
    seek_to(world, world.now_s - 1)
    assert stream.wakes > wakes
    assert [message.data for message in world.take(stream)] == ["a"]
    assert stream.outstanding_messages == 1


def test_ack_from_before_the_seek_does_not_ack_the_redelivery() -> None:
    world = retaining_world()
    world.publish("a")
    pulled = world.pull()
    world.ack(pulled)
    seek_to(world, world.now_s - 1)
    world.ack(pulled)
    assert world.pull_data() == ["a"]


def test_acked_messages_are_retained_no_longer_than_the_retention() -> None:
    world = retaining_world(message_retention_duration={"seconds": 600})
    start_s = world.now_s
    world.publish("a")
    world.ack(world.pull())
    world.advance(600)
    seek_to(world, start_s)
    assert world.pull() == []
    assert world.broker.registry.storage.held_bytes == 0


def test_topic_retention_lets_a_new_subscription_seek_before_its_birth() -> None:
    world = World()
    world.topic(message_retention_duration={"seconds": 1200})
    start_s = world.now_s
    world.publish(message("kept", lang="en"), message("filtered", lang="jp"))
    world.advance(60)
    world.subscription("late", filter='attributes.lang = "en"')
    assert world.pull("late") == []
    seek_to(world, start_s, "late")
    assert world.pull_data("late") == ["kept"]


def test_topic_log_is_dropped_with_time() -> None:
    world = World()
    world.topic(message_retention_duration={"seconds": 600})
    world.publish("a")
    world.advance(600)
    assert world.broker.registry.storage.held_bytes == 0


def test_snapshot_brings_back_its_backlog_and_all_published_since() -> None:
    world = retaining_world()
    world.publish("acked before")
    world.ack(world.pull())
    world.publish("unacked")
    snapshot(world)
    world.publish("later")
    world.ack(world.pull())
    seek_to_snapshot(world, "before")
    assert world.pull_data() == ["unacked", "later"]


def test_snapshot_acks_what_was_acked_when_it_was_made() -> None:
    world = retaining_world()
    world.publish("a")
    pulled = world.pull()
    world.ack(pulled)
    snapshot(world)
    seek_to(world, world.now_s - 1)
    seek_to_snapshot(world, "before")
    assert world.pull() == []


def test_snapshot_serves_another_subscription_of_the_topic() -> None:
    world = retaining_world()
    world.subscription("others", filter='attributes.lang = "en"')
    world.publish(message("en", lang="en"), message("jp", lang="jp"))
    snapshot(world)
    world.ack(world.pull("others"), "others")
    seek_to_snapshot(world, "before", "others")
    assert world.pull_data("others") == ["en"]


def test_snapshot_of_another_topic_is_refused(world: World) -> None:
    world.topic("elsewhere")
    world.subscription("there", "elsewhere")
    snapshot(world, "other", "there")
    with pytest.raises(FailedPrecondition, match="topic"):
        seek_to_snapshot(world, "other")


def test_snapshot_lives_seven_days_less_the_age_of_its_oldest_message(world: World) -> None:
    world.publish("a")
    world.advance(3 * DAY_S)
    made = snapshot(world)
    assert made.expire_time.seconds == int(world.now_s) + 4 * DAY_S
    world.advance(4 * DAY_S - 1)
    world.call("GetSnapshot", "GetSnapshotRequest", snapshot=made.name)
    world.advance(1)
    with pytest.raises(ResourceNotFound):
        world.call("GetSnapshot", "GetSnapshotRequest", snapshot=made.name)


def test_snapshot_that_would_expire_within_an_hour_is_refused(world: World) -> None:
    world.publish("a")
    world.advance(7 * DAY_S - 3599)
    with pytest.raises(FailedPrecondition, match="less than 1 hour"):
        snapshot(world)


def test_snapshot_name_is_taken_or_given(world: World) -> None:
    snapshot(world)
    with pytest.raises(ResourceExists, match=r"\(resource=before\)"):
        snapshot(world)
    path = subscription_path("workers")
    made = world.call("CreateSnapshot", "CreateSnapshotRequest", subscription=path)
    assert made.name.startswith("projects/test-project/snapshots/")
    assert made.topic == topic_path("jobs")


def test_snapshots_are_listed_and_deleted(world: World) -> None:
    snapshot(world, "one-1")
    snapshot(world, "two-2")
    listed = world.call("ListSnapshots", "ListSnapshotsRequest", project="projects/test-project")
    assert [snapshot.name for snapshot in listed.snapshots] == [
        snapshot_path("one-1"),
        snapshot_path("two-2"),
    ]
    of_topic = world.call(
        "ListTopicSnapshots", "ListTopicSnapshotsRequest", topic=topic_path("jobs")
    )
    assert list(of_topic.snapshots) == [snapshot_path("one-1"), snapshot_path("two-2")]
    world.call("DeleteSnapshot", "DeleteSnapshotRequest", snapshot=snapshot_path("one-1"))
    with pytest.raises(ResourceNotFound, match=r"Resource not found \(resource=one-1\)\."):
        seek_to_snapshot(world, "one-1")


def test_deleted_snapshot_frees_its_messages(world: World) -> None:
    snapshot(world)
    world.publish("a")
    world.ack(world.pull())
    assert world.broker.registry.storage.held_bytes > 0
    world.call("DeleteSnapshot", "DeleteSnapshotRequest", snapshot=snapshot_path("before"))
    assert world.broker.registry.storage.held_bytes == 0


def test_snapshot_labels_and_end_can_be_updated(world: World) -> None:
    made = snapshot(world)
    update = message_class("UpdateSnapshotRequest")(
        snapshot={"name": made.name, "labels": {"env": "test"}}
    )
    update.snapshot.expire_time.seconds = int(world.now_s) + DAY_S
    update.update_mask.paths.extend(["labels", "expire_time"])
    updated = world.broker.call("UpdateSnapshot", update)
    assert dict(updated.labels) == {"env": "test"}
    world.advance(DAY_S)
    with pytest.raises(ResourceNotFound):
        seek_to_snapshot(world, "before")


def test_snapshot_end_can_not_be_put_off_beyond_its_messages(world: World) -> None:
    made = snapshot(world)
    update = message_class("UpdateSnapshotRequest")(snapshot={"name": made.name})
    update.snapshot.expire_time.seconds = int(world.now_s) + 8 * DAY_S
    update.update_mask.paths.append("expire_time")
    with pytest.raises(InvalidArgument, match="expire_time"):
        world.broker.call("UpdateSnapshot", update)


def test_snapshot_of_a_deleted_topic_can_not_be_used(world: World) -> None:
    made = snapshot(world)
    world.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("jobs"))
    stored = world.call("GetSnapshot", "GetSnapshotRequest", snapshot=made.name)
    assert stored.topic == "_deleted-topic_"
    with pytest.raises(FailedPrecondition):
        seek_to_snapshot(world, "before")


@pytest.mark.parametrize("time", [{"seconds": 10**18}, {"seconds": -(10**18)}, {"nanos": -1}])
def test_seek_to_no_time_is_refused(world: World, time: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"time\.(seconds|nanos)"):
        world.call("Seek", "SeekRequest", subscription=subscription_path("workers"), time=time)


def test_seek_needs_a_target(world: World) -> None:
    with pytest.raises(InvalidArgument, match="target"):
        world.call("Seek", "SeekRequest", subscription=subscription_path("workers"))


def test_snapshot_end_in_the_past_is_refused(world: World) -> None:
    made = snapshot(world)
    update = message_class("UpdateSnapshotRequest")(snapshot={"name": made.name})
    update.snapshot.expire_time.seconds = int(world.now_s)
    update.update_mask.paths.append("expire_time")
    with pytest.raises(InvalidArgument, match="in the past"):
        world.broker.call("UpdateSnapshot", update)


def test_detached_subscription_has_nothing_to_seek_or_snapshot(world: World) -> None:
    path = subscription_path("workers")
    world.call("DetachSubscription", "DetachSubscriptionRequest", subscription=path)
    with pytest.raises(FailedPrecondition, match="detached"):
        seek_to(world, world.now_s)
    with pytest.raises(FailedPrecondition, match="no topic"):
        snapshot(world)
