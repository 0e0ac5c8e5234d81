"""SIGKILL right after each confirming response: whatever was confirmed still holds after a restart.

The kill comes as soon as the response has been read, before the server does anything else.
"""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pubsub_emulator.protos import message_class
from tests.kept_server import KeptServer
from tests.limits import KILLS, WAIT_LIMIT_S
from tests.wire import TOPIC, Wire, connect, refused_ids

pytestmark = pytest.mark.anyio

SUBSCRIPTION = "projects/p/subscriptions/once"
MESSAGES = 50


Door = Callable[[KeptServer, Wire, list[str]], Awaitable[set[str]]]
"""Acks the given ids and returns the ids named in the response. The response implicitly confirms
all the others.
"""


async def by_unary_call(_: KeptServer, wire: Wire, ack_ids: list[str]) -> set[str]:
    request = message_class("AcknowledgeRequest")(subscription=SUBSCRIPTION, ack_ids=ack_ids)
    try:
        await wire.call("Subscriber", "Acknowledge", request, "Empty")
    except grpc.aio.AioRpcError as error:
        return set(refused_ids(error))
    return set()


async def by_rest(server: KeptServer, _: Wire, ack_ids: list[str]) -> set[str]:
    async with httpx.AsyncClient(base_url=server.rest_endpoint, timeout=WAIT_LIMIT_S) as http:
        answer = await http.post(f"/v1/{SUBSCRIPTION}:acknowledge", json={"ackIds": ack_ids})
    if answer.status_code == 200:
        return set()
    return set(answer.json()["error"]["details"][0]["metadata"])


async def by_stream(_: KeptServer, wire: Wire, ack_ids: list[str]) -> set[str]:
    stream = wire.stream()
    # The stream is limited to one message, which it already holds; the messages that it acks were
    # pulled earlier.
    await stream.open(SUBSCRIPTION, max_outstanding_messages=1)
    await stream.send(ack_ids=ack_ids)
    while not (confirmation := (await stream.receive()).acknowledge_confirmation).ack_ids:
        pass
    refused = set(confirmation.invalid_ack_ids)
    assert {*confirmation.ack_ids, *refused} == set(ack_ids)
    return refused


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeptServer]:
    server = KeptServer(tmp_path, has_rest=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def pulled(wire: Wire) -> list[Any]:
    messages: list[Any] = []
    while batch := (await wire.pull(SUBSCRIPTION, 1000, return_immediately=True)).received_messages:
        messages += batch
    return messages


def data(received: list[Any]) -> set[str]:
    return {delivery.message.data.decode() for delivery in received}


async def make(server: KeptServer) -> None:
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(
            SUBSCRIPTION, TOPIC, enable_exactly_once_delivery=True, ack_deadline_seconds=600
        )


async def test_what_a_publish_confirmed_is_there(server: KeptServer) -> None:
    await make(server)
    published: set[str] = set()
    for kill in range(KILLS):
        async with connect(server.endpoint) as wire:
            texts = [f"{kill}.{number}" for number in range(MESSAGES)]
            await wire.publish(TOPIC, *texts)
            server.kill()
        server.start()
        published.update(texts)
        async with connect(server.endpoint) as wire:
            received = await pulled(wire)
            assert data(received) == published
            await nack(wire, received)


@pytest.mark.parametrize("door", [by_unary_call, by_rest, by_stream])
async def test_what_an_ack_confirmed_does_not_come_again_and_the_rest_does(
    server: KeptServer, door: Door
) -> None:
    await make(server)
    for kill in range(KILLS):
        async with connect(server.endpoint) as wire:
            await wire.publish(TOPIC, *(f"{kill}.{number}" for number in range(MESSAGES)))
            received = await pulled(wire)
            # Messages nacked to invalidate their ids: none, one, or all but one.
            stale = received[: (1, 0, len(received) - 1)[kill % 3]]
            await nack(wire, stale)
            refused = await door(server, wire, [message.ack_id for message in received])
            server.kill()
        server.start()
        assert refused == {message.ack_id for message in stale}
        async with connect(server.endpoint) as wire:
            again = await pulled(wire)
            assert data(again) == data(stale)
            await nack(wire, again)


async def nack(wire: Wire, received: list[Any]) -> None:
    if not received:
        return
    request = message_class("ModifyAckDeadlineRequest")(
        subscription=SUBSCRIPTION, ack_ids=[message.ack_id for message in received]
    )
    await wire.call("Subscriber", "ModifyAckDeadline", request, "Empty")
