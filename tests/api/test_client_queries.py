"""Every parameter of every query in the installed `openai` client: empty, absent, and a typical
value.

The client leaves nulls out of a query. In a handwritten query, null is an empty value, which is
either treated as absent or rejected. Any other value is either accepted or rejected with the
parameter's name.
"""

import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from openai._qs import Querystring
from openai.types import batch_list_params, file_list_params
from openai.types.admin.organization import (
    usage_costs_params,
    usage_embeddings_params,
    usage_images_params,
)
from openai.types.chat import completion_list_params
from openai.types.chat.completions import message_list_params
from openai.types.conversations import item_create_params, item_list_params, item_retrieve_params
from openai.types.responses import input_item_list_params, response_retrieve_params

from tests.api.client_fields import Field, params_of
from tests.api.harness import ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
QUERY = Querystring(array_format="brackets")
"""Encoded as the client encodes its queries."""
SAY = {"role": "user", "content": "say a"}
USAGE = "/v1/organization/usage"


class Case(NamedTuple):
    """A route with a query, and the client's types that describe it."""

    path: str
    kinds: tuple[Any, ...]
    needed: str = ""
    """Query parameters that are always required."""
    body: dict[str, Any] | None = None
    """If there is a body, the request is a POST."""


CASES = [
    Case("/v1/files", (file_list_params.FileListParams,)),
    Case("/v1/batches", (batch_list_params.BatchListParams,)),
    Case("/v1/chat/completions", (completion_list_params.CompletionListParams,)),
    Case("/v1/chat/completions/{chat}/messages", (message_list_params.MessageListParams,)),
    Case(
        "/v1/responses/{response}",
        (
            response_retrieve_params.ResponseRetrieveParamsNonStreaming,
            response_retrieve_params.ResponseRetrieveParamsBase,
        ),
    ),
    Case(
        "/v1/responses/{response}",
        (
            response_retrieve_params.ResponseRetrieveParamsStreaming,
            response_retrieve_params.ResponseRetrieveParamsBase,
        ),
        "stream=true",
    ),
    Case("/v1/responses/{response}/input_items", (input_item_list_params.InputItemListParams,)),
    Case("/v1/conversations/{conversation}/items", (item_list_params.ItemListParams,)),
    Case(
        "/v1/conversations/{conversation}/items/{item}", (item_retrieve_params.ItemRetrieveParams,)
    ),
    Case(
        "/v1/conversations/{conversation}/items",
        (item_create_params.ItemCreateParams,),
        body={"items": [SAY]},
    ),
]
BODY_OR_PATH = {"items", "conversation_id"}
"""Fields in the client's types that are not query parameters."""
USAGES = [
    Case(f"{USAGE}/embeddings", (usage_embeddings_params.UsageEmbeddingsParams,)),
    Case(f"{USAGE}/images", (usage_images_params.UsageImagesParams,)),
    Case("/v1/organization/costs", (usage_costs_params.UsageCostsParams,)),
]


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> AsyncIterator[ApiUnderTest]:
    folder = tmp_path_factory.mktemp("api")
    async with running_api(settings_for(folder, redis_url=redis_server.url)) as running:
        yield running


async def _path(api: ApiUnderTest, path: str) -> str:
    """The path with the ids of existing objects."""
    text = {"model": "writer", "max_tokens": 2, "messages": [SAY]}
    if "{chat}" in path:
        made = await api.http.post("/v1/chat/completions", json=text | {"store": True})
        path = path.replace("{chat}", made.json()["id"])
    if "{response}" in path:
        made = await api.http.post("/v1/responses", json={"model": "writer", "input": "say a"})
        path = path.replace("{response}", made.json()["id"])
    if "{conversation}" in path:
        made = await api.http.post("/v1/conversations", json={"items": [SAY]})
        conversation = made.json()["id"]
        items = await api.http.get(f"/v1/conversations/{conversation}/items")
        path = path.replace("{conversation}", conversation)
        path = path.replace("{item}", items.json()["data"][0]["id"])
    return path


async def _asked(api: ApiUnderTest, case: Case, path: str, query: str) -> httpx.Response:
    at = f"{path}?{query}"
    return await (api.http.get(at) if case.body is None else api.http.post(at, json=case.body))


def _is_well_refused(answer: httpx.Response, field: Field) -> bool:
    """True if the rejection includes the parameter's name and a reason."""
    if answer.status_code not in (400, 404):
        return False
    error = answer.json()["error"]
    has_reason = len(error["message"]) > len(field.name) + len("unknown")
    return error["param"] == field.name and field.name in error["message"] and has_reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path}:{case.kinds[0].__name__}")
async def test_each_parameter_of_the_client_is_taken_or_refused_by_name(
    api: ApiUnderTest, case: Case
) -> None:
    path = await _path(api, case.path)
    plain = await _asked(api, case, path, case.needed)
    assert plain.status_code == 200, plain.text
    found: list[str] = []
    for field in params_of(*case.kinds):
        if field.name in BODY_OR_PATH:
            continue
        for value in ({field.name: field.usual}, {field.name: ""}):
            query = f"{case.needed}&{QUERY.stringify(value)}"
            answer = await _asked(api, case, path, query)
            if answer.status_code != 200 and not _is_well_refused(answer, field):
                found.append(f"{query}: {answer.status_code}: {answer.text}")
    assert not found, "\n".join(found)


async def test_a_filter_of_stored_chats_is_never_left_out(api: ApiUnderTest) -> None:
    """A filter that matches nothing returns nothing."""
    await _path(api, "/v1/chat/completions/{chat}/messages")
    for given in ({"model": "x"}, {"metadata": {"a": "x"}}):
        listed = await api.http.get(f"/v1/chat/completions?{QUERY.stringify(given)}")
        assert listed.json()["data"] == [], given
    assert (await api.http.get("/v1/chat/completions")).json()["data"]
    other_form = await api.http.get("/v1/chat/completions?metadata=a")
    assert other_form.json()["error"]["param"] == "metadata"


@pytest.mark.parametrize("case", USAGES, ids=lambda case: case.path)
async def test_a_filter_of_usage_is_known_or_refused_by_name(api: ApiUnderTest, case: Case) -> None:
    """If a filter were ignored, unfiltered usage would be reported as the filtered usage."""
    known = {"project_ids", "api_key_ids"}
    known.add("line_items" if case.path.endswith("costs") else "models")
    for field in params_of(*case.kinds):
        if not isinstance(field.usual, list) or field.name in {*known, "group_by"}:
            continue
        query = QUERY.stringify({"start_time": int(time.time()), field.name: field.usual})
        answer = await _asked(api, case, case.path, query)
        assert _is_well_refused(answer, field), f"{query}: {answer.text}"
