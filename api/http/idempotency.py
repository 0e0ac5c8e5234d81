"""The door for requests with an `Idempotency-Key`: the same request under the same key is computed once.

After draft-ietf-httpapi-idempotency-key-header: a key that comes again with another body is 422; one whose first
request takes longer than the second can wait is 409 (OpenAI's clients repeat a 409 and not a 422, which is right for
both). Keys are each tenant's own. With Redis out of reach a request with a key is 503: it asked for a promise that
can't be given. A request without a key does not come here.
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

from api.errors import EXPECTED, answer
from api.http.dependencies import dependencies_of
from api.http.middleware import RequestContext, context_of, while_connected
from api.http.request import options_of, tenant_of
from api.idempotency.service import IdempotentRequest, StoredResponse
from api.schemas.openai import ErrorReply

REPLAYED = "idempotent-replayed"
LARGE_BYTES = 256 * 1024
"""A larger body is digested on a thread: 30 MB take 40 ms, and leave the interpreter to others meanwhile."""
_BOUNDARY = re.compile(r'boundary="?([^";,]+)"?', re.IGNORECASE)
Endpoint = Callable[[Request], Awaitable[Response]]


async def once(request: Request, endpoint: Endpoint) -> Response:
    """The answer to a request that has the header: `endpoint`'s, or the one it gave before.

    Raises:
        Unauthorized: as the endpoint would.
        BadInput: the key is empty, too long, or has other characters than visible ASCII.
        KeyReused: the key came with another body, or to another route, before.
        KeyInUse: its first request is still being answered, and this one's time is over.
        Unavailable: Redis is out of reach.
    """
    tenant = tenant_of(request)
    options, dependencies, context = options_of(request), dependencies_of(request), context_of(request)
    key = options.idempotency_key
    body = await request.body()
    digest = hashlib.blake2b(f"{tenant}\0{key}".encode(), digest_size=32)
    context.key_seed = int.from_bytes(digest.digest()[:4], "big")

    async def compute() -> StoredResponse:
        return await _computed(Request(request.scope, _receive(body)), endpoint)

    wait_s = options.limit_s(dependencies.catalog.deadline)
    large = len(body) > LARGE_BYTES
    fingerprint = await asyncio.to_thread(_fingerprint, request, body) if large else _fingerprint(request, body)
    asked = IdempotentRequest(digest.hexdigest(), tenant, fingerprint)
    work = dependencies.idempotency.answer(asked, compute, wait_s)
    answered, is_repeated = await while_connected(request, work)
    return _response(answered, context, is_repeated=is_repeated)


def _fingerprint(request: Request, body: bytes) -> str:
    """What makes two requests the same: method, path, query and body."""
    kind = request.headers.get("content-type", "")
    if boundary := _BOUNDARY.search(kind):
        # Clients draw another boundary for each try of the same form.
        body = body.replace(b"--" + boundary[1].encode("latin-1"), b"--")
    digest = hashlib.blake2b(digest_size=32)
    for part in (request.method, request.url.path, request.url.query, kind.partition(";")[0].strip().lower()):
        digest.update(f"{part}\0".encode())
    digest.update(body)
    return digest.hexdigest()


def _receive(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    """Of a caller that never hangs up: what is computed under a key goes on without one."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody hangs up; this is a bug")

    return receive


async def _computed(request: Request, endpoint: Endpoint) -> StoredResponse:
    try:
        response = await endpoint(request)
    except EXPECTED as error:
        response = await answer(request, error)
    context, body = context_of(request), bytes(response.body)
    headers = context.headers | {name: value for name, value in response.headers.items() if name != "content-length"}
    # They come with the answer that counts, which may be another's.
    context.headers.clear()
    return StoredResponse(response.status_code, headers, len(body), body, model=context.model)


def _response(answered: StoredResponse, context: RequestContext, *, is_repeated: bool) -> Response:
    context.model = answered.model
    if answered.status >= 400 and not context.error_code:
        context.error_code = msgspec.json.decode(answered.body, type=ErrorReply).error.code
    headers = answered.headers | {REPLAYED: "true"} if is_repeated else answered.headers
    return Response(answered.body, answered.status, headers)
