"""What Pub/Sub sends to a function, in any of its forms, as the one message that it is about.

Read here and not by functions-framework: its CloudEvent targets answer 400 to a raw push under
ASGI, and to a message that has attributes only under WSGI too, so Pub/Sub would repeat it for ever.
Formats: https://cloud.google.com/pubsub/docs/push,
https://cloud.google.com/pubsub/docs/payload-unwrapping and, for CloudEvents,
https://googleapis.github.io/google-cloudevents/examples/binary/pubsub
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cloudevents.exceptions import GenericException
from cloudevents.http import from_http

from shared.errors import UndecodableMessage
from shared.transport import Message

_METADATA = "x-goog-pubsub-"
_CREDENTIALS = frozenset({"authorization", "cookie", "x-serverless-authorization"})

# JSON can say half a character, which neither Redis nor Pub/Sub takes.
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_push(headers: Mapping[str, str], body: bytes) -> Message:
    """The message that a request carries.

    Args:
        headers: with names in lower case.
        body: a push (wrapped or not), or a CloudEvent (binary or structured) as Eventarc sends it.

    Raises:
        UndecodableMessage: it carries none.
    """
    if "ce-specversion" in headers or headers.get("content-type", "").startswith(
        "application/cloudevents"
    ):
        return _wrapped(_event_data(headers, body))
    if f"{_METADATA}message-id" in headers:
        return _unwrapped(headers, body)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("message"), dict):
        return _wrapped(found)
    # An unwrapped push without metadata is the message's data and nothing else.
    return Message(body, {}, "", "")


def _event_data(headers: Mapping[str, str], body: bytes) -> Any:
    try:
        return from_http(dict(headers), body).get_data()
    except (GenericException, ValueError, RecursionError) as error:
        # Its message would repeat the event, which has what a caller wrote.
        raise UndecodableMessage(f"no CloudEvent: {type(error).__name__}", field="data") from None


def _wrapped(envelope: Any) -> Message:
    message = envelope.get("message") if isinstance(envelope, dict) else None
    if not isinstance(message, dict):
        raise UndecodableMessage("the envelope has no message", field="data")
    attributes = message.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(
        isinstance(value, str) for value in attributes.values()
    ):
        raise UndecodableMessage("the message's attributes are no strings", field="attributes")
    if any(_SURROGATE.search(text) for pair in attributes.items() for text in pair):
        raise UndecodableMessage("the message's attributes are no Unicode text", field="attributes")
    try:
        data = base64.b64decode(message.get("data") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UndecodableMessage(
            f"the message's data is no base64: {error}", field="data"
        ) from error
    return Message(
        data,
        attributes,
        str(message.get("messageId") or message.get("message_id") or ""),
        "",
        publish_time_s=_unix_s(message.get("publishTime") or message.get("publish_time")),
        delivery_attempt=attempt
        if isinstance(attempt := envelope.get("deliveryAttempt"), int)
        else 0,
        ordering_key=str(message.get("orderingKey") or ""),
    )


def _unwrapped(headers: Mapping[str, str], body: bytes) -> Message:
    """Metadata and attributes are headers, among those of HTTP.

    Readers of an attribute know its name.
    """
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in headers.items()
        if name.startswith(_METADATA)
    }
    others = {name: value for name, value in headers.items() if not name.startswith(_METADATA)}
    attributes = {name: value for name, value in others.items() if name not in _CREDENTIALS}
    return Message(
        body,
        attributes,
        metadata["message-id"],
        "",
        publish_time_s=_unix_s(metadata.get("publish-time")),
        ordering_key=metadata.get("ordering-key", ""),
    )


def _unix_s(moment: Any) -> float:
    """An RFC 3339 timestamp as unix seconds. 0 if there is none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return 0.0
