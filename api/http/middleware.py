"""What stands around every request, outermost: its id and times, the bound on its body, headers, metrics, last errors.

Pure ASGI: a middleware that wraps responses costs more than a hit does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import metrics
from api.errors import BodyTooLarge, ClientGone, TooSlow, error_response
from api.http.request_options import RequestOptions
from api.shares import share_of
from shared.errors import Overloaded, PenstockError

log = logging.getLogger(__name__)

BODY_IDLE_S = 30.0
"""The longest pause between two pieces of a body."""
SMALL_BODY_BYTES = 64 * 1024
FULL_RETRY_S = 1.0
BODY_GRACE_S, LEAST_BYTES_PER_S = 60.0, 8192
"""A body may take so long, and longer by what came of it: a byte now and then would last for ever."""
CLIENT_GONE = 499
ASKING = frozenset({"POST", "PUT"})
"""Methods of requests that leave a row where they are refused: who only looks leaves none where it succeeds either."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
T = TypeVar("T")


@dataclass(slots=True)
class RequestContext:
    """One request as the API follows it; routes find it with `context_of` and say what they learned."""

    shown_id: str
    """The id in the answer: the caller's own, where it sent one that can be shown."""
    request_id: str
    """The id in messages and rows. It is always ours: a caller's may come twice, and be as long as it likes."""
    client_request_id: str = ""
    """What the caller sent as `x-request-id`, as rows keep it: at most 128 characters; empty where it sent none."""
    received_at_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.perf_counter)
    tenant: str = ""
    """Who asks; empty before that is known."""
    model: str = ""
    """The model that is asked; empty before that is known."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the answer, beside those that every answer has."""
    options: RequestOptions | None = None
    """What its headers ask for, once they were read."""
    shrinks: bool = False
    """Whether the answer's body is worth compressing, if it is long."""
    key_seed: int | None = None
    """With an Idempotency-Key: the seed of an image whose caller named none, the same whoever draws it."""
    error_code: str = ""
    """The code of the error that is the answer."""
    has_rows: bool = False
    """Its items leave rows, however they end."""
    record_refusal: Callable[[RequestContext], None] | None = None
    """Writes the row of a refused request, once the tenant is known."""

    @property
    def total_ms(self) -> float:
        """Milliseconds since the request came in."""
        return (time.perf_counter() - self.started_s) * 1000


def context_of(request: Request) -> RequestContext:
    """The context that the middleware put around this request."""
    context = request.scope["penstock.context"]
    assert isinstance(context, RequestContext), "the middleware stands around every route; this is a bug"
    return context


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up; the body must have been read before.

    Raises:
        ClientGone: the caller hung up.
    """
    task, is_working = asyncio.current_task(), True
    assert task is not None, "routes run in tasks; this is a bug"

    def give_up(watcher: asyncio.Task[None]) -> None:
        if is_working and not watcher.cancelled():
            task.cancel()

    watcher = asyncio.create_task(_until_gone(request))
    watcher.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        # Only our own is taken back: the server's, as it stops, goes on.
        if watcher.done() and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        is_working = False
        watcher.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class BodyBudget:
    """The bodies of all requests in hand: a body stays in memory until its request is answered."""

    largest_bytes: int
    """Of one; more is not read."""
    together_bytes: int
    """Of all; above it only small ones are taken in."""
    held_bytes: int = 0
    held_of: Counter[str] = field(default_factory=Counter)
    """The same by tenant."""

    def hold(self, tenant: str, size_bytes: int) -> None:
        """Counts a piece of a body; `size_bytes` is negative when it is let go."""
        self.held_bytes += size_bytes
        self.held_of[tenant] += size_bytes
        if not self.held_of[tenant]:
            del self.held_of[tenant]

    def is_full(self, tenant: str) -> bool:
        """Whether this tenant may send no large body now."""
        return self.held_bytes > self.together_bytes or self.held_of[tenant] > share_of(self.together_bytes)


class ContextMiddleware:
    """Gives each HTTP request its RequestContext and each answer its headers.

    Args:
        app: what it stands around.
        bodies: their bounds; the same for all that stand in this process.
    """

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection; what is not HTTP passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._bodies)
        with metrics.REQUESTS_OPEN.track_inprogress():
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception as error:
                await exchange.answer_unexpected(error)
            finally:
                exchange.end()


class _Exchange:
    """One request and its answer, seen from outside."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bodies: BodyBudget) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._bodies = bodies
        self._body_bytes, self._body_ended, self._holder = 0, False, ""
        self._status = 0
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self._declared_bytes = _number(headers.get("content-length"))
        own_id = f"req_{secrets.token_hex(12)}"
        is_shown = _SANE_ID.fullmatch(given) is not None
        self.context = scope["penstock.context"] = RequestContext(
            shown_id=given if is_shown else own_id,
            request_id=own_id,
            client_request_id=given if is_shown or not given else _digest_of(given),
        )

    async def receive(self) -> Message:
        if self._body_ended:
            return await self._receive()
        if self._declared_bytes > self._bodies.largest_bytes:
            raise self._too_large()
        left_s = BODY_GRACE_S + self._body_bytes / LEAST_BYTES_PER_S - self.context.total_ms / 1000
        try:
            async with asyncio.timeout(min(BODY_IDLE_S, left_s)):
                message = await self._receive()
        except TimeoutError as error:
            if left_s < BODY_IDLE_S:
                raise TooSlow(f"the body arrives slower than {LEAST_BYTES_PER_S} bytes/s") from error
            raise TooSlow(f"no more of the body arrived for {BODY_IDLE_S:g} s") from error
        size = len(message.get("body", b""))
        if not self._body_bytes:
            self._holder = self.context.tenant
        self._body_bytes += size
        self._bodies.hold(self._holder, size)
        if self._body_bytes > self._bodies.largest_bytes:
            raise self._too_large()
        if self._body_bytes > SMALL_BODY_BYTES and self._bodies.is_full(self._holder):
            raise Overloaded("too many large bodies are being received; try again later", retry_after_s=FULL_RETRY_S)
        self._body_ended = not message.get("more_body", False)
        return message

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._bodies.largest_bytes} bytes")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status >= 400:
                self._count_error()
            context = self.context
            ours = {"x-request-id": context.shown_id, "x-penstock-total-ms": f"{context.total_ms:.2f}"}
            pairs = (context.headers | ours).items()
            message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value in pairs)]
        await self._send(message)

    async def answer_unexpected(self, error: Exception) -> None:
        if self._status:
            raise error
        self.context.error_code = PenstockError.code
        log.error("request failed unexpectedly", extra={"request_id": self.context.request_id}, exc_info=error)
        await error_response(PenstockError("internal error; x-request-id identifies this request"))(
            self._scope, self._receive, self.send
        )

    def end(self) -> None:
        if self._body_bytes:
            self._bodies.hold(self._holder, -self._body_bytes)
        answered, seconds = metrics.of_requests(self._route, self.context.model, self._status)
        answered.inc()
        seconds.observe(self.context.total_ms / 1000)

    @property
    def _route(self) -> str:
        """Its path with names for what differs between requests, so that there are few of them."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    def _count_error(self) -> None:
        context, route = self.context, self._route
        metrics.of_errors(route, self._status, context.error_code or "unknown").inc()
        is_refused = self._status < 500 and self._status != CLIENT_GONE and self._scope["method"] in ASKING
        if is_refused and not context.has_rows and context.record_refusal is not None:
            context.record_refusal(context)


def _digest_of(given: str) -> str:
    """Stands for an id that is too long for a row, or has characters that a header or a log must not show."""
    return f"sha256:{hashlib.sha256(given.encode('latin-1')).hexdigest()[:32]}"


def _number(text: str | None) -> int:
    """What Content-Length says; of many digits only that they are many, for Python does not read them."""
    if not (text and text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) < 20 else sys.maxsize
