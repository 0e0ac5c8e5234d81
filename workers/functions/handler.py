"""Handles a message, whether it was pushed or pulled from a queue.

Authenticates the caller, decodes the message, runs the function, and responds with a status.

A 2xx status acknowledges a message. After any other status, Pub/Sub sends the message again with
increasing backoff. For that reason, a message that can never be handled also gets a 2xx, and is
counted and logged with its IDs. Message contents are never logged.

All formats in which Pub/Sub sends a message to a function are decoded here rather than by
functions-framework. Its CloudEvent targets respond with 400 to a raw push under ASGI and, even
under WSGI, to a message that has only attributes. Pub/Sub would then retry the message forever.
Formats: https://cloud.google.com/pubsub/docs/push,
https://cloud.google.com/pubsub/docs/payload-unwrapping and, for CloudEvents,
https://googleapis.github.io/google-cloudevents/examples/binary/pubsub
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

from cloudevents.exceptions import GenericException
from cloudevents.http import from_http
from prometheus_client import Counter, generate_latest

from shared.broker.transport import ReceivedMessage
from shared.errors import PenstockError, UndecodableMessage
from workers.functions.push_auth import PushAuthenticator, PushRefused
from workers.functions.receiver_permits import ReceiverBusy

_METADATA = "x-goog-pubsub-"
_CREDENTIALS = frozenset({"authorization", "cookie", "x-serverless-authorization"})

# JSON can contain an unpaired surrogate, which neither Redis nor Pub/Sub accepts.
_SURROGATE = re.compile("[\ud800-\udfff]")

HANDLE_LIMIT_S = 50.0
"""Pub/Sub waits 60 s for a response, then resends the message even if it is still being handled."""
MAX_BODY_BYTES = 16 * 1024 * 1024
"""The largest message is 10 MB, and base64 makes it a third larger."""
LOGGED_CHARACTERS = 128

UNREADABLE = Counter(
    "penstock_functions_unreadable_total",
    "Messages that a function can't decode",
    ["function"],
)
FAILED = Counter(
    "penstock_functions_failed_total",
    "Messages that the broker was asked to deliver again",
    ["function"],
)
REFUSED = Counter(
    "penstock_functions_refused_total", "Pushes from unauthorized callers", ["function"]
)

FunctionResponse = tuple[str, int]
Handler = Callable[[ReceivedMessage], Awaitable[None]]

log = logging.getLogger(__name__)


def read_push(headers: Mapping[str, str], body: bytes) -> ReceivedMessage:
    """Returns the message contained in a request.

    Args:
        headers: HTTP headers by lowercase name.
        body: a push (wrapped or unwrapped), or a CloudEvent (binary or structured) from Eventarc.

    Raises:
        UndecodableMessage: the push has no envelope.
    """
    if "ce-specversion" in headers or headers.get("content-type", "").startswith(
        "application/cloudevents"
    ):
        return _read_wrapped(_event_data(headers, body))
    if f"{_METADATA}message-id" in headers:
        return _read_unwrapped(headers, body)
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, dict) and isinstance(event.get("message"), dict):
        return _read_wrapped(event)
    # An unwrapped push without metadata contains only the message's data.
    return ReceivedMessage(body, {}, "", "")


def _event_data(headers: Mapping[str, str], body: bytes) -> Any:
    try:
        return from_http(dict(headers), body).get_data()
    except (GenericException, TypeError, ValueError, RecursionError) as error:
        # The exception's message would quote the event, which contains the caller's content.
        raise UndecodableMessage(f"no CloudEvent: {type(error).__name__}", field="data") from None


def _read_wrapped(envelope: Any) -> ReceivedMessage:
    message = envelope.get("message") if isinstance(envelope, dict) else None
    if not isinstance(message, dict):
        raise UndecodableMessage("the envelope has no message", field="data")
    attributes = message.get("attributes") or {}
    if not isinstance(attributes, dict) or not all(
        isinstance(value, str) for value in attributes.values()
    ):
        raise UndecodableMessage("the message's attributes are not strings", field="attributes")
    message_id = str(message.get("messageId") or message.get("message_id") or "")
    ordering_key = str(message.get("orderingKey") or "")
    texts = [message_id, ordering_key, *attributes, *attributes.values()]
    if any(map(_SURROGATE.search, texts)):
        raise UndecodableMessage("the message's attributes are not Unicode", field="attributes")
    try:
        data = base64.b64decode(message.get("data") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UndecodableMessage(
            f"the message's data is not valid base64: {error}", field="data"
        ) from error
    return ReceivedMessage(
        data,
        attributes,
        message_id,
        "",
        publish_time_s=_unix_s(message.get("publishTime") or message.get("publish_time")),
        delivery_attempt=attempt
        if isinstance(attempt := envelope.get("deliveryAttempt"), int)
        else 0,
        ordering_key=ordering_key,
    )


def _read_unwrapped(headers: Mapping[str, str], body: bytes) -> ReceivedMessage:
    """Reads metadata and attributes from the headers, where they are mixed with HTTP headers.

    Code that reads an attribute knows its name.
    """
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in headers.items()
        if name.startswith(_METADATA)
    }
    others = {name: value for name, value in headers.items() if not name.startswith(_METADATA)}
    attributes = {name: value for name, value in others.items() if name not in _CREDENTIALS}
    return ReceivedMessage(
        body,
        attributes,
        metadata["message-id"],
        "",
        publish_time_s=_unix_s(metadata.get("publish-time")),
        ordering_key=metadata.get("ordering-key", ""),
    )


def _unix_s(moment: Any) -> float:
    """Returns an RFC 3339 timestamp as Unix seconds, or 0 if there is none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return 0.0


class _Url(Protocol):
    @property
    def path(self) -> str: ...


class Request(Protocol):
    """The argument that functions-framework passes under ASGI: a Starlette request."""

    @property
    def method(self) -> str:
        """The HTTP method, in uppercase."""

    @property
    def url(self) -> _Url:
        """URL that the request was sent to."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by name, in lowercase."""

    def stream(self) -> AsyncIterator[bytes]:
        """Yields the body's chunks as they arrive."""


async def handle_push(
    request: Request, function: str, authenticator: PushAuthenticator, handle: Handler
) -> FunctionResponse:
    """Handles one request to `function`. Returns the response's text and status."""
    if request.method != "POST":
        return probe_response(request)
    try:
        await authenticator.check(request.headers.get("authorization", ""))
        message = read_push(request.headers, await read_body(request))
    except PushRefused as error:
        REFUSED.labels(function).inc()
        log.warning("push refused", extra={"function": function, "reason": error.message})
        return error.message, 401
    except UndecodableMessage as error:
        UNREADABLE.labels(function).inc()
        log.error("push unreadable", extra={"function": function, "reason": error.message})
        return "", 204
    reason = await handle_message(message, function, handle)
    return (reason, 503) if reason else ("", 204)


async def handle_message(message: ReceivedMessage, function: str, handle: Handler) -> str:
    """Runs `handle`.

    Returns the reason the message must be redelivered, or "" if it was handled.
    """
    try:
        async with asyncio.timeout(HANDLE_LIMIT_S):
            await handle(message)
    except UndecodableMessage as error:
        UNREADABLE.labels(function).inc()
        facts = {
            "function": function,
            "message_id": message.message_id,
            "request_id": message.attributes.get("request_id", "")[:LOGGED_CHARACTERS],
            "attributes": len(message.attributes),
            "data_bytes": len(message.data),
            "reason": error.message,
        }
        log.error("message unreadable", extra=facts)
    except ReceiverBusy as error:
        # This is not a failure, and it happens too often to log. The webhook counter counts it by
        # outcome.
        return error.message
    except (PenstockError, TimeoutError) as error:
        FAILED.labels(function).inc()
        reason = str(error) or "out of time"
        log.warning("message not handled", extra={"function": function, "reason": reason})
        return reason
    except Exception:
        # A pulled message that is neither acknowledged nor returned would take up room forever.
        FAILED.labels(function).inc()
        log.exception("message not handled", extra={"function": function})
        return "internal error"
    return ""


async def read_body(request: Request, longest_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Returns a call's body.

    Raises:
        UndecodableMessage: the body is larger than `longest_bytes`.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > longest_bytes:
            raise UndecodableMessage(f"the push is larger than {longest_bytes} bytes")
    return bytes(body)


def probe_response(request: Request) -> FunctionResponse:
    return (generate_latest().decode(), 200) if request.url.path == "/metrics" else ("ready", 200)
