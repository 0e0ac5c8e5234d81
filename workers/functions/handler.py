"""Handles a message that was pushed, or taken from a queue.

Authenticates the caller, decodes the message, runs the function, and answers with a status.

2xx ends a message. Any other status makes Pub/Sub send it again, after a growing pause. So a
message that can never be handled gets 2xx too, with a counter and its ids in the log. The content
of a message is in no log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from prometheus_client import Counter, generate_latest

from shared.errors import PenstockError, UndecodableMessage
from shared.transport import Message
from workers.functions.push_auth import PushAuthenticator, PushRefused
from workers.functions.push_message import read_push
from workers.functions.receiver_turns import ReceiverBusy

HANDLE_LIMIT_S = 50.0
"""Pub/Sub waits 60 s for an answer and then sends the message again, while we would still be at it.
"""
LONGEST_BODY_BYTES = 16 * 1024 * 1024
"""The largest message has 10 MB, which is a third more in base64."""
LOGGED_CHARACTERS = 128

UNREADABLE = Counter(
    "penstock_functions_unreadable_total",
    "Messages that a function can not read",
    ["function"],
)
FAILED = Counter(
    "penstock_functions_failed_total",
    "Messages that the broker was asked to bring again",
    ["function"],
)
REFUSED = Counter(
    "penstock_functions_refused_total", "Pushes of somebody who may not call", ["function"]
)

log = logging.getLogger(__name__)

FunctionResponse = tuple[str, int]
Handler = Callable[[Message], Awaitable[None]]


class _Url(Protocol):
    @property
    def path(self) -> str: ...


class Request(Protocol):
    """What functions-framework gives a function under ASGI: a Starlette request."""

    @property
    def method(self) -> str:
        """Of HTTP, in capitals."""

    @property
    def url(self) -> _Url:
        """That it was sent to."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in lower case."""

    def stream(self) -> AsyncIterator[bytes]:
        """The body as it comes."""


async def handle_push(
    request: Request, function: str, authenticator: PushAuthenticator, handle: Handler
) -> FunctionResponse:
    """Handles one request to `function`: returns text and status of the response."""
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


async def handle_message(message: Message, function: str, handle: Handler) -> str:
    """Runs `handle`. Returns why the message has to come again. Empty: it is done with."""
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
        # No failure, and too often for the log. The webhooks' counter has it by its end.
        return error.message
    except (PenstockError, TimeoutError) as error:
        FAILED.labels(function).inc()
        reason = str(error) or "out of time"
        log.warning("message not handled", extra={"function": function, "reason": reason})
        return reason
    return ""


async def read_body(request: Request, longest_bytes: int = LONGEST_BODY_BYTES) -> bytes:
    """The body of a call.

    Raises:
        UndecodableMessage: it is larger than `longest_bytes`.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > longest_bytes:
            raise UndecodableMessage(f"the push is larger than {longest_bytes} bytes")
    return bytes(body)


def probe_response(request: Request) -> FunctionResponse:
    """The response to probes and scrapes (`/metrics`)."""
    return (generate_latest().decode(), 200) if request.url.path == "/metrics" else ("ready", 200)
