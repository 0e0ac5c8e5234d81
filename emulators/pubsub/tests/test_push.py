"""Push to a real HTTP server: both payload formats, responses that ack, and what others do."""

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pubsub_emulator.http_connection import HttpConnection, HttpFailed
from pubsub_emulator.protos import message_class
from pubsub_emulator.server import PubsubServer, serve
from tests.endpoint import Endpoint, listening_endpoint
from tests.wire import TOPIC, Wire, connect, until

pytestmark = pytest.mark.anyio

SUBSCRIPTION = "projects/p/subscriptions/pushed"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with listening_endpoint() as endpoint:
        yield endpoint


def is_settled(server: PubsubServer) -> bool:
    return server.broker.registry.storage.held_bytes == 0


async def next_post(endpoint: Endpoint) -> tuple[str, dict[str, str], bytes]:
    return await asyncio.to_thread(endpoint.next_post)


async def modify_push(wire: Wire, **push_config: Any) -> None:
    request = message_class("ModifyPushConfigRequest")(
        subscription=SUBSCRIPTION, push_config=push_config
    )
    await wire.call("Subscriber", "ModifyPushConfig", request, "Empty")


async def test_message_arrives_in_the_envelope_and_is_acked(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
    (message_id,) = await wire.publish(TOPIC, "hello", attributes={"model": "m"}, ordering_key="k")
    path, headers, body = await next_post(endpoint)
    assert path == "/push?token=t"
    assert headers["content-type"] == "application/json"
    envelope = json.loads(body)
    assert envelope["subscription"] == SUBSCRIPTION
    assert "deliveryAttempt" not in envelope
    message = envelope["message"]
    assert base64.b64decode(message["data"]) == b"hello"
    assert message["attributes"] == {"model": "m"}
    assert message["messageId"] == message["message_id"] == message_id
    assert message["publishTime"] == message["publish_time"]
    assert message["publishTime"].endswith("Z")
    assert message["orderingKey"] == "k"
    await until(lambda: is_settled(server))


async def test_unwrapped_message_is_the_body(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    push_config = {"push_endpoint": endpoint.url, "no_wrapper": {}}
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config=push_config)
    await wire.publish(TOPIC, "hello", attributes={"model": "m"})
    _, headers, body = await next_post(endpoint)
    assert body == b"hello"
    assert "model" not in headers
    assert "x-goog-pubsub-message-id" not in headers
    await until(lambda: is_settled(server))


async def test_unwrapped_message_carries_its_metadata_as_headers_if_asked(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    push_config = {"push_endpoint": endpoint.url, "no_wrapper": {"write_metadata": True}}
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config=push_config)
    attributes = {
        "model": "m",
        "not a token": "x",
        "newline": "a\r\nb",
        "content-length": "99",
        "Content-Type": "a/b",
    }
    (message_id,) = await wire.publish(TOPIC, "hello", attributes=attributes, ordering_key="k")
    _, headers, body = await next_post(endpoint)
    assert body == b"hello"
    assert headers["x-goog-pubsub-subscription-name"] == SUBSCRIPTION
    assert headers["x-goog-pubsub-message-id"] == message_id
    assert headers["x-goog-pubsub-publish-time"].endswith("Z")
    assert headers["x-goog-pubsub-ordering-key"] == "k"
    assert headers["model"] == "m"
    assert headers["content-type"] == "a/b"
    assert headers["content-length"] == "5"
    assert "newline" not in headers
    await until(lambda: is_settled(server))


@pytest.mark.parametrize("status", [102, 200, 201, 202, 204])
async def test_status_that_acks(
    wire: Wire, server: PubsubServer, endpoint: Endpoint, status: int
) -> None:
    endpoint.answers = [status]
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
    await wire.publish(TOPIC, "a")
    await next_post(endpoint)
    await until(lambda: is_settled(server))
    assert endpoint.posts.empty()


@pytest.mark.parametrize("status", [203, 206, 302, 404, 500])
async def test_status_that_does_not_ack_brings_the_message_again(
    wire: Wire, server: PubsubServer, endpoint: Endpoint, status: int
) -> None:
    endpoint.answers = [status, 204]
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
    await wire.publish(TOPIC, "a")
    first, second = await next_post(endpoint), await next_post(endpoint)
    assert first == second
    await until(lambda: is_settled(server))


async def test_repeated_failure_is_dead_lettered_with_its_attempts(
    wire: Wire, endpoint: Endpoint
) -> None:
    endpoint.answers = [500]
    dead = "projects/p/topics/dead"
    await wire.topic(dead)
    await wire.subscription("projects/p/subscriptions/morgue", dead)
    await wire.subscription(
        SUBSCRIPTION,
        TOPIC,
        push_config={"push_endpoint": endpoint.url},
        dead_letter_policy={"dead_letter_topic": dead, "max_delivery_attempts": 5},
        retry_policy={
            "minimum_backoff": {"nanos": 1_000_000},
            "maximum_backoff": {"nanos": 1_000_000},
        },
    )
    await wire.publish(TOPIC, "a")
    bodies = [json.loads((await next_post(endpoint))[2]) for _ in range(5)]
    assert [body["deliveryAttempt"] for body in bodies] == [1, 2, 3, 4, 5]
    (letter,) = (await wire.pull("projects/p/subscriptions/morgue")).received_messages
    assert letter.message.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert endpoint.posts.empty()


async def test_unreachable_endpoint_is_tried_again_until_it_listens(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/"
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": nobody})
    await wire.publish(TOPIC, "a")
    backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
    await until(lambda: backlog.attempts_of_oldest >= 2)
    await modify_push(wire, push_endpoint=endpoint.url)
    assert (
        json.loads((await next_post(endpoint))[2])["message"]["data"]
        == base64.b64encode(b"a").decode()
    )


async def test_connection_is_kept_for_the_next_post(endpoint: Endpoint) -> None:
    endpoint.answers = [200, 500, 204]
    connection = HttpConnection(endpoint.url)
    answers = [await connection.post([], body) for body in (b"a", b"", b"c")]
    assert answers == [(200, b"ok"), (500, b"ok"), (204, b"")]
    assert endpoint.connections == 1
    connection.close()


@pytest.mark.parametrize("path", ["a b", "\u00fc", "\x7f"])
async def test_url_that_http_can_not_send_is_a_failure(endpoint: Endpoint, path: str) -> None:
    """A data directory from an older release may contain such a URL."""
    connection = HttpConnection(f"{endpoint.url}/{path}")
    with pytest.raises(HttpFailed, match="the URL or a header is invalid"):
        await connection.post([], b"a")


async def test_post_on_a_connection_that_the_other_side_closed_goes_over_a_new_one() -> None:
    connections = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"body")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with listener:
        connection = HttpConnection(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
        assert [(await connection.post([], b"body")).status for _ in range(3)] == [200] * 3
        connection.close()
    assert connections == 3


async def test_post_that_was_cut_off_leaves_no_connection_to_reuse() -> None:
    connections = 0

    async def answer_from_the_second_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            await reader.readuntil(b"body")
            writer.write(b"HTTP/1.1 202 Accepted\r\n\r\nuntil the end")
        else:
            await reader.read()
        writer.close()

    listener = await asyncio.start_server(answer_from_the_second_on, "127.0.0.1", 0)
    async with listener:
        connection = HttpConnection(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connection.post([], b"body")
        assert await connection.post([], b"body") == (202, b"until the end")
        connection.close()


async def test_garbage_instead_of_http_counts_as_a_failure(
    wire: Wire, server: PubsubServer
) -> None:
    async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"\x00nonsense\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(talk_nonsense, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        await wire.subscription(
            SUBSCRIPTION, TOPIC, push_config={"push_endpoint": f"http://127.0.0.1:{port}/"}
        )
        await wire.publish(TOPIC, "a")
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        await until(lambda: backlog.attempts_of_oldest >= 2)


async def test_turning_to_pull_stops_the_pushes(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
    await wire.publish(TOPIC, "pushed")
    await next_post(endpoint)
    await until(lambda: is_settled(server))
    await modify_push(wire)
    await wire.publish(TOPIC, "pulled")
    (received,) = (await wire.pull(SUBSCRIPTION)).received_messages
    assert received.message.data == b"pulled"
    assert endpoint.posts.empty()


async def test_deleted_subscription_pushes_no_more(
    wire: Wire, server: PubsubServer, endpoint: Endpoint
) -> None:
    endpoint.answers = [500]
    await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
    await wire.publish(TOPIC, "a")
    await next_post(endpoint)
    await wire.delete_subscription(SUBSCRIPTION)
    await until(lambda: is_settled(server))


async def test_push_goes_on_after_a_restart(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answers = [500]
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC, push_config={"push_endpoint": endpoint.url})
        await wire.publish(TOPIC, "a")
        await next_post(endpoint)
    while not endpoint.posts.empty():
        endpoint.posts.get()
    endpoint.answers = [204]
    async with serve(data_dir=tmp_path) as server:
        await next_post(endpoint)
        await until(lambda: is_settled(server))
