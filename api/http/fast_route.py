"""Calls inference endpoints directly, bypassing ten layers of FastAPI.

This saves a tenth of a request's CPU time. FastAPI still includes these routes in the OpenAPI
document. Large responses with float vectors are compressed to half their size for callers that
accept gzip.

Measurements: docs/measurements/api.md.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.bodies import strip_mark
from api.errors import EXPECTED_ERRORS, handle_error
from api.http.idempotency import run_idempotent
from api.http.injection import open_call
from api.http.middleware import BodyBudget, ContextMiddleware
from api.http.request_options import IDEMPOTENCY_HEADER
from api.problem_details import ProblemRoute, problem_response
from shared.errors import MALFORMED

MIN_BYTES = 64 * 1024
"""About eight vectors. A smaller response takes one or two round trips, whether compressed or not.
"""
_LEVEL = 1
"""Level 6 takes seven times as long and reduces the size by only another 5%."""
_GZIP = re.compile(r"\s*(?:gzip|\*)\s*(?:;\s*q\s*=\s*(?P<q>[0-9.]+)\s*)?", re.IGNORECASE)

IS_HEAD = "penstock.is_head"
"""Marks a HEAD request served as a GET, for routes whose body never ends."""
_EXPOSED_HEADERS = (
    *(
        "x-request-id",
        "location",
        "retry-after",
        "x-should-retry",
        "idempotent-replayed",
        "x-penstock-cache",
    ),
    *(
        "x-penstock-queue-ms",
        "x-penstock-batch-ms",
        "x-penstock-inference-ms",
        "x-penstock-device-ms",
        "x-penstock-cost-usd",
        "x-penstock-revision",
        "x-penstock-total-ms",
    ),
    *("x-penstock-seed", "x-penstock-lane"),
    *(
        f"x-ratelimit-{kind}-{unit}"
        for unit in ("requests", "tokens", "pixel-steps", "work")
        for kind in ("limit", "remaining", "reset")
    ),
)
_PREFLIGHT_MAX_AGE_S = 7200
"""Chromium's limit."""


async def compress(response: Response, accept_encoding: str) -> None:
    """Compresses a large response in another thread if the caller accepts gzip."""
    if len(response.body) < MIN_BYTES or response.status_code != 200:
        return
    response.headers["vary"] = "accept-encoding"
    if accepts_gzip(accept_encoding):
        response.body = await asyncio.to_thread(gzip.compress, response.body, _LEVEL, mtime=0)
        response.headers["content-encoding"] = "gzip"
        response.headers["content-length"] = str(len(response.body))


def accepts_gzip(accept_encoding: str) -> bool:
    """Returns whether the header allows gzip (RFC 9110, section 12.5.3).

    If the header is missing, nothing is compressed.
    """
    matches = [match for match in map(_GZIP.fullmatch, accept_encoding.split(",")) if match]
    # The weight for `gzip` takes precedence over the weight for `*`.
    matches.sort(key=lambda match: "*" in match[0])
    return bool(matches) and (matches[0]["q"] or "1").strip("0.") != ""


def _for_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    # Scripts send their API key explicitly, so browser credentials are not allowed.
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
        max_age=_PREFLIGHT_MAX_AGE_S,
    )


class _Streamed(msgspec.Struct):
    stream: bool | None = None


_streamed_decoder = msgspec.json.Decoder(_Streamed)


class FastRoute(APIRoute):
    """A route without path parameters. Its endpoint takes only the request."""

    has_own_keys: ClassVar[bool] = False
    """True if the endpoint itself handles an Idempotency-Key."""

    async def answer_error(self, request: Request, error: Exception) -> Response:
        """Returns the response for one of the EXPECTED_ERRORS."""
        return await handle_error(request, error)


class StreamedRoute(FastRoute):
    """A route that can stream its response, and handles an Idempotency-Key for streams itself."""

    async def asks_for_stream(self, request: Request) -> bool:
        """Returns whether the body requests a streamed response. False for an invalid body."""
        try:
            return bool(_streamed_decoder.decode(strip_mark(await request.body())).stream)
        except MALFORMED:
            return False


class FastProblemRoute(ProblemRoute, FastRoute):
    """A fast route whose errors are problem details."""

    has_own_keys = True

    async def answer_error(self, request: Request, error: Exception) -> Response:
        return problem_response(request, error)


class _BodyRequest(Request):
    """Reads a body without Starlette's generator, the most expensive part of a short request."""

    async def body(self) -> bytes:
        """Returns the whole body, as Starlette does.

        Raises:
            ClientDisconnect: the caller hung up before sending the whole body.
        """
        if hasattr(self, "_body") or self._stream_consumed:
            return await super().body()
        pieces, is_whole = list[bytes](), False
        while not is_whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self._is_disconnected = True
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        self._stream_consumed = True
        self._body = b"".join(pieces)
        return self._body


class FastRouteApp(FastAPI):
    """A FastAPI app that calls its fast routes' endpoints directly.

    Args:
        origins: origins whose pages may call the API from a browser. `*` allows all origins.
    """

    def __init__(self, bodies: BodyBudget, *, origins: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._entry: ASGIApp = _for_browsers(self._serve, origins) if origins else self._serve
        self._fast_routes: dict[tuple[str, str], FastRoute] = {}
        self._in_context = ContextMiddleware(self._answer, bodies)
        self.add_middleware(ContextMiddleware, bodies=bodies)

    def add(self, router: APIRouter, prefix: str = "", *, is_in_schema: bool = True) -> None:
        """Adds the routes of `router`, and calls its fast routes directly."""
        self.include_router(router, prefix=prefix, include_in_schema=is_in_schema)
        fast = [route for route in router.routes if isinstance(route, FastRoute)]
        self._fast_routes |= {
            (method, prefix + route.path): route for route in fast for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # Handled like GET. The server omits the body (RFC 9110, section 9.3.2).
            scope = dict(scope, method="GET", **{IS_HEAD: True})
        route = (
            self._fast_routes.get((scope["method"], scope["path"]))
            if scope["type"] == "http"
            else None
        )
        if route is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"], scope["route"] = self, route
        await self._in_context(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, route = _BodyRequest(scope, receive, send), scope["route"]
        try:
            is_keyed = IDEMPOTENCY_HEADER in request.headers and not route.has_own_keys
            if is_keyed and isinstance(route, StreamedRoute):
                open_call(request)  # done first, so that unauthenticated bodies are not read
                is_keyed = not await route.asks_for_stream(request)
            endpoint = route.endpoint
            keyed = run_idempotent(request, endpoint, route.answer_error) if is_keyed else None
            response = await (keyed or endpoint(request))
        except EXPECTED_ERRORS as error:
            response = await route.answer_error(request, error)
        if scope["penstock.context"].is_compressible:
            await compress(response, request.headers.get("accept-encoding", ""))
        await response(scope, receive, send)
