"""The outermost layer of every request: ID and times, body limits, headers, metrics, and errors.

This is plain ASGI, because middleware that wraps responses costs more than a cache hit. It limits
the memory and connections that request bodies may occupy, in total and per tenant. A request's span
(`receive`) lasts from its arrival until the response ends. It does not include the URL, query, or
headers, because callers put text and keys there by mistake.

All requests in an instance share one event loop. A tenant with many uploads always has many chunks
ready, so without turns, every other request would wait for all those chunks at each `await`. For
this reason, chunks of large bodies take turns, with one chunk per tenant in each event loop
iteration. A tenant that is alone loses nothing, because the iterations of an idle loop are short.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import metrics
from api.dispatch.request import RequestOptions
from api.errors import BodyTooLarge, TooSlow, error_response
from api.fair_room import FairRoom, OneItem
from shared.errors import BadInput, Overloaded, PenstockError
from shared.messages import RequestFacts
from shared.stores.objects import MEMORY_BYTES
from shared.tenants.api_key import PREFIX
from shared.tenants.plan import Caller
from shared.tracing.spans import STAGE, Attributes, Span, begin, read_headers, set_current

MAX_SHARE = 0.75
"""Maximum share of a limit that one tenant may use. The rest is left for other tenants."""

UNTRACED = frozenset({"/health", "/healthz", "/livez", "/readyz"})
"""Paths that are not traced, because otherwise most traces of an idle service would be of probes.
"""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods named in spans. OpenTelemetry's conventions call for `_OTHER` for any other method."""

BODY_IDLE_S = 30.0
"""Maximum pause between two chunks of a body."""
SMALL_BODY_BYTES = 64 * 1024
STREAMED_BODY_BYTES = MEMORY_BYTES + 1024 * 1024
"""Amount of memory, in bytes, counted for a streamed body."""
FULL_RETRY_S = 1.0
"""Retry-After for a request that is rejected because body memory is full."""
BODY_GRACE_S, MIN_BYTES_PER_S = 60.0, 8192
"""Time limit for a body: this many seconds, plus the time it takes to receive the body at this
rate. Cuts off clients that only trickle data.
"""
BODY_ARRIVED = "penstock.body_arrived"
"""Set by the server in a request's scope once the whole body is here, so no time limit is needed.
"""
CLIENT_GONE = 499
"""Status in logs and rows when the caller has hung up, as in nginx."""
RECORDED_METHODS = frozenset({"POST", "PUT"})
"""Rejected requests with these methods produce a row. Other methods never produce rows."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger(__name__)


class BodyPermits:
    """Admits one chunk per tenant in each event loop iteration, and queues the rest."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting chunks, for tenants that had a chunk in this iteration or the previous one."""

    async def take(self, tenant: str) -> None:
        """Waits until one of the tenant's chunks may be handled.

        Chunks are handled in arrival order.
        """
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(tenant)
        if waiting is None:
            self._waiting[tenant] = deque()
            loop.call_soon(self._next, loop, tenant)
            return
        turn: asyncio.Future[None] = loop.create_future()
        waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        waiting = self._waiting[tenant]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # its caller may have hung up
                turn.set_result(None)
                loop.call_soon(self._next, loop, tenant)
                return
        del self._waiting[tenant]


def share_of(limit: int) -> int:
    """Returns the portion of `limit` that one tenant may use."""
    return max(1, int(limit * MAX_SHARE))


@dataclass(slots=True)
class BodyBudget:
    """The memory and connections used by request bodies.

    Memory is held until the response has been sent. A connection is held until its body has
    arrived.
    """

    largest_bytes: int
    """Maximum size of one body."""
    together_bytes: int
    """Maximum total size of all bodies. Once this total is exceeded, only small bodies are
    accepted.
    """
    arriving: FairRoom
    """Room for connections whose bodies are still arriving."""
    turns: BodyPermits = field(default_factory=BodyPermits)
    """Schedules chunks of large bodies fairly."""
    held_bytes: int = 0
    held_of: Counter[str] = field(default_factory=Counter)
    """Bytes held by each tenant."""

    def hold(self, tenant: str, size_bytes: int) -> None:
        """Adds a chunk of a body to the totals.

        `size_bytes` is negative when the chunk is released.
        """
        self.held_bytes += size_bytes
        self.held_of[tenant] += size_bytes
        if not self.held_of[tenant]:
            del self.held_of[tenant]

    def is_full(self, tenant: str) -> bool:
        """Returns whether to reject this tenant's large bodies now."""
        return self.held_bytes > self.together_bytes or self.held_of[tenant] > share_of(
            self.together_bytes
        )


def begin_span(scope: Scope, received_at_s: float) -> Span:
    """Starts a request's span as a child of the caller's span, and makes it current."""
    parent = read_headers(scope["headers"])
    if scope["path"] in UNTRACED:
        return Span("probe", parent, None)
    span = begin(_method(scope), "server", received_at_s, parent)
    set_current(span.context)
    return span


def end_span(span: Span, scope: Scope, *, status: int, error_code: str, facts: Attributes) -> None:
    """Ends a request's span.

    Args:
        span: the span returned by `begin_span`.
        scope: request scope, including its route.
        status: the response status, or 0 if none was sent.
        error_code: the response's error code, or empty.
        facts: additional attributes. Empty values are omitted.
    """
    method, route = _method(scope), getattr(scope.get("route"), "path", "")
    span.set({name: value for name, value in facts.items() if value})
    span.set({STAGE: "receive", "http.request.method": method, "url.scheme": scope["scheme"]})
    if route:
        span.set({"http.route": route})
    if status:
        span.set({"http.response.status_code": status})
    # By OpenTelemetry's conventions, an invalid request is not a server error.
    error = (error_code or str(status)) if status >= 500 or not status else ""
    span.end(name=f"{method} {route}".rstrip(), error=error)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "_OTHER"


@dataclass(slots=True)
class RequestContext:
    """Facts about a request.

    The middleware creates these facts; routes add the tenant, model, and headers.
    """

    shown_id: str
    """The ID in the response: the caller's ID if it contains only allowed characters, otherwise one
    of ours.
    """
    facts: RequestFacts
    """The caller, the time, and the pricing terms. The tenant is empty until authentication."""
    caller: Caller | None = None
    """The caller, once authenticated and permitted to use the route."""
    started_s: float = field(default_factory=time.perf_counter)
    model: str = ""
    """Model name. Empty until the route has resolved the model."""
    headers: dict[str, str] = field(default_factory=dict)
    """Response headers in addition to the common ones."""
    options: RequestOptions | None = None
    """Options from the request's headers, once they have been read."""
    is_compressible: bool = False
    """True if a long response body is worth compressing."""
    key_seed: int | None = None
    """Default image seed for a request with an Idempotency-Key. It is the same on every instance.
    """
    error_code: str = ""
    """Error code in the response."""
    has_rows: bool = False
    """True if the request's items produce rows, regardless of their outcome."""
    streamed_max_bytes: int = 0
    """Maximum size of a body that the route streams, or 0 if the body is held in memory."""
    record_refusal: Callable[[RequestContext], None] | None = None
    """Writes the row of a rejected request. Set once the tenant is known."""

    @property
    def total_ms(self) -> float:
        return (time.perf_counter() - self.started_s) * 1000


def context_of(request: Request) -> RequestContext:
    """Returns the context of this request, set by the middleware."""
    context = request.scope["penstock.context"]
    assert isinstance(context, RequestContext), "the middleware wraps every route; this is a bug"
    return context


class ContextMiddleware:
    """Creates the RequestContext for each HTTP request and sets the response headers.

    Args:
        bodies: body limits shared by all middlewares in the process.
    """

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request. Passes through anything that is not HTTP."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._bodies)
        metrics.REQUESTS_OPEN.value += 1
        try:
            # Done before the route runs, because none of this depends on the caller.
            await scope["app"].state.dependencies.access.meet(scope["headers"])
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            await exchange.answer_unexpected(error)
        finally:
            exchange.end()
            metrics.REQUESTS_OPEN.value -= 1


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bodies: BodyBudget) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._bodies = bodies
        self._body_bytes, self._held_bytes, self._body_ended, self._holder = 0, 0, False, ""
        self._arriving: OneItem | None = None
        self._is_late = False
        self._status = 0
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first occurrence wins
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        self._declared_bytes = _number(headers.get(b"content-length", b"").decode("latin-1"))
        self._encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        own_id = f"req_{os.urandom(12).hex()}"
        is_shown = _SANE_ID.fullmatch(client_id) is not None and PREFIX not in client_id
        context = self.context = scope["penstock.context"] = RequestContext(
            shown_id=client_id if is_shown else own_id,
            facts=RequestFacts(
                # Always one of ours, because callers may send long or duplicate IDs.
                request_id=own_id,
                tenant="",
                received_at_s=time.time(),
                client_request_id=client_id if is_shown or not client_id else _digest_of(client_id),
            ),
        )
        self._span = begin_span(scope, context.facts.received_at_s)

    async def receive(self) -> Message:
        if self._body_ended:
            return await self._receive()
        streamed = self.context.streamed_max_bytes
        largest_bytes = streamed or self._bodies.largest_bytes
        if self._declared_bytes > largest_bytes:
            raise _too_large(largest_bytes)
        has_arrived = BODY_ARRIVED in self._scope
        message = await (self._receive() if has_arrived else self._receive_in_time())
        size = len(message.get("body", b""))
        if size and self._encoding not in ("", "identity"):
            raise BadInput(
                "content-encoding: request bodies must not be compressed, got "
                f"{self._encoding[:40]!r}",
                field="content-encoding",
            )
        if not self._body_bytes:
            self._holder = self.context.facts.tenant
        self._body_bytes += size
        self._hold(min(self._body_bytes, STREAMED_BODY_BYTES) if streamed else self._body_bytes)
        if self._body_bytes > largest_bytes:
            raise _too_large(largest_bytes)
        if self._body_bytes > SMALL_BODY_BYTES and self._bodies.is_full(self._holder):
            raise Overloaded(
                "too many large bodies are being received; try again later",
                retry_after_s=FULL_RETRY_S,
            )
        self._body_ended = not message.get("more_body", False)
        self._hold_connection()
        if self._body_bytes > SMALL_BODY_BYTES:
            await self._bodies.turns.take(self._holder)
        return message

    async def _receive_in_time(self) -> Message:
        left_s = BODY_GRACE_S + self._body_bytes / MIN_BYTES_PER_S - self.context.total_ms / 1000
        try:
            return await self._receive_within(min(BODY_IDLE_S, left_s))
        except TimeoutError as error:
            if left_s < BODY_IDLE_S:
                raise TooSlow(
                    f"the body arrived at less than the minimum rate of {MIN_BYTES_PER_S} bytes/s"
                ) from error
            raise TooSlow(
                f"the rest of the body did not arrive within {BODY_IDLE_S:g} s"
            ) from error

    async def _receive_within(self, limit_s: float) -> Message:
        """Does the same thing as asyncio.timeout, but in a fifth of the time.

        Raises:
            TimeoutError: nothing arrived within `limit_s`.
        """
        task = asyncio.current_task()
        assert task is not None, "routes run in tasks; this is a bug"
        canceled_before = task.cancelling()
        timer = asyncio.get_running_loop().call_later(limit_s, self._stop_receiving, task)
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if self._is_late and task.uncancel() <= canceled_before:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def _stop_receiving(self, task: asyncio.Task[Any]) -> None:
        self._is_late = True
        task.cancel()

    def _hold_connection(self) -> None:
        """Counts the connection as in use until its body has arrived.

        Most bodies arrive in one chunk.
        """
        if self._body_ended:
            self._release_connection()
        elif self._arriving is None:
            item = OneItem(self._holder)
            if self._bodies.arriving.turns_to_wait(item):
                raise Overloaded(
                    "too many of your requests are still being received; try again later",
                    retry_after_s=FULL_RETRY_S,
                )
            self._bodies.arriving.take(item)
            self._arriving = item

    def _release_connection(self) -> None:
        if self._arriving is not None:
            self._bodies.arriving.release(self._arriving)
            self._arriving = None

    def _hold(self, size_bytes: int) -> None:
        self._bodies.hold(self._holder, size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def send(self, message: Message) -> Awaitable[None]:
        # Not a coroutine, because a streamed response sends many messages.
        if message["type"] == "http.response.start":
            self._add_headers(message)
        return self._send(message)

    def _add_headers(self, message: Message) -> None:
        self._status = message["status"]
        if self._status >= 400:
            self._count_error()
        context = self.context
        ours = {
            "x-request-id": context.shown_id,
            "x-penstock-total-ms": f"{context.total_ms:.2f}",
        }
        pairs = (context.headers | ours).items()
        added = [(name.encode(), value.encode()) for name, value in pairs]
        message["headers"] = [*message["headers"], *added]

    async def answer_unexpected(self, error: Exception) -> None:
        if self._status:
            raise error
        self.context.error_code = PenstockError.code
        log.error(
            "request failed unexpectedly",
            extra={"request_id": self.context.facts.request_id},
            exc_info=error,
        )
        await error_response(
            PenstockError(public="internal error; x-request-id identifies this request")
        )(self._scope, self._receive, self.send)

    def end(self) -> None:
        if self._held_bytes:
            self._hold(0)
        self._release_connection()
        answered, seconds = metrics.of_requests(self._route, self.context.model, self._status)
        answered.inc()
        trace = self._span.context
        seconds.observe(self.context.total_ms / 1000, trace.exemplar if trace else None)
        self._end_span()

    def _end_span(self) -> None:
        if self._span.is_recorded:
            context = self.context
            facts = {
                "penstock.request_id": context.facts.request_id,
                "penstock.tenant": context.facts.tenant,
                "penstock.cache": context.headers.get("x-penstock-cache", ""),
                "gen_ai.request.model": context.model,
            }
            end_span(
                self._span,
                self._scope,
                status=self._status,
                error_code=context.error_code,
                facts=facts,
            )

    @property
    def _route(self) -> str:
        """The route's path template, which keeps the number of metric label values small."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    def _count_error(self) -> None:
        context, route = self.context, self._route
        metrics.of_errors(route, self._status, context.error_code or "unknown").inc()
        is_refused = (
            self._status < 500
            and self._status != CLIENT_GONE
            and self._scope["method"] in RECORDED_METHODS
        )
        if is_refused and not context.has_rows and context.record_refusal is not None:
            context.record_refusal(context)


def _too_large(largest_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the maximum of {largest_bytes} bytes")


def _digest_of(key: str) -> str:
    """Replaces an ID that is too long for a row or unsafe in headers and logs."""
    return f"sha256:{hashlib.sha256(key.encode('latin-1')).hexdigest()[:32]}"


def _number(text: str) -> int:
    """Returns the value of Content-Length.

    Python does not parse very long numbers, so those become maxsize.
    """
    if not (text and text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) < 20 else sys.maxsize
