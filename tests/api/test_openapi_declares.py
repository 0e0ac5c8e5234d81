"""Each route declares the responses that shared code can return for it.

All other tests also compare routes' responses with the document (tests/api/declared.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.harness import ApiUnderTest
from tests.api.test_openapi import operations

pytestmark = pytest.mark.anyio
OF_BODIES = {"408", "413"}
"""Status codes for a body that is too slow or too large (api/http/middleware.py)."""


async def test_routes_with_bodies_declare_what_the_server_says_of_them(
    page: dict[str, Any],
) -> None:
    for path, method, operation in operations(page):
        if "requestBody" in operation:
            declared = operation["responses"].keys()
            assert declared >= OF_BODIES, (path, method)
            assert declared & {"400", "422"}, (path, method)


async def test_routes_with_keys_declare_what_is_said_of_keys(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        if "security" in operation:
            assert operation["responses"].keys() >= {"401", "403", "503"}, (path, method)


async def test_each_route_declares_the_refusal_of_a_head_with_its_body(
    page: dict[str, Any],
) -> None:
    refused = page["components"]["responses"]["HeadTooLarge"]
    assert refused["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorReply")
    for path, method, operation in operations(page):
        assert "431" in operation["responses"], (path, method)


async def test_answers_for_callers_who_cancel_are_declared(page: dict[str, Any]) -> None:
    """A later request for a canceled chat reports the cancellation."""
    for path in ("/v1/chat/completions/{completion_id}", "/v1/objects/{key}"):
        assert "499" in page["paths"][path]["get"]["responses"], path
    for path, _, operation in operations(page):
        if "X-Penstock-Deadline-Ms" in str(operation.get("parameters", "")):
            assert operation["responses"].keys() >= {"499", "503", "504", "429"}, path


async def test_a_canceled_chat_and_a_wrong_cursor_of_models(
    page: dict[str, Any], api: ApiUnderTest
) -> None:
    agent = {"user-agent": "replicate-python/1.0.7"}
    answer = await api.http.get("/v1/models", params={"cursor": "?"}, headers=agent)
    declared = page["paths"]["/v1/models"]["get"]["responses"]
    assert str(answer.status_code) in declared
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in declared[str(answer.status_code)]["content"]
    assert answer.status_code == 422
