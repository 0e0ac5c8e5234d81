"""Compares each response in a test with its route's declaration in the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import httpx
from fastapi import FastAPI

OF_THE_TRANSPORT = frozenset(
    {
        *("date", "server", "content-length", "content-type", "content-encoding", "vary"),
        *("transfer-encoding", "connection", "cache-control", "x-accel-buffering"),
        *("x-content-type-options", "content-security-policy", "referrer-policy"),
    }
)
"""Headers that are not specific to this API."""
OF_BROWSERS = "access-control-"
NOT_OF_ROUTES = frozenset({405})


@cache
def _pattern(place: str) -> re.Pattern[str]:
    """Matches an operation's paths. An object's key may contain slashes."""
    any_text = ".+" if place.endswith("/{key}") else "[^/]+"
    return re.compile(re.sub(r"\\{[^}]*\\}", lambda _: any_text, re.escape(place)))


class Declared:
    """The routes and responses that an app's OpenAPI document declares."""

    _document: ClassVar[dict[str, Any]] = {}
    """The document of the first app queried.

    Building it takes a third of a second, and it is the same for all apps because it does not
    depend on settings or models (tests/api/test_openapi.py).
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.undeclared: list[str] = []

    @property
    def document(self) -> dict[str, Any]:
        if not Declared._document:
            Declared._document = self._app.openapi()
        return Declared._document

    async def check(self, response: httpx.Response) -> None:
        """Records responses that are missing from the document. An httpx event hook."""
        request = response.request
        self.undeclared += self.missing(
            request.method, request.url.path, response.status_code, response.headers
        )

    def missing(self, method: str, path: str, status: int, headers: Mapping[str, str]) -> list[str]:
        """Returns the parts of a response that the document does not declare."""
        operation = self._operation(method, path)
        if operation is None or status in NOT_OF_ROUTES:
            return []
        place = f"{method} {operation['path']} {status}"
        declared = operation["responses"].get(str(status))
        if declared is None:
            return [f"{place} is not declared"]
        if "$ref" in declared:
            declared = self._resolved(declared["$ref"])
        names = {name.lower() for name in declared.get("headers", {})}
        found = [
            f"{place}: the header {name} is not declared"
            for name in headers
            if name not in names | OF_THE_TRANSPORT and not name.startswith(OF_BROWSERS)
        ]
        kind = headers.get("content-type", "").partition(";")[0]
        content = declared.get("content", {})
        if kind and method != "HEAD" and kind not in content and "*/*" not in content:
            found.append(f"{place}: the type {kind} is not declared")
        return found

    def _operation(self, method: str, path: str) -> dict[str, Any] | None:
        """The operation for a request. None if it is not in the document."""
        verb = "get" if method == "HEAD" else method.lower()
        # Paths without parameters come before paths with parameters.
        for place in sorted(self.document["paths"], key=lambda one: one.count("{")):
            found = self.document["paths"][place].get(verb)
            if found is not None and _pattern(place).fullmatch(path):
                return dict(found, path=place)
        return None

    def _resolved(self, reference: str) -> dict[str, Any]:
        node: Any = self.document
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]
        assert isinstance(node, dict)
        return node
