"""The span of a request (`receive`), from its arrival to the end of its answer.

It has no URL, no query and no header: callers put texts and keys there by mistake.
"""

from __future__ import annotations

from starlette.types import Scope

from shared.tracing.context import read_headers, set_current
from shared.tracing.spans import STAGE, Attributes, Span, begin

UNTRACED = frozenset({"/healthz", "/readyz"})
"""Probes would be most of the traces of an idle service."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Other words are the caller's own. The conventions write `_OTHER` for them."""


def begin_span(scope: Scope, received_at_s: float) -> Span:
    """Starts the span of a request, below that of its caller. It becomes the current one."""
    parent = read_headers(scope["headers"])
    if scope["path"] in UNTRACED:
        return Span("probe", parent, None)
    span = begin(_method(scope), "server", received_at_s, parent)
    set_current(span.context)
    return span


def end_span(span: Span, scope: Scope, *, status: int, error_code: str, facts: Attributes) -> None:
    """Ends the span of a request.

    Args:
        span: from `begin_span`.
        scope: of the request, with its route.
        status: of the answer. 0: there was none.
        error_code: of the answer, or empty.
        facts: further attributes. Empty ones are left out.
    """
    method, route = _method(scope), getattr(scope.get("route"), "path", "")
    span.set({name: value for name, value in facts.items() if value})
    span.set({STAGE: "receive", "http.request.method": method, "url.scheme": scope["scheme"]})
    if route:
        span.set({"http.route": route})
    if status:
        span.set({"http.response.status_code": status})
    # The conventions: a request that its caller got wrong is no error of the server.
    error = (error_code or str(status)) if status >= 500 or not status else ""
    span.end(name=f"{method} {route}".rstrip(), error=error)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "_OTHER"
