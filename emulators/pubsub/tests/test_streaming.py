"""StreamingPull over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from pubsub_emulator.protos import StreamingPullRequest
from pubsub_emulator.server import PubsubServer, serve
from pubsub_emulator.streaming import streaming_pull
from tests.wire import TOPIC, Wire, connect, until

pytestmark = pytest.mark.anyio

SUBSCRIPTION = "projects/p/subscriptions/workers"


async def test_published_message_arrives_and_its_ack_settles_it(
    wire: Wire, server: PubsubServer
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    (message_id,) = await wire.publish(TOPIC, "a", attributes={"model": "m"})
    (received,) = (await stream.receive()).received_messages
    assert received.message.data == b"a"
    assert dict(received.message.attributes) == {"model": "m"}
    assert received.message.message_id == message_id
    await stream.send(ack_ids=[received.ack_id])
    await stream.call.done_writing()
    assert (await stream.end())[0] is grpc.StatusCode.OK
    assert server.broker.registry.storage.held_bytes == 0


async def test_waiting_messages_come_in_one_response(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    await wire.publish(TOPIC, *"abcde")
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    assert [received.message.data for received in (await stream.receive()).received_messages] == [
        b"a",
        b"b",
        b"c",
        b"d",
        b"e",
    ]


async def test_flow_control_holds_messages_back_until_one_is_acked(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION, max_outstanding_messages=2)
    await wire.publish(TOPIC, *"abc")
    first = (await stream.receive()).received_messages
    assert [received.message.data for received in first] == [b"a", b"b"]
    await stream.send(ack_ids=[first[1].ack_id])
    assert [received.message.data for received in (await stream.receive()).received_messages] == [
        b"c"
    ]


async def test_nack_on_the_stream_redelivers(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    await wire.publish(TOPIC, "a")
    (received,) = (await stream.receive()).received_messages
    await stream.send(modify_deadline_ack_ids=[received.ack_id], modify_deadline_seconds=[0])
    (again,) = (await stream.receive()).received_messages
    assert again.message.data == b"a"
    assert again.ack_id != received.ack_id


async def test_half_close_stops_deliveries_and_ends_ok(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    await stream.call.done_writing()
    with pytest.raises(EOFError):
        await stream.receive()
    assert (await stream.end())[0] is grpc.StatusCode.OK
    await wire.publish(TOPIC, "a")
    assert len((await wire.pull(SUBSCRIPTION)).received_messages) == 1


async def test_acks_right_before_the_half_close_count(wire: Wire, server: PubsubServer) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    await wire.publish(TOPIC, *"ab")
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    for received in (await stream.receive()).received_messages:
        await stream.send(ack_ids=[received.ack_id])
    await stream.call.done_writing()
    await stream.end()
    assert server.broker.registry.storage.held_bytes == 0


async def test_leases_of_a_cancelled_stream_stay(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    await wire.publish(TOPIC, "a")
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    await stream.receive()
    stream.call.cancel()
    assert len((await wire.pull(SUBSCRIPTION, return_immediately=True)).received_messages) == 0


async def test_deleting_the_subscription_ends_the_stream_with_not_found(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION, protocol_version=1)
    await stream.send()
    await stream.receive()
    await wire.delete_subscription(SUBSCRIPTION)
    assert await stream.end() == (
        grpc.StatusCode.NOT_FOUND,
        "Resource not found (resource=workers).",
    )


async def test_a_stream_that_is_ending_can_be_canceled(wire: Wire, server: PubsubServer) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def read() -> AsyncIterator[StreamingPullRequest]:
        yield StreamingPullRequest(subscription=SUBSCRIPTION, stream_ack_deadline_seconds=10)
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await may_end.wait()

    call = asyncio.create_task(streaming_pull(server.broker, read(), None))
    await asyncio.sleep(0)
    await wire.delete_subscription(SUBSCRIPTION)
    await is_ending.wait()
    call.cancel()
    may_end.set()
    await asyncio.wait([call])
    assert call.cancelled()


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"stream_ack_deadline_seconds": 10}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"subscription": SUBSCRIPTION}, grpc.StatusCode.INVALID_ARGUMENT),
        (
            {"subscription": SUBSCRIPTION, "stream_ack_deadline_seconds": 9},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            {"subscription": SUBSCRIPTION, "stream_ack_deadline_seconds": 601},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            {"subscription": SUBSCRIPTION + "2", "stream_ack_deadline_seconds": 10},
            grpc.StatusCode.NOT_FOUND,
        ),
    ],
)
async def test_wrong_first_request_ends_the_stream(
    wire: Wire, first: dict[str, object], code: grpc.StatusCode
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.send(**first)
    assert (await stream.end())[0] is code


async def test_stream_closed_before_its_first_request_ends_ok(wire: Wire) -> None:
    stream = wire.stream()
    await stream.call.done_writing()
    assert (await stream.end())[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ({"subscription": SUBSCRIPTION}, "subscription must be set only on the initial"),
        ({"max_outstanding_messages": 5}, "max_outstanding_messages"),
        ({"max_outstanding_bytes": 5}, "max_outstanding_bytes"),
        ({"protocol_version": 1}, "protocol_version"),
        ({"stream_ack_deadline_seconds": 5}, "stream_ack_deadline_seconds is too small"),
        ({"ack_ids": ["nonsense"]}, "invalid ack ID"),
        ({"modify_deadline_ack_ids": ["1.1.1"]}, "must have the same size"),
        (
            {"modify_deadline_ack_ids": ["1.1.1"], "modify_deadline_seconds": [-1]},
            "modify_deadline_seconds",
        ),
    ],
)
async def test_wrong_later_request_ends_the_stream(
    wire: Wire, later: dict[str, object], reason: str
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    await stream.send(**later)
    code, details = await stream.end()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in details


async def test_stream_ack_deadline_can_change_later(wire: Wire, server: PubsubServer) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION, protocol_version=1)
    await stream.send(stream_ack_deadline_seconds=600)
    await stream.receive()
    await wire.publish(TOPIC, "a")
    await stream.receive()
    due_s = server.broker.timers.next_due_s
    assert due_s is not None
    assert 590 < due_s - server.broker.timers.now_s() <= 600


async def test_ping_is_answered_from_protocol_version_1_on(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION, protocol_version=1)
    for _ in range(2):
        await stream.send()
        response = await stream.receive()
        assert response.ByteSize() == 0


async def test_exactly_once_stream_confirms_acks_and_extensions(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC, enable_exactly_once_delivery=True)
    await wire.publish(TOPIC, *"ab")
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    response = await stream.receive()
    assert response.subscription_properties.exactly_once_delivery_enabled
    first, second = (message.ack_id for message in response.received_messages)
    await stream.send(modify_deadline_ack_ids=[first, "gone"], modify_deadline_seconds=[30, 30])
    confirmed = (await stream.receive()).modify_ack_deadline_confirmation
    assert (list(confirmed.ack_ids), list(confirmed.invalid_ack_ids)) == ([first], ["gone"])
    await stream.send(ack_ids=[second, "gone"])
    response = await stream.receive()
    confirmed = response.acknowledge_confirmation
    assert (list(confirmed.ack_ids), list(confirmed.invalid_ack_ids)) == ([second], ["gone"])
    assert response.subscription_properties.exactly_once_delivery_enabled


async def test_ordered_stream_says_so_and_keeps_the_order(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC, enable_message_ordering=True)
    await wire.publish(TOPIC, *"abc", ordering_key="k")
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    response = await stream.receive()
    assert response.subscription_properties.message_ordering_enabled
    assert [received.message.data for received in response.received_messages] == [b"a", b"b", b"c"]
    await wire.publish(TOPIC, "d", ordering_key="k")
    (following,) = (await stream.receive()).received_messages
    assert following.message.data == b"d"


async def test_two_streams_share_the_messages(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    streams = [wire.stream(), wire.stream()]
    for stream in streams:
        await stream.open(SUBSCRIPTION, protocol_version=1)
        await stream.send()
        await stream.receive()
    await wire.publish(TOPIC, *(str(number) for number in range(10)))
    received = [len((await stream.receive()).received_messages) for stream in streams]
    assert received == [5, 5]


async def test_ten_megabyte_message_passes(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    data = "x" * (10 * 1024 * 1024 - 1000)
    await wire.publish(TOPIC, data)
    stream = wire.stream()
    await stream.open(SUBSCRIPTION)
    (received,) = (await stream.receive()).received_messages
    assert len(received.message.data) == len(data)


async def test_stopping_the_server_ends_streams_and_pulls_with_unavailable() -> None:
    running = AsyncExitStack()
    server = await running.enter_async_context(serve())
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        stream = wire.stream()
        await stream.open(SUBSCRIPTION, protocol_version=1)
        await stream.send()
        await stream.receive()
        pull = asyncio.create_task(wire.pull(SUBSCRIPTION))
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        await until(lambda: len(backlog.consumers) == 2)
        stream_end = asyncio.create_task(stream.end())
        await running.aclose()
        assert (await stream_end)[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await pull
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
