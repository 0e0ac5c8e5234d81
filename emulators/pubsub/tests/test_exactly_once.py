"""Exactly-once delivery: only the latest ack id is valid, and errors list the others."""

from collections.abc import Callable

import grpc
import pytest

from pubsub_emulator.errors import INVALID_ACK_ID, AckIdsRefused, InvalidArgument
from pubsub_emulator.protos import message_class
from pubsub_emulator.server import PubsubServer
from tests.wire import TOPIC, Wire, connect, refused_ids
from tests.world import Pulled, World

SUBSCRIPTION = "projects/p/subscriptions/once"


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
    with pytest.raises(InvalidArgument, match="only supported for pull subscriptions"):
        once.subscription(
            "pushed",
            enable_exactly_once_delivery=True,
            push_config={"push_endpoint": "http://localhost:1/x"},
        )


@pytest.mark.parametrize("name", ["Acknowledge", "ModifyAckDeadline"])
@pytest.mark.anyio
async def test_each_refused_id_is_named_however_many_they_are(wire: Wire, name: str) -> None:
    """Clients assume that any id missing from the list was confirmed.

    Google's clients send 1,000 or 2,500 ids at a time.
    """
    await wire.subscription(SUBSCRIPTION, TOPIC, enable_exactly_once_delivery=True)
    ack_ids = [f"6612340c2ab73.{1_795_653_892_693_352 + number}.1" for number in range(15_000)]
    request = message_class(f"{name}Request")(subscription=SUBSCRIPTION, ack_ids=ack_ids)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await wire.call("Subscriber", name, request, "Empty")
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused_ids(refusal.value) == dict.fromkeys(ack_ids, INVALID_ACK_ID)


@pytest.mark.anyio
async def test_client_without_room_for_all_ids_takes_none_as_confirmed(
    server: PubsubServer,
) -> None:
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC, enable_exactly_once_delivery=True)
    request = message_class("AcknowledgeRequest")(
        subscription=SUBSCRIPTION, ack_ids=[f"1.{number}.1" for number in range(2_500)]
    )
    options = [("grpc.use_local_subchannel_pool", 1)]  # 8 KiB, the default
    async with grpc.aio.insecure_channel(server.endpoint, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await Wire(channel).call("Subscriber", "Acknowledge", request, "Empty")
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("call", [World.ack, World.nack])
def test_request_above_the_limit_of_the_service_is_refused_whole(
    once: World, call: Callable[..., None]
) -> None:
    once.publish("a")
    (pulled,) = once.pull()
    stale = Pulled("", "x" * 600, 0, pulled.message)
    with pytest.raises(InvalidArgument, match="exceeds the limit: 524288 bytes"):
        call(once, [pulled, *[stale] * 1000])
    once.ack([pulled])
