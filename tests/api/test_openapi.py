"""The OpenAPI document is complete: every route, every status a route can return, and examples that
are accepted unchanged.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.errors import ERROR_MAPPINGS
from api.openai.embeddings_schemas import EmbeddingsBody
from api.openai.image_edits import EditBody
from api.openai.images import GenerationBody
from api.openai.rerank import RerankBody
from shared.models.catalog import Catalog
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
NOT_KEYED = {"/health", "/healthz", "/livez", "/readyz", "/v1/objects/{key}"}
NEVER_OF_A_ROUTE = {405}
"""Statuses that no documented method returns."""
OUR_SHAPES = (
    ("application/json", "ErrorReply"),
    ("application/problem+json", "Problem"),
    ("application/json", "AnthropicErrorReply"),
    ("application/json", "OcrErrorReply"),
)
OF_BOTH_APIS = {"/v1/files", "/v1/files/{file_id}", "/v1/models"}
"""Paths that exist in both OpenAI's and Replicate's APIs."""


def operations(page: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


async def test_every_reference_leads_somewhere(page: dict[str, Any]) -> None:
    for reference in _references(page):
        node: Any = page
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]
    assert not {"HTTPValidationError", "ValidationError"} & page["components"]["schemas"].keys()


async def test_keys_are_asked_for_where_they_are_needed(
    api: ApiUnderTest, page: dict[str, Any]
) -> None:
    keyed: list[dict[str, list[str]]] = [{"key": []}, {"header": []}]
    for path, _, operation in operations(page):
        linked: list[dict[str, list[str]]] = [{}] if path.endswith("/stream") else []
        assert operation.get("security") == (None if path in NOT_KEYED else keyed + linked), path
        assert ("401" in operation["responses"]) is (path not in NOT_KEYED), path


async def test_errors_have_the_shape_that_their_routes_speak(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        shapes = set()
        for status, response in operation["responses"].items():
            if response == {"$ref": "#/components/responses/HeadTooLarge"}:
                continue
            assert response["description"] != "Successful Response", (path, method, status)
            assert "X-Request-Id" in response["headers"], (path, method, status)
            assert ("content" in response) is (status not in ("202", "204")), (path, method, status)
            for media_type, body in response.get("content", {}).items():
                assert body["schema"], (path, method, status)
                if int(status) >= 400 and path != "/readyz":
                    shapes.add((media_type, body["schema"]["$ref"].rpartition("/")[2]))
        if path in OF_BOTH_APIS:
            shapes -= {("application/problem+json", "Problem")}
        assert not shapes or shapes in [{shape} for shape in OUR_SHAPES], (
            path,
            method,
            shapes,
        )


async def test_every_status_of_an_error_stands_at_some_route(page: dict[str, Any]) -> None:
    documented = {
        int(status) for *_, operation in operations(page) for status in operation["responses"]
    }
    missing = (
        {answered.status for answered in ERROR_MAPPINGS.values()} - documented - NEVER_OF_A_ROUTE
    )
    assert not missing, (
        f"{missing}: give them words in api/http/openapi.py,"
        " and name them at the routes that give them"
    )


async def test_examples_are_taken_as_they_stand(api: ApiUnderTest, page: dict[str, Any]) -> None:
    for path, body in (
        ("/v1/embeddings", EmbeddingsBody),
        ("/v1/rerank", RerankBody),
        ("/v1/images/generations", GenerationBody),
        ("/v1/images/edits", EditBody),
    ):
        example = page["components"]["schemas"][body.__name__]["example"]
        assert (await api.http.post(path, json=example)).status_code == 200
    assert "…" not in msgspec.json.encode(page).decode()


async def test_forms_are_described(page: dict[str, Any]) -> None:
    audio = ("/v1/audio/transcriptions", "/v1/audio/translations")
    images = ("/v1/images/edits", "/v1/images/variations")
    for path in (*images, "/v1/files", *audio):
        assert "multipart/form-data" in page["paths"][path]["post"]["requestBody"]["content"]
    for path in ("/v1/predictions", "/v1/models/{owner}/{name}/predictions"):
        assert {"200", "201"} <= page["paths"][path]["post"]["responses"].keys()
    assert {"200", "201"} <= page["paths"]["/v1/predictions/{prediction_id}"]["put"][
        "responses"
    ].keys()


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    return set().union(*(_references(value) for value in node)) if isinstance(node, list) else set()


async def test_no_setting_and_no_model_is_in_it(
    page: dict[str, Any], tmp_path: Path, redis_url: str
) -> None:
    """So all tests in a process compare responses with the same document
    (tests/api/declared.py).
    """
    keys = keys_url(tmp_path, a="acme")
    other = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(other, catalog=Catalog((TEXT_MODEL,))) as api:
        assert (await api.http.get("/openapi.json", headers=bearer("a"))).json() == page
