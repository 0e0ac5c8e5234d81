"""Ordering keys: one consumer at a time, in order; a redelivery includes all later messages."""

from collections.abc import Sequence
from typing import Any

from tests.world import Pulled, World, message, topic_path


def ordered_world(**fields: Any) -> World:
    world = World()
    world.topic()
    world.subscription(enable_message_ordering=True, **fields)
    return world


def publish(world: World, key: str, *data: str) -> None:
    world.publish(*(message(text, ordering_key=key) for text in data))


def data_of(pulled: Sequence[Pulled]) -> list[str]:
    return [message.data for message in pulled]


def test_a_pull_brings_several_of_a_key_in_order() -> None:
    world = ordered_world()
    publish(world, "k", "k1", "k2")
    publish(world, "l", "l1")
    publish(world, "", "free", "free2")
    assert world.pull_data() == ["k1", "k2", "l1", "free", "free2"]


def test_the_next_pull_gets_a_key_when_the_last_one_is_done_with_it() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2", "3")
    first = world.pull(max_messages=2)
    assert data_of(first) == ["1", "2"]
    assert world.pull() == []
    world.ack(first[:1])
    assert world.pull() == []
    world.ack(first[1:])
    assert world.pull_data() == ["3"]


def test_a_stream_goes_on_with_its_keys_and_nobody_else_does() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2", "3")
    stream, other = world.consumer(max_messages=2), world.consumer()
    first = world.take(stream)
    assert data_of(first) == ["1", "2"]
    assert world.take(other) == []
    world.ack(first[1:])
    assert data_of(world.take(stream)) == ["3"]
    publish(world, "k", "4")
    assert world.take(other) == []
    world.leave(stream)
    assert world.take(other) == []
    world.advance(10)
    assert data_of(world.take(other)) == ["1", "3", "4"]


def test_a_stream_is_woken_for_the_next_of_its_key() -> None:
    world = ordered_world()
    stream = world.consumer(max_messages=1)
    assert world.take(stream) == []
    publish(world, "k", "1", "2")
    (first,) = world.take(stream)
    assert world.take(stream) == []
    wakes = stream.wakes
    world.ack([first])
    assert stream.wakes > wakes
    (second,) = world.take(stream)
    assert second.data == "2"
    unbounded = world.consumer()
    world.ack([second])
    publish(world, "k", "3")
    assert data_of(world.take(unbounded)) == ["3"]
    assert world.take(unbounded) == []
    wakes = unbounded.wakes
    publish(world, "k", "4")
    assert unbounded.wakes > wakes
    assert data_of(world.take(unbounded)) == ["4"]


def test_redelivery_brings_the_later_ones_after_it() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2", "3", "4")
    pulled = world.pull(max_messages=3)
    world.nack(pulled[1:2])
    assert world.pull() == []
    world.ack(pulled[:1])
    assert world.pull_data() == ["2", "3", "4"]


def test_only_the_nacked_one_has_an_attempt_more() -> None:
    policy = {"dead_letter_topic": topic_path("jobs"), "max_delivery_attempts": 5}
    world = ordered_world(dead_letter_policy=policy)
    publish(world, "k", "1", "2")
    world.nack(world.pull()[:1])
    assert [(message.data, message.delivery_attempt) for message in world.pull()] == [
        ("1", 2),
        ("2", 1),
    ]


def test_expired_lease_keeps_the_order() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2")
    first, _ = world.pull()
    world.modify([first], 30)
    world.advance(10)
    assert world.pull() == []
    world.ack([first])
    assert world.pull_data() == ["2"]


def test_backoff_of_the_oldest_holds_its_key_only() -> None:
    world = ordered_world(
        retry_policy={"minimum_backoff": {"seconds": 5}, "maximum_backoff": {"seconds": 5}}
    )
    publish(world, "k", "k1", "k2")
    world.nack(world.pull()[:1])
    publish(world, "l", "l1")
    assert world.pull_data() == ["l1"]
    world.advance(5)
    assert world.pull_data() == ["k1", "k2"]


def test_late_ack_of_a_held_back_message_lets_the_next_out() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2")
    late = world.pull(max_messages=1)
    world.advance(10)
    world.ack(late)
    assert world.pull_data() == ["2"]


def test_without_ordering_the_key_is_only_carried() -> None:
    world = World()
    world.topic()
    world.subscription()
    publish(world, "k", "1", "2")
    pulled = world.pull()
    assert [message.data for message in pulled] == ["1", "2"]
    assert pulled[0].message.ordering_key == "k"


def test_seek_back_redelivers_the_key_from_the_older_message() -> None:
    world = ordered_world(retain_acked_messages=True)
    publish(world, "k", "1", "2", "3")
    first, second, _ = world.pull()
    world.ack([first])
    subscription = "projects/test-project/subscriptions/workers"
    world.call(
        "Seek", "SeekRequest", subscription=subscription, time={"seconds": int(world.now_s) - 1}
    )
    world.ack([second])
    assert world.pull_data() == ["1", "2", "3"]
