"""All of an app's routes, including those left out of its OpenAPI document."""

from collections.abc import Iterable, Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Yields the method and path of every route."""
    found = list(_walked(app.routes, ""))
    assert len(found) > 30, "FastAPI keeps its routes somewhere else now"
    return found


def _walked(routes: Iterable[BaseRoute], prefix: str) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods or ()):
                yield method, prefix + route.path
        elif (router := getattr(route, "original_router", None)) is not None:
            # `include_router` adds this to an app's routes.
            yield from _walked(router.routes, prefix + route.include_context.prefix)  # type: ignore[attr-defined]
