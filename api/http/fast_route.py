"""The short way to the routes that infer: uvicorn, the context, the endpoint, without FastAPI's ten layers between.

Measured: a tenth of what the API spends on a request. FastAPI still knows these routes, for its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import EXPECTED, answer
from api.http.compression import compressed
from api.http.idempotency import once
from api.http.middleware import BodyBudget, ContextMiddleware
from api.http.request_options import IDEMPOTENCY_HEADER

IS_HEAD = "penstock.is_head"
"""In the scope of a HEAD that is served as a GET: for routes whose body is endless."""
_TOLD_TO_SCRIPTS = (
    *("x-request-id", "location", "retry-after", "x-should-retry", "idempotent-replayed", "x-penstock-cache"),
    *("x-penstock-queue-ms", "x-penstock-batch-ms", "x-penstock-inference-ms", "x-penstock-total-ms"),
    "x-penstock-seed",
)
_PREFLIGHT_KEPT_S = 7200
"""Chromium's limit."""


def _for_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    # A key is sent by the script itself, so nothing that a browser would send along of its own is allowed.
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "PUT"),
        allow_headers=("*",),
        expose_headers=_TOLD_TO_SCRIPTS,
        max_age=_PREFLIGHT_KEPT_S,
    )


class FastRoute(APIRoute):
    """A route whose path has no parameters and whose endpoint takes the request and nothing else."""


class FastRouteApp(FastAPI):
    """FastAPI that calls the endpoints of direct routes itself.

    Args:
        bodies: how much of them is read.
        origins: whose pages may call it from a browser; `*`: all.
        given: as FastAPI takes it.
    """

    def __init__(self, bodies: BodyBudget, *, origins: Sequence[str] = (), **given: Any) -> None:
        super().__init__(**given)
        self._entry: ASGIApp = _for_browsers(self._serve, origins) if origins else self._serve
        self._direct: dict[tuple[str, str], FastRoute] = {}
        self._in_context = ContextMiddleware(self._answer, bodies)
        self.add_middleware(ContextMiddleware, bodies=bodies)

    def add(self, router: APIRouter) -> None:
        """Serves the routes of `router`, the direct ones directly."""
        self.include_router(router)
        direct = [route for route in router.routes if isinstance(route, FastRoute)]
        self._direct |= {(method, route.path): route for route in direct for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # Answered like GET; the server leaves the body out (RFC 9110, 9.3.2).
            scope = dict(scope, method="GET", **{IS_HEAD: True})
        route = self._direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"], scope["route"] = self, route
        await self._in_context(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, endpoint = Request(scope, receive, send), scope["route"].endpoint
        try:
            response = await (once(request, endpoint) if IDEMPOTENCY_HEADER in request.headers else endpoint(request))
        except EXPECTED as error:
            response = await answer(request, error)
        response = await compressed(request, response)
        await response(scope, receive, send)
