"""Retention, expiration and the memory limit: when messages and resources are removed."""

import gc
import tracemalloc
from contextlib import suppress

import pytest

from pubsub_emulator.errors import InvalidArgument, ResourceExhausted, ResourceNotFound
from tests.world import World, message, subscription_path, topic_path

DAY_S = 86400


def seconds(value: float) -> dict[str, int]:
    return {"seconds": int(value), "nanos": round((value - int(value)) * 1e9)}


def test_unacked_message_leaves_after_the_retention() -> None:
    world = World()
    world.topic()
    world.subscription(message_retention_duration=seconds(600))
    world.publish("old")
    world.advance(300)
    world.publish("new")
    world.advance(300)
    assert world.pull_data() == ["new"]


def test_leased_message_leaves_too_and_its_ack_finds_nothing() -> None:
    world = World()
    world.topic()
    world.subscription(message_retention_duration=seconds(600))
    world.publish("old")
    world.advance(595)
    pulled = world.pull()
    world.advance(30)
    world.ack(pulled)
    assert world.pull() == []


def test_default_retention_is_seven_days(world: World) -> None:
    world.publish("a")
    world.advance(7 * DAY_S - 1)
    world.nack(world.pull())
    world.advance(1)
    assert world.pull() == []


def test_shorter_retention_by_update_takes_effect(world: World) -> None:
    world.publish("a")
    update = {"name": subscription_path("workers"), "message_retention_duration": seconds(600)}
    mask = {"paths": ["message_retention_duration"]}
    world.call(
        "UpdateSubscription", "UpdateSubscriptionRequest", subscription=update, update_mask=mask
    )
    world.advance(600)
    assert world.pull() == []


@pytest.mark.parametrize("duration_s", [0, 599.999, 31 * DAY_S + 1])
def test_retention_out_of_range_is_refused(duration_s: float) -> None:
    world = World()
    with pytest.raises(InvalidArgument, match="message_retention_duration"):
        world.topic("other", message_retention_duration=seconds(duration_s))
    world.topic()
    with pytest.raises(InvalidArgument, match="message_retention_duration"):
        world.subscription(message_retention_duration=seconds(duration_s))


def test_topic_retention_is_shown_on_its_subscriptions() -> None:
    world = World()
    world.topic(message_retention_duration=seconds(1200))
    path = world.subscription()
    subscription = world.call("GetSubscription", "GetSubscriptionRequest", subscription=path)
    assert subscription.topic_message_retention_duration.seconds == 1200


def test_topic_retention_outlasts_the_subscriptions() -> None:
    world = World()
    world.topic(message_retention_duration=seconds(1200))
    world.subscription(message_retention_duration=seconds(600))
    world.publish("a")
    world.advance(1199)
    assert world.pull_data() == ["a"]
    world.advance(11)
    assert world.pull() == []


def test_deleted_topic_takes_its_retention_with_it() -> None:
    world = World()
    world.topic(message_retention_duration=seconds(1200))
    world.subscription(message_retention_duration=seconds(600))
    world.publish("a")
    world.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("jobs"))
    world.advance(600)
    assert world.pull() == []


def test_unused_subscription_expires_after_its_time_to_live() -> None:
    world = World()
    world.topic()
    path = world.subscription(
        message_retention_duration=seconds(600), expiration_policy={"ttl": seconds(DAY_S)}
    )
    world.advance(DAY_S - 1)
    world.pull()
    world.advance(DAY_S - 1)
    world.pull()
    world.advance(DAY_S)
    with pytest.raises(ResourceNotFound):
        world.call("GetSubscription", "GetSubscriptionRequest", subscription=path)
    world.publish("nobody gets this")
    assert world.broker.registry.storage.held_bytes == 0


def test_connected_consumer_keeps_a_subscription_alive() -> None:
    world = World()
    world.topic()
    path = world.subscription(
        message_retention_duration=seconds(600), expiration_policy={"ttl": seconds(DAY_S)}
    )
    subscription = world.broker.pullable(path)
    reader = world.consumer()
    subscription.join(reader)
    world.advance(3 * DAY_S)
    subscription.leave(reader)
    world.advance(DAY_S - 1)
    assert world.pull() == []


def test_policy_without_ttl_never_expires() -> None:
    world = World()
    world.topic()
    world.subscription(expiration_policy={})
    world.advance(400 * DAY_S)
    assert world.pull() == []


def test_default_time_to_live_is_31_days(world: World) -> None:
    world.advance(31 * DAY_S)
    with pytest.raises(ResourceNotFound):
        world.pull()


def test_time_to_live_below_a_day_is_refused() -> None:
    world = World()
    world.topic()
    with pytest.raises(InvalidArgument, match=r"expiration_policy\.ttl"):
        world.subscription(expiration_policy={"ttl": seconds(DAY_S - 1)})


def test_time_to_live_below_the_retention_is_refused() -> None:
    world = World()
    world.topic()
    with pytest.raises(InvalidArgument, match="must not be less than message_retention_duration"):
        world.subscription(expiration_policy={"ttl": seconds(DAY_S)})


def test_acked_messages_free_their_memory(world: World) -> None:
    world.publish(*("x" * 1000 for _ in range(100)))
    assert world.broker.registry.storage.held_bytes > 100_000
    world.ack(world.pull())
    assert world.broker.registry.storage.held_bytes == 0


def test_message_nobody_subscribes_to_is_not_kept() -> None:
    world = World()
    world.topic()
    world.publish("a")
    assert world.broker.registry.storage.held_bytes == 0


def test_publish_beyond_the_storage_limit_is_refused_until_something_is_acked() -> None:
    world = World(storage_bytes=5000)
    world.topic()
    world.subscription()
    world.publish("x" * 1000)
    world.publish("x" * 1000)
    with pytest.raises(ResourceExhausted, match="5000"):
        world.publish("x" * 1000)
    world.ack(world.pull())
    world.publish("x" * 1000)


def test_what_small_messages_take_of_memory_is_within_the_limit() -> None:
    """Tiny messages use far more memory than their size, and each subscription adds to that."""
    limit_bytes = 30 * 1024**2
    world = World(storage_bytes=limit_bytes)
    world.topic()
    for number in range(5):
        world.subscription(f"sub-{number}")
    gc.collect()
    tracemalloc.start()
    try:
        with suppress(ResourceExhausted):
            while True:
                world.publish(*(message("tiny", number="1") for _ in range(500)))
        for number in range(5):
            world.pull(f"sub-{number}", max_messages=100_000)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < limit_bytes
    assert world.broker.registry.storage.held_bytes < 1.2 * limit_bytes
