"""Handles requests with an `Idempotency-Key`: identical requests with the same key run only once.

Follows draft-ietf-httpapi-idempotency-key-header. Reusing a key with a different body gets a 422.
If the first request is still running when the second request's response is due, the second request
gets a 409. OpenAI's clients retry a 409 but not a 422, which is the right behavior in both cases.
Each tenant's keys are separate. While Redis is unreachable, a request with a key gets a 503.
api/idempotency/service.py decides which request computes the response.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from api.dispatch.request import COST_HEADER, DEVICE_HEADER
from api.errors import EXPECTED_ERRORS, KeyReused, NotNow
from api.http.auth import check_model
from api.http.connection import CONNECTION, while_connected
from api.http.dependencies import dependencies_of
from api.http.injection import open_call
from api.http.middleware import RequestContext, context_of
from api.idempotency.service import IdempotentRequest, StoredResponse
from api.limits.messages import LIMITS_PREFIX

REPLAYED = "idempotent-replayed"
LARGE_BYTES = 256 * 1024
"""Larger bodies are hashed in a thread, which releases the GIL. Hashing 30 MB takes 40 ms."""
_BOUNDARY = re.compile(r'boundary="?([^";,]+)"?', re.IGNORECASE)
Endpoint = Callable[[Request], Awaitable[Response]]
AnswerError = Callable[[Request, Exception], Awaitable[Response]]


class _Code(msgspec.Struct):
    code: str = ""


class _StoredError(_Code):
    """The code in an error body, in OpenAI's or Mistral's format."""

    error: _Code = msgspec.field(default_factory=_Code)


async def run_idempotent(
    request: Request, endpoint: Endpoint, answer_error: AnswerError
) -> Response:
    """Handles a request with the header: runs `endpoint` or returns the stored response.

    Args:
        answer_error: returns the response for one of the EXPECTED_ERRORS raised by `endpoint`.

    Raises:
        Unauthorized: the API key is missing or invalid.
        Forbidden: the API key does not permit this request.
        BadInput: the Idempotency-Key is empty, too long, or not visible ASCII.
        KeyReused: the key was used with a different body or route.
        KeyInUse: the first request is still running at this request's deadline.
    """
    call, dependencies = open_call(request), dependencies_of(request)
    body = await request.body()
    digest = hashlib.blake2b(
        f"{call.tenant}\0{call.options.idempotency_key}".encode(), digest_size=32
    )
    call.context.key_seed = int.from_bytes(digest.digest()[:4], "big")

    async def compute() -> StoredResponse:
        scope = {**request.scope, CONNECTION: None}  # runs to completion if the caller hangs up
        return await _compute_response(Request(scope, _receive(body)), endpoint, answer_error)

    large = len(body) > LARGE_BYTES
    fingerprint = (
        await asyncio.to_thread(_fingerprint, request, body)
        if large
        else _fingerprint(request, body)
    )
    keyed = IdempotentRequest(digest.hexdigest(), call.tenant, fingerprint)
    wait_s = call.options.limit_s(dependencies.catalog.deadline)
    running = dependencies.idempotency.run(keyed, compute, wait_s)
    stored, is_replayed = await while_connected(request, running, call.check_key)
    if stored.model:  # the first request may have used a different key from the same tenant
        check_model(call.caller, stored.model)
    return _response(stored, call.context, is_replayed=is_replayed)


def _fingerprint(request: Request, body: bytes) -> str:
    """Returns a digest of the method, path, query, and body.

    Identical requests have the same digest.
    """
    kind = request.headers.get("content-type", "")
    if boundary := _BOUNDARY.search(kind):
        # Clients choose a new boundary for each retry of the same form.
        body = body.replace(b"--" + boundary[1].encode("latin-1"), b"--")
    digest = hashlib.blake2b(digest_size=32)
    for field in (
        request.method,
        request.url.path,
        request.url.query,
        kind.partition(";")[0].strip().lower(),
    ):
        digest.update(f"{field}\0".encode())
    digest.update(body)
    return digest.hexdigest()


def _receive(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    """Simulates a caller that never hangs up, so that the request runs to completion."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.get_running_loop().create_future()
        raise AssertionError("this caller never hangs up; this is a bug")

    return receive


async def _compute_response(
    request: Request, endpoint: Endpoint, answer_error: AnswerError
) -> StoredResponse:
    is_of_the_moment = False
    try:
        response = await endpoint(request)
    except EXPECTED_ERRORS as error:
        response = await answer_error(request, error)
        is_of_the_moment = isinstance(error, NotNow | KeyReused)
    context, body = context_of(request), bytes(response.body)
    headers = context.headers | {
        name: value for name, value in response.headers.items() if name != "content-length"
    }
    # Use only the stored response's headers, which may come from another instance.
    context.headers.clear()
    return StoredResponse(
        response.status_code,
        headers,
        len(body),
        body,
        model=context.model,
        is_of_the_moment=is_of_the_moment,
    )


def _response(stored: StoredResponse, context: RequestContext, *, is_replayed: bool) -> Response:
    context.model = stored.model
    if stored.status >= 400 and not context.error_code:
        known = msgspec.json.decode(stored.body, type=_StoredError)
        context.error_code = known.code or known.error.code
    headers = _of_replay(stored) if is_replayed else stored.headers
    return Response(stored.body, stored.status, headers)


def _of_replay(stored: StoredResponse) -> dict[str, str]:
    """Returns a replay's headers. A replay is not charged and does not count toward limits."""
    headers = {
        name: value for name, value in stored.headers.items() if not name.startswith(LIMITS_PREFIX)
    }
    if COST_HEADER in headers:
        headers |= {COST_HEADER: "0", DEVICE_HEADER: "0.000"}
    return headers | {REPLAYED: "true"}
