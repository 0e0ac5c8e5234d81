"""Every field of every request type in the installed `openai` client: null, absent, and a typical
value.

Fields that are optional in the client's types may be null. Any other value is either accepted or
rejected with the field's name and a reason.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    image_edit_params,
    image_generate_params,
)
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
    completion_update_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
)
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
    input_token_count_params,
    response_create_params,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import (
    FunctionDefinition,
    ResponseFormatJSONSchema,
)
from openai.types.shared_params.response_format_json_schema import JSONSchema

from tests.api.client_fields import Field, params_of
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
WHITE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAATUlEQVR42u3PQQ0AAAgEILV/5zOF"
    "DzdoQCepz6aeExAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQELi3cqoDfaKuZM4AAAAASUVO"
    "RK5CYII="
)
SAY = {"role": "user", "content": "say a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "s", "schema": {"type": "object"}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


class Case(NamedTuple):
    """A request type: a body that is accepted, and where the type's fields are in the body."""

    path: str
    body: dict[str, Any]
    place: tuple[str | int, ...]
    kinds: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.path}:{self.kinds[0].__name__}"


def chat(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [SAY, *messages, SAY], "max_tokens": 2, **others}


def response(*items: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"model": "writer", "input": [*items, SAY], "max_output_tokens": 2, **others}


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}
SAID = {"type": "output_text", "text": "a", "annotations": []}
MESSAGE = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
CASES = [
    Case(
        "/v1/embeddings",
        {"model": TEXT_MODEL.name, "input": "a"},
        (),
        (embedding_create_params.EmbeddingCreateParams,),
    ),
    Case(
        "/v1/images/generations",
        {"prompt": "a", "size": "64x64"},
        (),
        (
            image_generate_params.ImageGenerateParamsNonStreaming,
            image_generate_params.ImageGenerateParamsBase,
        ),
    ),
    Case(
        "/v1/images/edits",
        {"prompt": "a", "size": "64x64", "images": [{"image_url": WHITE}]},
        (),
        (image_edit_params.ImageEditParamsNonStreaming, image_edit_params.ImageEditParamsBase),
    ),
    Case(
        "/v1/completions",
        {"model": "writer", "prompt": "say a", "max_tokens": 2},
        (),
        (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsBase,
        ),
    ),
    Case(
        CHAT,
        chat(),
        (),
        (
            chat_create_params.CompletionCreateParamsNonStreaming,
            chat_create_params.CompletionCreateParamsBase,
        ),
    ),
    Case(CHAT, chat(), ("messages", 0), (ChatCompletionUserMessageParam,)),
    Case(
        CHAT,
        chat({"role": "system", "content": "a"}),
        ("messages", 1),
        (ChatCompletionSystemMessageParam,),
    ),
    Case(
        CHAT,
        chat({"role": "developer", "content": "a"}),
        ("messages", 1),
        (ChatCompletionDeveloperMessageParam,),
    ),
    Case(
        CHAT,
        chat({"role": "assistant", "content": "a", "tool_calls": [CALL]}),
        ("messages", 1),
        (ChatCompletionAssistantMessageParam,),
    ),
    Case(
        CHAT,
        chat({"role": "tool", "content": "a", "tool_call_id": "c"}),
        ("messages", 1),
        (ChatCompletionToolMessageParam,),
    ),
    Case(
        CHAT,
        chat({"role": "assistant", "tool_calls": [CALL]}),
        ("messages", 1, "tool_calls", 0),
        (ChatCompletionMessageFunctionToolCallParam,),
    ),
    Case(
        CHAT,
        chat({"role": "user", "content": [{"type": "text", "text": "a"}]}),
        ("messages", 1, "content", 0),
        (ChatCompletionContentPartTextParam,),
    ),
    Case(CHAT, chat(tools=[TOOL]), ("tools", 0), (ChatCompletionFunctionToolParam,)),
    Case(CHAT, chat(tools=[TOOL]), ("tools", 0, "function"), (FunctionDefinition,)),
    Case(
        CHAT,
        chat(stream=True, stream_options={}),
        ("stream_options",),
        (ChatCompletionStreamOptionsParam,),
    ),
    Case(
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": SCHEMA}),
        ("response_format",),
        (ResponseFormatJSONSchema,),
    ),
    Case(
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": SCHEMA}),
        ("response_format", "json_schema"),
        (JSONSchema,),
    ),
    Case(
        RESPONSES,
        response(),
        (),
        (
            response_create_params.ResponseCreateParamsNonStreaming,
            response_create_params.ResponseCreateParamsBase,
        ),
    ),
    Case(RESPONSES, response(SAY), ("input", 0), (EasyInputMessageParam,)),
    Case(
        RESPONSES,
        response(MESSAGE | {"content": [SAID]}),
        ("input", 0),
        (ResponseOutputMessageParam,),
    ),
    Case(
        RESPONSES,
        response(MESSAGE | {"content": [SAID]}),
        ("input", 0, "content", 0),
        (ResponseOutputTextParam,),
    ),
    Case(
        RESPONSES,
        response({"role": "user", "content": [{"type": "input_text", "text": "a"}]}),
        ("input", 0, "content", 0),
        (ResponseInputTextParam,),
    ),
    Case(RESPONSES, response(CALLED), ("input", 0), (ResponseFunctionToolCallParam,)),
    Case(
        RESPONSES,
        response(CALLED, {"type": "function_call_output", "call_id": "c", "output": "a"}),
        ("input", 1),
        (FunctionCallOutput,),
    ),
    Case(
        RESPONSES,
        response({"type": "reasoning", "id": "rs_1", "summary": []}),
        ("input", 0),
        (ResponseReasoningItemParam,),
    ),
    Case(
        RESPONSES,
        response(tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}]),
        ("tools", 0),
        (FunctionToolParam,),
    ),
    Case(RESPONSES, response(text={}), ("text",), (ResponseTextConfigParam,)),
    Case(
        "/v1/responses/input_tokens",
        {"model": "writer", "input": "a"},
        (),
        (input_token_count_params.InputTokenCountParams,),
    ),
    Case(
        "/v1/chat/completions/{chat}",
        {"metadata": {}},
        (),
        (completion_update_params.CompletionUpdateParams,),
    ),
    Case("/v1/conversations", {}, (), (conversation_create_params.ConversationCreateParams,)),
    Case(
        "/v1/conversations/{conversation}",
        {"metadata": {}},
        (),
        (conversation_update_params.ConversationUpdateParams,),
    ),
    Case(
        "/v1/conversations/{conversation}/items",
        {"items": [SAY]},
        (),
        (item_create_params.ItemCreateParams,),
    ),
    Case(
        "/v1/batches",
        {
            "input_file_id": "{file}",
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        },
        (),
        (batch_create_params.BatchCreateParams,),
    ),
]
NULLS_REFUSED = {
    ("/v1/completions", "prompt"),
    (RESPONSES, "call_id"),
    ("/v1/responses/input_tokens", "input"),
}
"""Null would mean text without a prompt, a result without a call, or nothing to count."""


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> AsyncIterator[ApiUnderTest]:
    folder = tmp_path_factory.mktemp("api")
    async with running_api(settings_for(folder, redis_url=redis_server.url)) as running:
        yield running


async def _prepared(api: ApiUnderTest, case: Case) -> tuple[str, dict[str, Any]]:
    """A case's path and body, with the ids of existing objects."""
    text = json.dumps([case.path, case.body])
    if "{conversation}" in text:
        made = await api.http.post("/v1/conversations", json={})
        text = text.replace("{conversation}", made.json()["id"])
    if "{chat}" in text:
        made = await api.http.post(CHAT, json=chat(store=True))
        text = text.replace("{chat}", made.json()["id"])
    if "{file}" in text:
        files = {"file": ("a.jsonl", b"{}\n")}
        made = await api.http.post("/v1/files", files=files, data={"purpose": "batch"})
        text = text.replace("{file}", made.json()["id"])
    path, body = json.loads(text)
    return path, body


def _changed(body: dict[str, Any], place: tuple[str | int, ...], **field: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(body))
    inner: Any = changed
    for step in place:
        inner = inner[step]
    inner |= field
    return changed


def _at(body: Any, place: tuple[str | int, ...]) -> dict[str, Any]:
    for step in place:
        body = body[step]
    found: dict[str, Any] = body
    return found


async def _flaws(api: ApiUnderTest, case: Case, field: Field) -> list[str]:
    path, body = await _prepared(api, case)
    found = []
    if field.is_nullable:
        answer = await api.http.post(path, json=_changed(body, case.place, **{field.name: None}))
        is_refused = (case.path, field.name) in NULLS_REFUSED and _is_well_refused(
            answer, case, field, None
        )
        if answer.status_code != 200 and not is_refused:
            found.append(f"{field.name}: null is {answer.status_code}: {answer.text}")
    if field.name in _at(body, case.place):
        return found
    answer = await api.http.post(path, json=_changed(body, case.place, **{field.name: field.usual}))
    if answer.status_code != 200 and not _is_well_refused(answer, case, field, field.usual):
        found.append(f"{field.name}: {field.usual!r} is {answer.status_code}: {answer.text}")
    return found


def _is_well_refused(answer: httpx.Response, case: Case, field: Field, value: Any) -> bool:
    """True if the rejection includes the field's name and a reason."""
    error = answer.json()["error"]
    is_named = error["param"] == (case.place[0] if case.place else field.name)
    # Missing ids are reported in OpenAI's wording.
    is_shown = field.name in error["message"] or repr(value) in error["message"]
    has_reason = len(error["message"]) > len(field.name) + len("unknown")
    return answer.status_code in (400, 404) and is_named and is_shown and has_reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_field_of_the_client_is_taken_or_refused_by_name(
    api: ApiUnderTest, case: Case
) -> None:
    path, body = await _prepared(api, case)
    plain = await api.http.post(path, json=body)
    assert plain.status_code == 200, plain.text
    found: list[str] = []
    for field in params_of(*case.kinds):
        found += await _flaws(api, case, field)
    assert not found, "\n".join(found)


async def test_what_the_client_dumps_of_answers_is_taken_back(api: ApiUnderTest) -> None:
    """This includes every null that the client's types allow."""
    client = api.openai()
    call = 'say sure <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    said = await client.chat.completions.create(
        model="writer", messages=[{"role": "user", "content": call}], tools=[tool], max_tokens=40
    )
    message = said.choices[0].message.model_dump()
    assert message["tool_calls"]
    again = await api.http.post(CHAT, json=chat(message))
    assert again.status_code == 200, again.text
    answered = await client.responses.create(
        model="writer",
        input=call,
        tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}],
        max_output_tokens=40,
        include=["message.output_text.logprobs"],
    )
    items = [item.model_dump() for item in answered.output]
    assert [item["type"] for item in items] == ["message", "function_call"]
    again = await api.http.post(RESPONSES, json=response(*items))
    assert again.status_code == 200, again.text
    listed = await client.responses.input_items.list(again.json()["id"], order="asc")
    items = [item.model_dump() for item in listed.data]
    again = await api.http.post(RESPONSES, json=response(*items))
    assert again.status_code == 200, again.text
