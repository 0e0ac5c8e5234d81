"""Tool calls: parsed from texts, forced, and streamed, as OpenAI's own client reads them."""

import itertools
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from llguidance import LLMatcher
from openai import pydantic_function_tool
from pydantic import BaseModel

from api.openai.generation import (
    call_schema,
    extract_message_text,
    read_begun_call,
    read_cut_call,
    read_tool_calls,
)
from shared.errors import BadInput
from shared.models.tasks.text import GenerationInput
from tests.api.harness import ApiUnderTest, api_with_redis

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Bern"}}'
LONE = '{"name": "weather", "arguments": {"city": "\\ud800"}}'
"""Half of a surrogate pair, which is how small models write emoji."""
QUOTED = '{"name": "weather", "arguments": "{\\"city\\": \\"\\ud800\\"}"}'
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
        (f"<tool_call>{LONE}</tool_call>", "", 1),
        (f"<tool_call>[{CALL}, {LONE}]</tool_call>", "", 2),
        (f"<tool_call>{QUOTED}</tool_call>", "", 1),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", 0),
        ('<tool_call>{"name": ["weather"]}', '<tool_call>{"name": ["weather"]}', 0),
        ("<tool_call>" + "[" * 50_000, "<tool_call>" + "[" * 50_000, 0),
    ],
)
def test_calls_are_read_in_the_forms_of_the_families(text: str, content: str, calls: int) -> None:
    said, found = read_tool_calls(text, {"weather"}, "seed")
    assert (said, len(found)) == (content, calls)
    assert all(json.loads(call.function.arguments.encode())["city"] for call in found)
    assert len({call.id for call in found}) == calls


pieces = st.lists(
    st.sampled_from([" ", "\n", "a", "<", "<tool", "_call>", "[TOOL_", "CALLS]", "{", "}", CALL])
)


@for_all(pieces)
def test_what_was_shown_stays_the_beginning_of_what_is_said(written: list[str]) -> None:
    text, shown = "", ""
    for piece in written:
        text += piece
        now = extract_message_text(text)
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


def takes(schema: str, arguments: Any) -> bool:
    """True if a call to `f` with these arguments matches."""
    given = {"name": "f", "arguments": arguments}
    return bool(jsonschema_rs.validator_for(json.loads(schema), offline=True).is_valid(given))


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (None, {}, {"a": 1}),
        ({}, {}, {"a": 1}),
        ({"type": "object"}, {}, {"a": 1}),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({"properties": {"a": {}}}, {"a": 1}, [1]),
        ({"properties": {"a": {"properties": {"b": {}}}}}, {"a": {"b": 1}}, {"a": {"c": 1}}),
        ({"properties": {"a": {"type": "object"}}}, {"a": {"any": 1}}, {"b": 1}),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"a": 1, "b": 2}, 5),
        (
            {"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"properties": {"b": {}}}}},
            {"a": {"b": 1}},
            {"a": {"c": 1}},
        ),
        (
            {"properties": {"a": {"anyOf": [{"properties": {"b": {}}}, {"type": "null"}]}}},
            {"a": {"b": 1}},
            {"a": {"c": 1}},
        ),
        # Properties listed in several places
        (
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["c"]}]},
            {"a": 1, "b": 2},
            5,
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/p"}, {"properties": {"b": {}}}],
                "$defs": {"p": {"properties": {"a": {}}, "required": ["a"]}},
            },
            {"a": 1, "b": 2},
            {"b": 2},
        ),
        # Data that looks like a schema, and resource names
        ({"properties": {"a": {"const": {"$ref": "#/b"}}}}, {"a": {"$ref": "#/b"}}, {"a": {}}),
        (
            {"properties": {"a": {"enum": [{"properties": {}}]}}},
            {"a": {"properties": {}}},
            {"a": 1},
        ),
        (
            {"properties": {"properties": {"type": "integer"}}},
            {"properties": 1},
            {"properties": {}},
        ),
        (
            {
                "properties": {"a": {"$ref": "#here"}, "b": {"$ref": "#/$defs/p"}},
                "$defs": {"p": {"$anchor": "here", "type": "integer"}},
            },
            {"a": 1, "b": 2},
            {"a": "x"},
        ),
        (
            {
                "$id": "https://example.com/f",
                "properties": {"a": {"$ref": "https://example.com/f#/$defs/p"}},
                "$defs": {"p": {"type": "integer"}},
            },
            {"a": 1},
            {"a": "x"},
        ),
    ],
    ids=lambda given: str(given)[:60],
)
@pytest.mark.parametrize(
    "others",
    [
        [],
        [
            (
                "other",
                {"properties": {"x": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"type": "string"}}},
            )
        ],
    ],
)
def test_a_forced_call_takes_what_the_tool_does_and_nothing_made_up(
    parameters: dict[str, Any] | None, right: Any, wrong: Any, others: list[Any]
) -> None:
    before = json.dumps(parameters)
    schema = call_schema([("f", parameters), *others])
    assert takes(schema, right)
    assert not takes(schema, wrong)
    assert json.dumps(parameters) == before
    grammar = LLMatcher.grammar_from_json_schema(schema)
    assert LLMatcher.validate_grammar(grammar) == ""


def test_tools_may_have_the_same_name() -> None:
    schema = call_schema(
        [("f", {"properties": {"a": {"type": kind}}}) for kind in ("string", "null")]
    )
    assert takes(schema, {"a": "x"})
    assert takes(schema, {"a": None})
    assert not takes(schema, {"a": 1})


@pytest.mark.parametrize("schema_id", [5, "#here", ""])
def test_the_id_of_a_tools_schema_is_a_uri(schema_id: Any) -> None:
    with pytest.raises(BadInput, match=r"the \$id of tool 'f' must be a URI"):
        call_schema([("f", {"$id": schema_id, "properties": {"a": {}}})])


def test_schemas_of_one_name_are_told_apart_or_refused() -> None:
    one, other = ({"$id": "p", "properties": {"a": {"type": kind}}} for kind in ("string", "null"))
    assert takes(call_schema([("f", one), ("g", one)]), {"a": "x"})
    with pytest.raises(BadInput, match="two schemas have the same \\$id, 'p'"):
        call_schema([("f", one), ("g", other)])


api = api_with_redis()


def asked(text: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "writer",
        "messages": [{"role": "user", "content": f"say {text}"}],
        "tools": [pydantic_function_tool(Weather)],
        "max_tokens": 40,
        **options,
    }


WRITTEN_CALL = '{"name": "Weather", "arguments": {"place": {"city": "Bern"}}}'
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
@pytest.mark.parametrize("text", ["<tool_call> is a tag ", "{ opens a block", "spaces  "])
async def test_text_that_only_looks_like_a_call_comes_whole(api: ApiUnderTest, text: str) -> None:
    client = api.openai()
    whole = await client.chat.completions.create(**asked(text))
    stream = await client.chat.completions.create(**asked(text, stream=True))
    deltas = [chunk.choices[0].delta async for chunk in stream]
    said = "".join(delta.content or "" for delta in deltas)
    assert said == whole.choices[0].message.content == text
    assert not whole.choices[0].message.tool_calls
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
    ],
)
async def test_a_call_that_can_not_be_forced_is_refused(
    api: ApiUnderTest, wrong: dict[str, Any]
) -> None:
    answer = await api.http.post("/v1/chat/completions", json=asked("a", **wrong))
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_a_forced_call_may_come_with_a_response_format(api: ApiUnderTest) -> None:
    """OpenAI accepts this. A call is not a message, so it follows the tool's schema."""
    wanted = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    reply = await api.openai().chat.completions.create(**asked(WRITTEN_CALL, **wanted))
    assert reply.choices[0].message.tool_calls[0].function.name == "Weather"
    (item,) = api.worker.items
    assert isinstance(item.input, GenerationInput)
    assert "arguments" in item.input.json_schema
    assert item.input.schema_field == "tools[0].function.parameters"


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(
    ("said", "name", "arguments"),
    [
        ('{"name": "Weather", "arguments": {"place": {"ci', "Weather", '{"place": {"ci'),
        ('{"name": "Weather", "argu', "Weather", ""),
        ('{"name": "Wea', None, None),
    ],
)
async def test_a_call_that_was_cut_is_a_call(
    api: ApiUnderTest, choice: str, said: str, name: str | None, arguments: str | None
) -> None:
    """As with OpenAI, `finish_reason` shows that the call's arguments are incomplete."""
    if name is None and choice == "auto":
        return  # text that is not a call stays text
    given = asked(said, tool_choice=choice)
    client = api.openai()
    (whole,) = (await client.chat.completions.create(**given)).choices
    async with await client.chat.completions.create(**given, stream=True) as stream:
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    assert whole.finish_reason == "length"
    assert whole.message.content is None
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "length"
    wanted = [] if name is None else [(name, arguments)]
    calls = whole.message.tool_calls or ()
    assert [(call.function.name, call.function.arguments) for call in calls] == wanted
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.function.name for call in deltas if call.id] == [name for name, _ in wanted]
    assert "".join(call.function.arguments for call in deltas) == (arguments or "")


@pytest.mark.anyio
async def test_arguments_of_a_forced_call_come_as_they_are_written(api: ApiUnderTest) -> None:
    said = '{"name": "Weather", "arguments": {"place": {"city": "La Chaux de Fonds"}} }'
    client, given = api.openai(), asked(said, tool_choice="required")
    (whole,) = (await client.chat.completions.create(**given)).choices
    async with await client.chat.completions.create(**given, stream=True) as stream:
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    (call,), deltas = (
        whole.message.tool_calls,
        [call for chunk in chunks for call in chunk.delta.tool_calls or ()],
    )
    assert len(deltas) > 4
    (first,) = (one for one in deltas if one.id)
    assert (first.function.name, first.type) == ("Weather", "function")
    assert {one.index for one in deltas} == {0}
    assert "".join(one.function.arguments for one in deltas) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"
    async with client.chat.completions.stream(**given) as parsed:
        final = await parsed.get_final_completion()
    (parsed_call,) = final.choices[0].message.tool_calls
    assert parsed_call.function.parsed_arguments == Weather(place=Place(city="La Chaux de Fonds"))


@pytest.mark.anyio
async def test_forced_call_that_a_stop_sequence_cuts_is_the_same_whole_and_streamed(
    api: ApiUnderTest,
) -> None:
    client, given = api.openai(), asked(WRITTEN_CALL, tool_choice="required", stop=["ern"])
    (whole,) = (await client.chat.completions.create(**given)).choices
    async with await client.chat.completions.create(**given, stream=True) as stream:
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    assert (whole.message.content, whole.finish_reason) == (None, "stop")
    (call,) = whole.message.tool_calls
    assert call.function.arguments == '{"place": {"city": "B'
    deltas = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in deltas) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "stop"


@for_all(
    st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.floats(), st.lists)),
    st.sampled_from([None, 1]),
    st.sampled_from(["", "<|python_tag|> ", " \n"]),
)
def test_arguments_only_grow(arguments: dict[str, Any], indent: int | None, sign: str) -> None:
    written = json.dumps({"name": "weather", "arguments": arguments}, indent=indent)
    text = sign + written
    _, (call,) = read_tool_calls(text, {"weather"}, "")
    seen = [read_begun_call(text[:end]) for end in range(len(text) + 1)]
    grown = [one.arguments for one in seen if one is not None]
    assert all(later.startswith(before) for before, later in itertools.pairwise(grown))
    assert grown[-1] == call.function.arguments


def test_a_cut_call_comes_behind_the_whole_ones() -> None:
    text, calls = read_tool_calls(
        f"so <tool_call>{CALL}</tool_call> and <tool_call>{CALL[:-9]}", {"weather"}, "s"
    )
    assert (text, len(calls)) == ("so  and <tool_call>" + CALL[:-9], 1)
    rest, cut = read_cut_call(text, {"weather"}, "t", is_whole=False)
    assert rest == "so  and"
    assert cut is not None
    assert cut.function.arguments == '{"city":'
    listed = f"[TOOL_CALLS] [{CALL}, {CALL[:-5]}"
    rest, cut = read_cut_call(listed, {"weather"}, "t", is_whole=True)
    assert cut is not None
    assert (rest, cut.function.arguments) == ("", '{"city": "Bern"}')


@pytest.mark.anyio
async def test_tools_that_are_not_to_be_called_stay_text(api: ApiUnderTest) -> None:
    reply = await api.openai().chat.completions.create(**asked(PARSED, tool_choice="none"))
    assert reply.choices[0].message.content == PARSED
    (item,) = api.worker.items
    assert isinstance(item.input, GenerationInput)
    assert item.input.tools == []
