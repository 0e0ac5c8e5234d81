"""Ordering keys: the oldest message of a key first, the next only when it is done with."""

from typing import Any

from tests.infra.pubsub.world import World, message


def ordered_world(**fields: Any) -> World:
    world = World()
    world.topic()
    world.subscription(enable_message_ordering=True, **fields)
    return world


def publish(world: World, key: str, *data: str) -> None:
    world.publish(*(message(each, ordering_key=key) for each in data))


def test_only_the_oldest_of_a_key_is_out() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2", "3")
    seen = []
    while pulled := world.pull():
        assert len(pulled) == 1
        seen.append(pulled[0].data)
        world.ack(pulled)
    assert seen == ["1", "2", "3"]


def test_keys_do_not_wait_for_each_other() -> None:
    world = ordered_world()
    publish(world, "k", "k1", "k2")
    publish(world, "l", "l1")
    publish(world, "", "free", "free2")
    assert world.pull_data() == ["k1", "l1", "free", "free2"]


def test_redelivery_brings_the_later_ones_after_it() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2")
    world.nack(world.pull())
    first = world.pull()
    assert [each.data for each in first] == ["1"]
    world.ack(first)
    assert world.pull_data() == ["2"]


def test_expired_lease_keeps_the_order() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2")
    world.pull()
    world.advance(10)
    assert world.pull_data() == ["1"]


def test_backoff_of_the_oldest_holds_its_key_only() -> None:
    world = ordered_world(
        retry_policy={"minimum_backoff": {"seconds": 5}, "maximum_backoff": {"seconds": 5}}
    )
    publish(world, "k", "k1", "k2")
    world.nack(world.pull())
    publish(world, "l", "l1")
    assert world.pull_data() == ["l1"]
    world.advance(5)
    assert world.pull_data() == ["k1"]


def test_late_ack_of_a_held_back_message_lets_the_next_out() -> None:
    world = ordered_world()
    publish(world, "k", "1", "2")
    late = world.pull()
    world.advance(10)
    world.ack(late)
    assert world.pull_data() == ["2"]


def test_without_ordering_the_key_is_only_carried() -> None:
    world = World()
    world.topic()
    world.subscription()
    publish(world, "k", "1", "2")
    pulled = world.pull()
    assert [each.data for each in pulled] == ["1", "2"]
    assert pulled[0].message.ordering_key == "k"


def test_seek_back_redelivers_the_key_from_the_older_message() -> None:
    world = ordered_world(retain_acked_messages=True)
    publish(world, "k", "1", "2", "3")
    world.ack(world.pull())
    second = world.pull()
    assert [each.data for each in second] == ["2"]
    subscription = "projects/test-project/subscriptions/workers"
    world.call(
        "Seek", "SeekRequest", subscription=subscription, time={"seconds": int(world.now_s) - 1}
    )
    seen = []
    while pulled := world.pull():
        seen += [each.data for each in pulled]
        world.ack(pulled)
    assert seen == ["1", "2", "3"]
