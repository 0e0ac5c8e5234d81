"""Pull over a real connection: when it waits and when it is rejected."""

import asyncio

import grpc
import pytest

from pubsub_emulator.server import PubsubServer
from tests.wire import TOPIC, Wire, until

pytestmark = pytest.mark.anyio

SUBSCRIPTION = "projects/p/subscriptions/workers"


async def test_pull_waits_for_the_first_message(wire: Wire, server: PubsubServer) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    pull = asyncio.create_task(wire.pull(SUBSCRIPTION))
    backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
    await until(lambda: len(backlog.consumers) == 1)
    await wire.publish(TOPIC, "a")
    assert [received.message.data for received in (await pull).received_messages] == [b"a"]
    assert not len(backlog.consumers)


async def test_pull_at_once_returns_empty(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    response = await wire.pull(SUBSCRIPTION, return_immediately=True)
    assert list(response.received_messages) == []


async def test_pull_returns_empty_before_its_caller_gives_up(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    response = await wire.pull(SUBSCRIPTION, limit_s=1.0)
    assert list(response.received_messages) == []


async def test_pull_takes_no_more_than_asked(wire: Wire) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    await wire.publish(TOPIC, *"abc")
    assert len((await wire.pull(SUBSCRIPTION, max_messages=2)).received_messages) == 2
    assert len((await wire.pull(SUBSCRIPTION, max_messages=2)).received_messages) == 1


@pytest.mark.parametrize("max_messages", [0, -1])
async def test_pull_of_nothing_is_refused(wire: Wire, max_messages: int) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await wire.pull(SUBSCRIPTION, max_messages=max_messages)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_messages" in str(error.value.details())


async def test_waiting_pull_ends_with_not_found_when_the_subscription_goes(
    wire: Wire, server: PubsubServer
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    pull = asyncio.create_task(wire.pull(SUBSCRIPTION))
    backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
    await until(lambda: len(backlog.consumers) == 1)
    await wire.delete_subscription(SUBSCRIPTION)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await pull
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
