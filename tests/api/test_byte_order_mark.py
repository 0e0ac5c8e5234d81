"""JSON after a byte order mark, which some editors and clients write, is read as if the mark were
absent.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import pytest

from tests.api.harness import ApiUnderTest, api_with_redis
from tests.api.test_generation import chat, parsed, said

pytestmark = pytest.mark.anyio
MARK = codecs.BOM_UTF8
JSON = {"content-type": "application/json"}
api = api_with_redis()


def json_routes(api: ApiUnderTest) -> list[tuple[str, str]]:
    """Yields the method and path of the routes that take JSON."""
    routes = [
        (method.upper(), re.sub(r"\{.*?\}", "x", path))
        for path, methods in api.app.openapi()["paths"].items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    assert len(routes) > 20
    return routes


async def test_every_route_reads_json_behind_a_mark(api: ApiUnderTest) -> None:
    """A route that reads its body answers `{}` differently from a body that isn't JSON."""
    unread = set[str]()
    for method, path in json_routes(api):
        answers = [
            await api.http.request(method, path, content=body, headers=JSON)
            for body in (b"{}", MARK + b"{}", b"{")
        ]
        plain, marked, broken = (
            _known_part(answer.status_code, answer.json()) for answer in answers
        )
        assert marked == plain, (method, path)
        if broken == plain:
            unread.add(path)
    # They respond before they read a body: without an admin key, or because nothing is named `x`.
    assert {path for path in unread if "/admin/" not in path and "/x" not in path} == set()
    assert len(unread) < len(json_routes(api)) / 2


def _known_part(status: int, body: Any) -> tuple[int, Any]:
    """The status, and the error without the parts that differ between identical requests."""
    return status, {**body, "request_id": ""} if status >= 400 else None


async def test_a_marked_request_is_streamed_under_its_key(api: ApiUnderTest) -> None:
    """With an Idempotency-Key, the `stream` field is read before anything else, even after a
    mark.
    """
    body = api.http.build_request("POST", "/", json=chat(stream=True)).content
    headers = JSON | {"idempotency-key": "marked"}
    answer = await api.http.post("/v1/chat/completions", content=MARK + body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert said(parsed(answer.text))
