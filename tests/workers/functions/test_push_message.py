"""Pub/Sub and Eventarc use several message formats. All decode to the same message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.broker.transport import ReceivedMessage
from shared.errors import UndecodableMessage
from workers.functions.handler import handle_message, read_push

PUBLISHED = "2026-11-21T19:59:19.123456789Z"
JSON = {"content-type": "application/json"}
EVENT = {
    "specversion": "1.0",
    "id": "7",
    "source": "//pubsub.googleapis.com/projects/p/topics/t",
    "type": "google.cloud.pubsub.topic.v1.messagePublished",
}


def envelope(**message: Any) -> dict[str, Any]:
    return {
        "message": {"messageId": "7", "publishTime": PUBLISHED} | message,
        "subscription": "projects/p/subscriptions/s",
        "deliveryAttempt": 3,
    }


FULL = envelope(data="aGk=", attributes={"a": "1"}, orderingKey="k")
MESSAGE = ReceivedMessage(
    b"hi",
    {"a": "1"},
    "7",
    "",
    publish_time_s=1795291159.123456,
    delivery_attempt=3,
    ordering_key="k",
)


def fields(message: ReceivedMessage) -> tuple[Any, ...]:
    return (
        message.data,
        dict(message.attributes),
        message.message_id,
        message.publish_time_s,
        message.delivery_attempt,
        message.ordering_key,
    )


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (JSON, FULL),
        (JSON | {f"ce-{name}": value for name, value in EVENT.items()}, FULL),
        ({"content-type": "application/cloudevents+json"}, EVENT | {"data": FULL}),
    ],
    ids=["push", "binary event", "structured event"],
)
def test_wrapped_forms(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert fields(read_push(headers, json.dumps(body).encode())) == fields(MESSAGE)


def test_unwrapped_form() -> None:
    metadata = {
        "message-id": "7",
        "publish-time": PUBLISHED,
        "ordering-key": "k",
        "subscription-name": "s",
    }
    headers = {f"x-goog-pubsub-{name}": value for name, value in metadata.items()}
    message = read_push(headers | {"a": "1", "authorization": "Bearer secret"}, b"hi")
    assert fields(message) == (b"hi", {"a": "1"}, "7", MESSAGE.publish_time_s, 0, "k")


def test_unwrapped_form_without_metadata() -> None:
    assert (
        read_push(JSON, b'{"id": "r", "event": "start"}').data == b'{"id": "r", "event": "start"}'
    )


@pytest.mark.parametrize("empty", [{}, {"data": ""}, {"data": None}])
def test_message_of_attributes_alone(empty: dict[str, Any]) -> None:
    message = read_push(JSON, json.dumps(envelope(attributes={"a": "1"}, **empty)).encode())
    assert (message.data, message.attributes) == (b"", {"a": "1"})


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (JSON, envelope(data="no base64!")),
        (JSON, envelope(data=5)),
        (JSON, envelope(attributes={"a": 1})),
        (JSON, envelope(attributes=["a"])),
        (JSON, envelope(attributes={"request_id": "\ud800"})),
        (JSON, envelope(attributes={"\ud800": "a"})),
        (JSON, envelope(messageId="\ud800")),
        (JSON, envelope(orderingKey="\ud800")),
        (JSON | {"ce-specversion": "1.0"}, FULL),
        ({"content-type": "application/cloudevents+json"}, EVENT | {"data": {"message": "hi"}}),
        ({"content-type": "application/cloudevents+json"}, EVENT | {"data_base64": 5}),
        ({"content-type": "application/cloudevents+json"}, ["no event"]),
    ],
)
def test_what_carries_no_message_is_refused(headers: dict[str, str], body: Any) -> None:
    with pytest.raises(UndecodableMessage):
        read_push(headers, json.dumps(body).encode())


@pytest.mark.anyio
async def test_message_whose_function_has_a_bug_comes_again() -> None:
    async def fail(message: ReceivedMessage) -> None:
        raise KeyError(message.message_id)

    assert await handle_message(MESSAGE, "webhook", fail) == "internal error"


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"message":' * 100_000])
def test_body_that_is_nested_without_end_is_data_or_refused(body: bytes) -> None:
    assert read_push(JSON, body).data == body
    for headers in (
        JSON | {"ce-specversion": "1.0"},
        {"content-type": "application/cloudevents+json"},
    ):
        with pytest.raises(UndecodableMessage):
            read_push(headers, body)
