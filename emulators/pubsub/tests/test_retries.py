"""Retry policy and dead letters: what happens to a message that keeps failing."""

from typing import Any

import pytest

from pubsub_emulator.errors import InvalidArgument, ResourceNotFound
from tests.world import World, message, topic_path


def dead_letter_world(**fields: Any) -> World:
    world = World()
    world.topic()
    world.topic("dead")
    policy = {"dead_letter_topic": topic_path("dead"), "max_delivery_attempts": 5}
    world.subscription(dead_letter_policy=policy, **fields)
    world.subscription("morgue", "dead")
    return world


def test_attempts_count_nacks_and_expired_leases() -> None:
    world = dead_letter_world()
    world.publish("a")
    attempts = []
    for turn in range(4):
        pulled = world.pull()
        attempts.append(pulled[0].delivery_attempt)
        if turn % 2:
            world.nack(pulled)
        else:
            world.advance(10)
    assert attempts == [1, 2, 3, 4]


def test_attempts_are_zero_without_a_dead_letter_policy(world: World) -> None:
    world.publish("a")
    assert world.pull()[0].delivery_attempt == 0


def test_message_is_dead_lettered_after_its_last_attempt() -> None:
    world = dead_letter_world()
    world.publish(message("a", model="m"))
    published = world.now_s
    for _ in range(5):
        assert world.pull("morgue") == []
        world.nack(world.pull())
    assert world.pull() == []
    (letter,) = world.pull("morgue")
    assert letter.data == "a"
    assert dict(letter.message.attributes) == {
        "model": "m",
        "CloudPubSubDeadLetterSourceDeliveryCount": "5",
        "CloudPubSubDeadLetterSourceSubscription": "workers",
        "CloudPubSubDeadLetterSourceSubscriptionProject": "test-project",
        "CloudPubSubDeadLetterSourceTopicPublishTime": "2027-01-15T08:00:00.000+00:00",
    }
    assert published == 1_800_000_000


def test_ack_on_the_last_attempt_leaves_no_letter() -> None:
    world = dead_letter_world()
    world.publish("a")
    for _ in range(4):
        world.nack(world.pull())
    world.ack(world.pull())
    world.advance(60)
    assert world.pull("morgue") == []


def test_message_stays_when_the_dead_letter_topic_is_gone() -> None:
    world = dead_letter_world()
    world.call("DeleteTopic", "DeleteTopicRequest", topic=topic_path("dead"))
    world.publish("a")
    for _ in range(7):
        world.nack(world.pull())
    assert world.pull()[0].delivery_attempt == 8


def test_dead_letter_lets_the_next_of_its_key_out() -> None:
    world = dead_letter_world(enable_message_ordering=True)
    world.publish(message("1", ordering_key="k"), message("2", ordering_key="k"))
    for _ in range(5):
        world.nack(world.pull())
    assert world.pull_data() == ["2"]
    assert world.pull("morgue")[0].message.ordering_key == "k"


def test_dead_letter_topic_must_exist() -> None:
    world = World()
    world.topic()
    with pytest.raises(ResourceNotFound, match=r"Resource not found \(resource=missing\)\."):
        world.subscription(dead_letter_policy={"dead_letter_topic": topic_path("missing")})


@pytest.mark.parametrize("attempts", [1, 4, 101])
def test_attempts_out_of_range_are_refused(attempts: int) -> None:
    world = World()
    world.topic()
    policy = {"dead_letter_topic": topic_path("jobs"), "max_delivery_attempts": attempts}
    with pytest.raises(InvalidArgument, match="max_delivery_attempts"):
        world.subscription(dead_letter_policy=policy)


def test_backoff_doubles_from_minimum_to_maximum() -> None:
    world = World()
    world.topic()
    world.subscription(
        retry_policy={"minimum_backoff": {"seconds": 2}, "maximum_backoff": {"seconds": 10}}
    )
    world.publish("a")
    for expected_s in (2, 4, 8, 10, 10):
        world.nack(world.pull())
        world.advance(expected_s - 0.01)
        assert world.pull() == []
        world.advance(0.01)
    assert world.pull_data() == ["a"]


def test_backoff_follows_an_expired_lease_too() -> None:
    world = World()
    world.topic()
    world.subscription(retry_policy={"minimum_backoff": {"seconds": 3}})
    world.publish("a")
    world.pull()
    world.advance(12.9)
    assert world.pull() == []
    world.advance(0.1)
    assert world.pull_data() == ["a"]


def test_empty_retry_policy_means_ten_seconds() -> None:
    world = World()
    world.topic()
    world.subscription(retry_policy={})
    world.publish("a")
    world.nack(world.pull())
    world.advance(9.9)
    assert world.pull() == []
    world.advance(0.1)
    assert world.pull_data() == ["a"]


def test_ack_during_backoff_settles() -> None:
    world = World()
    world.topic()
    world.subscription(retry_policy={"minimum_backoff": {"seconds": 3}})
    world.publish("a")
    pulled = world.pull()
    world.nack(pulled)
    world.ack(pulled)
    world.advance(60)
    assert world.pull() == []


@pytest.mark.parametrize(
    "policy",
    [
        {"minimum_backoff": {"seconds": 601}},
        {"maximum_backoff": {"seconds": 601}},
        {"minimum_backoff": {"seconds": -1}},
        {"minimum_backoff": {"seconds": 20}, "maximum_backoff": {"seconds": 10}},
    ],
)
def test_backoff_out_of_range_is_refused(policy: dict[str, dict[str, int]]) -> None:
    world = World()
    world.topic()
    with pytest.raises(InvalidArgument, match="backoff"):
        world.subscription(retry_policy=policy)
