"""Exactly-once delivery: only the latest ack id counts, and refusals say so."""

import pytest

from pubsub_emulator.errors import INVALID_ACK_ID, AckIdsRefused, InvalidArgument
from tests.world import World


@pytest.fixture
def once() -> World:
    world = World()
    world.topic()
    world.subscription(enable_exactly_once_delivery=True)
    return world


def test_ack_with_the_latest_id_settles(once: World) -> None:
    once.publish("a")
    once.ack(once.pull())
    once.advance(60)
    assert once.pull() == []


def test_ack_after_the_lease_ended_is_refused_and_the_message_comes_back(once: World) -> None:
    once.publish("a")
    late = once.pull()
    once.advance(10)
    with pytest.raises(AckIdsRefused) as refusal:
        once.ack(late)
    assert refusal.value.metadata == {late[0].ack_id: INVALID_ACK_ID}
    assert refusal.value.status == "INVALID_ARGUMENT"
    assert once.pull_data() == ["a"]


def test_only_the_refused_ids_of_a_request_are_named_the_others_are_acked(once: World) -> None:
    once.publish("a", "b")
    first = once.pull()
    once.nack(first[:1])
    with pytest.raises(AckIdsRefused) as refusal:
        once.ack(first)
    assert list(refusal.value.metadata) == [first[0].ack_id]
    assert once.pull_data() == ["a"]


def test_extension_of_an_ended_lease_is_refused(once: World) -> None:
    once.publish("a")
    late = once.pull()
    once.advance(10)
    with pytest.raises(AckIdsRefused):
        once.modify(late, 60)


def test_earlier_id_is_refused_while_a_newer_delivery_is_out(once: World) -> None:
    once.publish("a")
    first = once.pull()
    once.nack(first)
    second = once.pull()
    with pytest.raises(AckIdsRefused):
        once.ack(first)
    once.ack(second)


def test_malformed_id_is_refused_like_an_expired_one(once: World) -> None:
    request = {
        "subscription": "projects/test-project/subscriptions/workers",
        "ack_ids": ["nonsense"],
    }
    with pytest.raises(AckIdsRefused) as refusal:
        once.call("Acknowledge", "AcknowledgeRequest", **request)
    assert refusal.value.metadata == {"nonsense": INVALID_ACK_ID}


def test_push_and_exactly_once_exclude_each_other(once: World) -> None:
    with pytest.raises(InvalidArgument, match="pull subscriptions only"):
        once.subscription(
            "pushed",
            enable_exactly_once_delivery=True,
            push_config={"push_endpoint": "http://localhost:1/x"},
        )
