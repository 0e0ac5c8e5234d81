"""Limits on a publish, and the attributes that the server adds."""

import pytest

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.protos import PubsubMessage
from tests.world import World, message


def test_ids_are_unique_and_in_order(world: World) -> None:
    ids = [*world.publish("a", "b"), *world.publish("c")]
    assert len(set(ids)) == 3
    assert [received.message.message_id for received in world.pull()] == ids


def test_server_sets_id_and_time_whatever_the_publisher_wrote(world: World) -> None:
    world.publish(PubsubMessage(data=b"a", message_id="mine", publish_time={"seconds": 1}))
    (pulled,) = world.pull()
    assert pulled.message.message_id != "mine"
    assert pulled.message.publish_time.seconds == int(world.now_s)


def test_attributes_alone_are_a_message(world: World) -> None:
    world.publish(message(model="m"))
    assert dict(world.pull()[0].message.attributes) == {"model": "m"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "message_count is too small. You passed 0 "),
        ([message("x")] * 1001, "message_count is too large. You passed 1001 "),
        ([message("x"), message()], "messages in the publish request are empty"),
        ([message("x" * (10 * 1024 * 1024))], "exceeds the limit: 10485760 bytes"),
        ([PubsubMessage(attributes={"": "v"})], "attribute key size in bytes is too small"),
        (
            [PubsubMessage(attributes={"k" * 257: "v"})],
            "attribute key size in bytes is too large. You passed 257 ",
        ),
        (
            [PubsubMessage(attributes={"é" * 129: "v"})],
            "attribute key size in bytes is too large. You passed 258 ",
        ),
        (
            [PubsubMessage(attributes={"k": "v" * 1025})],
            "attribute value size in bytes is too large",
        ),
        (
            [PubsubMessage(attributes={f"k{i}": "v" for i in range(101)})],
            "attribute_count is too large",
        ),
        ([PubsubMessage(attributes={"google": "v"})], "must not begin with 'goog'"),
        ([message("x", ordering_key="k" * 1025)], "ordering_key size in bytes is too large"),
        ([message("x", ordering_key="k"), message("x", ordering_key="l")], "same ordering key"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_publish_out_of_bounds_is_refused_whole(
    world: World, messages: list[PubsubMessage], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        world.publish(*messages)
    assert reason in str(refusal.value)
    assert world.pull() == []


def test_limits_themselves_are_fine(world: World) -> None:
    world.publish(
        PubsubMessage(
            attributes={"k" * 256: "v" * 1024, "é" * 128: "é" * 512, "googclient_traceparent": "x"},
            ordering_key="k" * 1024,
        )
    )
    world.publish(*["x"] * 1000)
    assert len(world.pull()) == 1000
