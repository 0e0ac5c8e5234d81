"""/v1/messages in Anthropic's format. `make clients` reads it with Anthropic's own client."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ContextLengthExceeded
from shared.models.tasks.text import GenerationInput
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_generation import TEXT, parsed
from tests.api.test_stored_responses import prompt_of
from tests.keys import key_for, keys_url

pytestmark = pytest.mark.anyio
MESSAGES = "/v1/messages"
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
CALL = 'say sure <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


def asked(text: Any = f"say {TEXT}", **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "writer", "max_tokens": 40, "messages": messages, **options}


async def events_of(api: ApiUnderTest, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await api.http.post(MESSAGES, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    blocks = parsed(answer.text)
    events = [json.loads(one["data"]) for one in blocks]
    assert [one["type"] for one in events] == [one["event"] for one in blocks]
    return events


async def test_a_message_is_answered(api: ApiUnderTest) -> None:
    answer = await api.http.post(MESSAGES, json=asked(system="be short"))
    made = answer.json()
    assert made["content"] == [{"type": "text", "text": TEXT, "citations": None}]
    assert (made["type"], made["role"], made["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    assert made["id"].startswith("msg_")
    usage = {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 5}
    assert made["usage"] == usage | {"cache_creation_input_tokens": 0}
    assert prompt_of(api)[0] == {"role": "system", "content": "be short"}
    assert "x-penstock-cost-usd" in answer.headers


async def test_a_stream_has_the_events_of_anthropics(api: ApiUnderTest) -> None:
    events = await events_of(api, asked())
    kinds = [one["type"] for one in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert 1 <= len(deltas) <= 5, "one for each token, or for those that were read together"
    assert "".join(deltas) == TEXT
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    usage = events[-2]["usage"]
    assert usage["output_tokens"] == 5
    # The prompt's size is known when the message starts, and clients read it there.
    assert usage["input_tokens"] > 0
    assert events[0]["message"]["usage"] == usage | {"output_tokens": 0}


async def test_a_stop_sequence_is_told_whole_and_streamed(api: ApiUnderTest) -> None:
    body = asked("say one two three", stop_sequences=["four", " three"])
    made = (await api.http.post(MESSAGES, json=body)).json()
    assert made["content"][0]["text"] == "one two"
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", " three")
    ended = (await events_of(api, body))[-2]["delta"]
    assert ended == {"stop_reason": "stop_sequence", "stop_sequence": " three"}


@pytest.mark.parametrize(
    ("said", "reason"), [("one two END", "end_turn"), ("one two three four", "max_tokens")]
)
async def test_a_text_that_met_no_stop_sequence_names_none(
    api: ApiUnderTest, said: str, reason: str
) -> None:
    body = asked(f"say {said}", stop_sequences=["four"], max_tokens=3 if "END" in said else 2)
    made = (await api.http.post(MESSAGES, json=body)).json()
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, None)
    ended = (await events_of(api, body))[-2]["delta"]
    assert ended == {"stop_reason": reason, "stop_sequence": None}


async def test_calls_of_tools_are_blocks_whole_and_streamed(api: ApiUnderTest) -> None:
    body = asked(CALL, tools=[TOOL])
    text, call = (await api.http.post(MESSAGES, json=body)).json()["content"]
    assert (text["text"], call["name"], call["input"]) == ("sure", "weather", {"city": "Bern"})
    events = await events_of(api, body)
    begun = [one for one in events if one["type"] == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in begun] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    written = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert json.loads(written[-1]["partial_json"]) == {"city": "Bern"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("arguments", ['{"city":"\\ud800"}', '{"city":' + "[" * 2000])
async def test_arguments_that_are_no_sound_json_are_left_out(
    api: ApiUnderTest, arguments: str
) -> None:
    """The second one is cut off. A model that repeats itself generates text like this."""
    said = f'say <tool_call>{{"name":"weather","arguments":{arguments}'
    said += "" if "[" in arguments else "}</tool_call>"
    body = asked(said, tools=[TOOL], max_tokens=1)
    answer = await api.http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    assert (block["name"], block["input"]) == ("weather", {})
    assert (await events_of(api, body))[-1]["type"] == "message_stop"


async def test_arguments_that_are_no_numbers_are_null_whole_and_streamed(api: ApiUnderTest) -> None:
    call = '<tool_call>{"name":"weather","arguments":{"city":NaN}}</tool_call>'
    body = asked(f"say {call}", tools=[TOOL], max_tokens=1)
    (block,) = (await api.http.post(MESSAGES, json=body)).json()["content"]
    assert block["input"] == {"city": None}
    events = await events_of(api, body)
    (written,) = [event for event in events if event["type"] == "content_block_delta"]
    assert written["delta"]["partial_json"] == '{"city":null}'


@pytest.mark.parametrize("is_of_an_older_client", [False, True])
async def test_the_schema_of_a_text_reaches_the_worker(
    api: ApiUnderTest, is_of_an_older_client: bool
) -> None:
    """The beta version of structured outputs used a separate field."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text_format = {"type": "json_schema", "schema": schema}
    field: dict[str, Any] = {"output_config": {"format": text_format}}
    if is_of_an_older_client:
        field = {"output_format": text_format}
    answer = await api.http.post(f"{MESSAGES}?beta=true", json=asked(**field))
    assert answer.status_code == 200, answer.text
    given = api.worker.items[-1].input
    assert isinstance(given, GenerationInput)
    assert json.loads(given.json_schema) == schema


async def test_a_loop_of_tools_becomes_the_messages_of_a_chat(api: ApiUnderTest) -> None:
    body = asked(CALL, tools=[TOOL | {"cache_control": {"type": "ephemeral"}}])
    content = (await api.http.post(MESSAGES, json=body)).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "sunny"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    body["messages"] += [
        {"role": "assistant", "content": [thought, *content]},
        {"role": "user", "content": [result, {"type": "text", "text": "say fine"}]},
    ]
    answer = await api.http.post(MESSAGES, json=body)
    assert answer.json()["content"][0]["text"] == "fine"
    said, called, tool, asked_last = prompt_of(api)
    assert [one["role"] for one in (said, called, tool, asked_last)] == [
        *("user", "assistant", "tool", "user")
    ]
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert called["reasoning_content"] == "hm"
    assert (tool["content"], tool["tool_call_id"]) == ("sunny", content[1]["id"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 65}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "type must be one of text",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences: "),
        ({"mcp_servers": []}, "mcp_servers: is not supported"),
        ({"thoughts": 1}, "thoughts: unknown parameter"),
    ],
    ids=str,
)
async def test_errors_have_anthropics_shape_and_our_words(
    api: ApiUnderTest, wrong: dict[str, Any], words: str
) -> None:
    answer = await api.http.post(MESSAGES, json=asked() | wrong)
    error = answer.json()
    assert (answer.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


async def test_what_a_worker_finds_wrong_has_a_status_in_streams_too(api: ApiUnderTest) -> None:
    api.worker.refusal = ContextLengthExceeded("it is too long", field="messages")
    for stream in (False, True):
        answer = await api.http.post(MESSAGES, json=asked(stream=stream))
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "type": "invalid_request_error",
            "message": "it is too long",
        }


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (9017, "prompt is too long: 9017 tokens > 1024 maximum"),
        (
            1000,
            "input length and `max_tokens` exceed context limit: 1000 + 40 > 1024, decrease input "
            "length or `max_tokens` and try again",
        ),
    ],
)
async def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(
    api: ApiUnderTest, prompt: int, reason: str
) -> None:
    """LiteLLM and agents look for these fields."""
    messages = [{"role": "user", "content": "a"}]
    given = GenerationInput(messages=messages, max_tokens=40, seed=1)
    api.worker.refusal = given.too_long(prompt, 1024)
    for stream in (False, True):
        answer = await api.http.post(MESSAGES, json=asked(stream=stream))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["message"]) == ("invalid_request_error", reason)


async def test_keys_come_as_anthropics_client_sends_them(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        headers = {"x-api-key": key_for("ours"), "anthropic-version": "2023-06-01"}
        answer = await api.http.post(MESSAGES, json=asked(), headers=headers)
        assert answer.status_code == 200
        refused = await api.http.post(MESSAGES, json=asked(), headers={"x-api-key": "no"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
