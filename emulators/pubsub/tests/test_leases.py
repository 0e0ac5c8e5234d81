"""Leases: how long a consumer may hold a message, and what its ack id can still do."""

import pytest

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.ack_calls import modify_ack_deadline
from tests.world import World, message


def test_message_is_out_once_until_its_lease_ends(world: World) -> None:
    world.publish("a")
    assert [message.data for message in world.pull()] == ["a"]
    world.advance(9.9)
    assert world.pull() == []
    world.advance(0.1)
    assert world.pull_data() == ["a"]


def test_acked_message_never_comes_back(world: World) -> None:
    world.publish("a")
    world.ack(world.pull())
    world.advance(86400)
    assert world.pull() == []


def test_nack_makes_ready_at_once(world: World) -> None:
    world.publish("a")
    world.nack(world.pull())
    assert world.pull_data() == ["a"]


def test_extension_counts_from_the_request(world: World) -> None:
    world.publish("a")
    pulled = world.pull()
    world.advance(9)
    world.modify(pulled, 20)
    world.advance(19.9)
    assert world.pull() == []
    world.advance(0.1)
    assert world.pull_data() == ["a"]


def test_extension_can_shorten(world: World) -> None:
    world.publish("a")
    world.modify(world.pull(), 1)
    world.advance(1)
    assert world.pull_data() == ["a"]


def test_ack_after_the_lease_ended_still_acks(world: World) -> None:
    world.publish("a")
    late = world.pull()
    world.advance(10)
    world.ack(late)
    assert world.pull() == []


def test_ack_of_an_earlier_delivery_acks_for_everyone(world: World) -> None:
    world.publish("a")
    first = world.pull()
    world.advance(10)
    assert world.pull_data() == ["a"]
    world.ack(first)
    world.advance(10)
    assert world.pull() == []


def test_nack_of_an_earlier_delivery_leaves_the_new_lease(world: World) -> None:
    world.publish("a")
    first = world.pull()
    world.advance(10)
    second = world.pull()
    world.nack(first)
    assert world.pull() == []
    world.ack(second)


def test_acking_twice_is_no_error(world: World) -> None:
    world.publish("a")
    pulled = world.pull()
    world.ack(pulled)
    world.ack(pulled)
    world.advance(3600)
    assert world.pull() == []


@pytest.mark.parametrize("ack_id", ["", "nonsense", "a.b", "a.b.c", "a.1.2.3"])
def test_malformed_ack_id_is_refused_and_nothing_is_acked(world: World, ack_id: str) -> None:
    world.publish("a")
    (pulled,) = world.pull()
    request = {
        "subscription": "projects/test-project/subscriptions/workers",
        "ack_ids": [pulled.ack_id, ack_id],
    }
    with pytest.raises(InvalidArgument, match="invalid ack ID"):
        world.call("Acknowledge", "AcknowledgeRequest", **request)
    world.advance(10)
    assert world.pull_data() == ["a"]


def test_ack_id_of_another_subscription_does_nothing(world: World) -> None:
    world.subscription("others")
    world.publish("a")
    world.ack(world.pull("others"), "workers")
    assert world.pull_data() == ["a"]


def test_ack_id_from_the_future_does_nothing(world: World) -> None:
    world.publish("a")
    (pulled,) = world.pull()
    prefix, number, _ = pulled.ack_id.split(".")
    request = {
        "subscription": "projects/test-project/subscriptions/workers",
        "ack_ids": [f"{prefix}.{number}.9"],
    }
    world.call("Acknowledge", "AcknowledgeRequest", **request)
    world.advance(10)
    assert world.pull_data() == ["a"]


@pytest.mark.parametrize("deadline_s", [-1, 601])
def test_deadline_out_of_range_is_refused(world: World, deadline_s: int) -> None:
    world.publish("a")
    with pytest.raises(InvalidArgument, match="ack_deadline_seconds"):
        world.modify(world.pull(), deadline_s)


def test_nack_and_extension_of_one_message_in_one_request_is_a_nack(world: World) -> None:
    world.publish("a")
    (pulled,) = world.pull()
    backlog = world.broker.pullable("projects/test-project/subscriptions/workers").backlog
    modify_ack_deadline(backlog, [pulled.ack_id, pulled.ack_id], [0, 60])
    assert world.pull_data() == ["a"]


def test_messages_come_in_order_of_arrival(world: World) -> None:
    world.publish("a", "b")
    world.publish("c")
    assert world.pull_data() == ["a", "b", "c"]


def test_nacked_message_goes_behind_those_that_wait(world: World) -> None:
    world.publish("a", "b")
    world.nack(world.pull(max_messages=1))
    assert world.pull_data() == ["b", "a"]


def test_each_subscription_has_its_own_copy(world: World) -> None:
    world.subscription("others")
    world.publish("a")
    world.ack(world.pull())
    assert world.pull_data("others") == ["a"]


def test_subscription_gets_only_what_is_published_after_it(world: World) -> None:
    world.publish("before")
    world.subscription("others")
    world.publish("after")
    assert world.pull_data("others") == ["after"]


def test_one_take_stays_below_what_clients_accept(world: World) -> None:
    for _ in range(3):
        world.publish(message("x" * 1_500_000))
    assert [len(world.pull()) for _ in range(4)] == [1, 1, 1, 0]


def test_two_nacks_of_one_message_in_one_request_are_one(world: World) -> None:
    world.publish("a")
    (pulled,) = world.pull()
    world.nack([pulled, pulled])
    assert world.pull_data() == ["a"]


@pytest.mark.parametrize("name", ["Acknowledge", "ModifyAckDeadline"])
def test_request_without_ack_ids_is_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidArgument, match="No ack ids"):
        world.call(
            name, f"{name}Request", subscription="projects/test-project/subscriptions/workers"
        )
