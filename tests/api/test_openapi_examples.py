"""Every endpoint in the OpenAPI document lists its errors and has examples its schemas accept."""

import asyncio
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.api.endpoint_page import PAGE, example_of, read_document, write_page
from tests.api.test_openapi import operations

pytestmark = pytest.mark.anyio
_IS_BINARY = {"type": "string", "format": "binary"}


def contents(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The bodies of a request and its replies, with the location of each."""
    for media_type, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"request {media_type}", body
    for status, response in operation["responses"].items():
        for media_type, body in response.get("content", {}).items():
            if body["schema"] != _IS_BINARY:
                yield f"{status} {media_type}", body


async def test_every_body_has_an_example_of_its_schema(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        for place, body in contents(operation):
            example = example_of(body, page)
            assert example is not None, f"{method} {path} {place}: add it to api/http/examples.json"
            schema = {**body["schema"], "components": page["components"]}
            jsonschema.Draft202012Validator(schema).validate(example)


async def test_every_endpoint_has_a_summary_and_errors(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        assert operation["summary"], (method, path)
        assert any(status >= "400" for status in operation["responses"]), (method, path)
        assert any(status < "300" for status in operation["responses"]), (method, path)


def test_the_page_of_endpoints_is_current() -> None:
    written = write_page(asyncio.run(read_document()))
    assert PAGE.read_text(encoding="utf-8") == written, "run python -m tests.api.endpoint_page"
