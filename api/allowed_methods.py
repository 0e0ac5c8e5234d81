"""All methods of a path, for the header `Allow` (RFC 9110, 10.2.1).

The router would name those of one route only.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods of `routes` for the path of `scope`, with OPTIONS, and with HEAD next to GET."""
    known = list(routes)
    taken = [method for method in _METHODS if _is_taken(known, dict(scope, method=method))]
    return [*taken[:1], "HEAD", *taken[1:], "OPTIONS"] if "GET" in taken else [*taken, "OPTIONS"]


def _is_taken(routes: Iterable[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)
