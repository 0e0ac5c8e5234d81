"""Calls of tools: read out of texts, forced, and streamed, as OpenAI's own client reads them."""

import json
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from llguidance import LLMatcher
from openai import pydantic_function_tool
from pydantic import BaseModel

from api.openai.generation import call_schema, read_tool_calls, shown_of
from shared.tasks.text import GenerationInput
from tests.api.harness import ApiUnderTest, api_with_redis

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Bern"}}'
TRICKY = '{"name": "weather", "arguments": {"city": "</tool_call> ]}"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>{CALL}</tool_call>", "", 1),
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "", 2),
        (f"so <tool_call>[{CALL}, {CALL}]</tool_call> then", "so  then", 2),
        (f"so <tool_call>{CALL}", "so", 1),
        (f"<tool_call>{TRICKY}</tool_call> [1]", " [1]", 1),
        (f"[TOOL_CALLS] [{CALL}] and [more]", " and [more]", 1),
        (PARAMETERS, "", 1),
        (f"<|python_tag|>{PARAMETERS}", "", 1),
        (f" {CALL}\n", "", 1),
        (f"{CALL} and more", f"{CALL} and more", 0),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", 0),
        ('<tool_call>{"name": ["weather"]}', '<tool_call>{"name": ["weather"]}', 0),
        ("<tool_call>" + "[" * 50_000, "<tool_call>" + "[" * 50_000, 0),
    ],
)
def test_calls_are_read_in_the_forms_of_the_families(text: str, content: str, calls: int) -> None:
    said, found = read_tool_calls(text, {"weather"}, "seed")
    assert (said, len(found)) == (content, calls)
    assert all(json.loads(call.function.arguments)["city"] for call in found)
    assert len({call.id for call in found}) == calls


pieces = st.lists(
    st.sampled_from([" ", "\n", "a", "<", "<tool", "_call>", "[TOOL_", "CALLS]", "{", "}", CALL])
)


@for_all(pieces)
def test_what_was_shown_stays_the_beginning_of_what_is_said(written: list[str]) -> None:
    text, shown = "", ""
    for piece in written:
        text += piece
        now = shown_of(text)
        assert now.startswith(shown)
        shown = now
        assert read_tool_calls(text, {"weather"}, "")[0].startswith(shown)


class Place(BaseModel):
    city: str


class Weather(BaseModel):
    """Tells the weather."""

    place: Place


@pytest.mark.parametrize("others", [[], [("other", None)]])
def test_the_schema_of_a_forced_call_takes_parts_of_schemas_along(others: list[Any]) -> None:
    parameters = pydantic_function_tool(Weather)["function"]["parameters"]
    grammar = LLMatcher.grammar_from_json_schema(call_schema([("Weather", parameters), *others]))
    assert LLMatcher.validate_grammar(grammar) == ""


api = api_with_redis()


def asked(text: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "writer",
        "messages": [{"role": "user", "content": f"say {text}"}],
        "tools": [pydantic_function_tool(Weather)],
        "max_tokens": 40,
        **options,
    }


PARSED = '<tool_call>{"name": "Weather", "arguments": {"place": {"city": "Bern"}}}</tool_call>'


@pytest.mark.anyio
async def test_the_client_parses_calls_whole_and_streamed(api: ApiUnderTest) -> None:
    client = api.openai()
    reply = await client.chat.completions.parse(**asked(f"sure {PARSED} done"))
    async with client.chat.completions.stream(**asked(f"sure {PARSED} done")) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_completion()
    for found in (reply, streamed):
        message = found.choices[0].message
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == Weather(place=Place(city="Bern"))
        assert found.choices[0].finish_reason == "tool_calls"
        assert message.content == "sure  done"
    assert "tool_calls.function.arguments.done" in {event.type for event in events}


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["<tool_call> is a tag ", "{ opens a block", " spaces  "])
async def test_text_that_only_looks_like_a_call_comes_whole(api: ApiUnderTest, text: str) -> None:
    client = api.openai()
    whole = await client.chat.completions.create(**asked(text))
    stream = await client.chat.completions.create(**asked(text, stream=True))
    deltas = [chunk.choices[0].delta async for chunk in stream]
    said = "".join(delta.content or "" for delta in deltas)
    assert said == whole.choices[0].message.content
    assert not any(delta.tool_calls for delta in deltas)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Weather"}}]
)
async def test_a_call_can_be_forced(api: ApiUnderTest, choice: Any) -> None:
    said = '{"name": "Weather", "arguments": {"place": {"city": "Bern"}}}'
    reply = await api.openai().chat.completions.parse(**asked(said, tool_choice=choice))
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(place=Place(city="Bern"))
    (item,) = api.worker.items
    assert isinstance(item.input, GenerationInput)
    assert json.loads(item.input.json_schema)["properties"]["name"] == {"const": "Weather"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
async def test_a_call_that_can_not_be_forced_is_refused(
    api: ApiUnderTest, wrong: dict[str, Any]
) -> None:
    answer = await api.http.post("/v1/chat/completions", json=asked("a", **wrong))
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_tools_that_are_not_to_be_called_stay_text(api: ApiUnderTest) -> None:
    reply = await api.openai().chat.completions.create(**asked(PARSED, tool_choice="none"))
    assert reply.choices[0].message.content == PARSED
    (item,) = api.worker.items
    assert isinstance(item.input, GenerationInput)
    assert item.input.tools == []
