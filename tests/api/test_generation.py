"""Chat completions and completions as OpenAI's client calls them, whole and streamed."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
import redis

from api.predictions import generation_stream
from shared.models.tasks.text import GenerationInput
from shared.stores.redis_client import KEY_PREFIX
from shared.stores.token_streams import token_keys
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.waiting import until

pytestmark = pytest.mark.anyio

SAY = [{"role": "user", "content": "say the mill turns all night"}]
TEXT = "the mill turns all night"


api = api_with_redis()


def chat(**given: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": SAY, **given}


async def test_a_chat_is_answered_as_the_client_reads_it(api: ApiUnderTest) -> None:
    reply = await api.openai().chat.completions.create(
        **chat(temperature=0, logprobs=True, top_logprobs=2)
    )
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert [one.token for one in reply.choices[0].logprobs.content] == TEXT.replace(
        " ", " |"
    ).split("|")
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    assert reply.usage.prompt_tokens == 7
    assert reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == 12
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.model == "writer"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_no_message_carries_is_too_large(api: ApiUnderTest, is_streamed: bool) -> None:
    schema = {"type": "object", "description": "a" * 9_500_000}
    form = {"type": "json_schema", "json_schema": {"name": "mill", "schema": schema}}
    body = chat(response_format=form, stream=is_streamed)
    answer = await api.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "input_too_large"), error
    assert re.search(r"(is|needs) 95\d+ bytes", error["message"])
    assert not api.worker.jobs


async def test_row_of_a_joined_text_has_all_its_tokens(api: ApiUnderTest) -> None:
    await api.openai().completions.create(model="writer", prompt=["say a b", "say a b"], seed=1)
    (row,) = api.rows
    assert (row.cache, row.tokens) == ("joined", 9)
    assert (row.input_tokens, row.output_tokens, row.cached_tokens) == (7, 2, 3)


async def test_n_answers_have_consecutive_seeds(api: ApiUnderTest) -> None:
    reply = await api.openai().chat.completions.create(
        model="writer", messages=[{"role": "user", "content": "count"}], n=3, seed=4, max_tokens=2
    )
    assert [choice.message.content for choice in reply.choices] == [
        "4-0 4-1 ",
        "5-0 5-1 ",
        "6-0 6-1 ",
    ]
    assert reply.usage.prompt_tokens == 7
    assert reply.usage.completion_tokens == 6


async def test_a_completion_is_answered_as_the_client_reads_it(api: ApiUnderTest) -> None:
    reply = await api.openai().completions.create(
        model="writer", prompt=["say a b", "say c"], logprobs=1, seed=1
    )
    assert [choice.text for choice in reply.choices] == ["a b", "c"]
    assert reply.choices[0].logprobs.tokens == ["a ", "b"]
    assert reply.choices[0].logprobs.text_offset == [0, 2]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 65}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "ho"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"temperature": 3}, "temperature"),
        ({"n": 9}, "n"),
        ({"logit_bias": {"fifty": -100}}, "logit_bias"),
        ({"logit_bias": {"50": -101}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "b" * 2000}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, ""),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, ""),
        ({"model": "all-MiniLM-L6-v2"}, "model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 20_000}]}, "messages"),
    ],
)
async def test_what_is_wrong_is_named(api: ApiUnderTest, wrong: dict[str, Any], field: str) -> None:
    answer = await api.http.post("/v1/chat/completions", json=chat(**wrong))
    assert answer.status_code in (400, 404), answer.text
    assert field in (answer.json()["error"]["param"] or "") + answer.json()["error"]["message"]


FAR_ABOVE = 20_000
"""A word count many times larger than the model's context length."""


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x " * FAR_ABOVE}]},
            "messages",
        ),
        ("completions", {"prompt": "x " * FAR_ABOVE}, "prompt"),
        ("completions", {"prompt": [5] * FAR_ABOVE}, "prompt"),
        ("predictions", {"version": "writer", "input": {"prompt": "x " * FAR_ABOVE}}, "prompt"),
        ("responses", {"input": "x " * FAR_ABOVE}, ""),
    ],
    ids=["chat", "completion", "tokens", "prediction", "response"],
)
async def test_prompt_far_above_the_context_is_refused_in_openais_words(
    api: ApiUnderTest, path: str, given: dict[str, Any], field: str
) -> None:
    """Proxies match this sentence, no matter how long the prompt is. No worker sees the prompt."""
    model: dict[str, Any] = {"model": "writer", "stream": True}
    model = {} if path == "predictions" else model
    answer = await api.http.post(f"/v1/{path}", json=model | given)
    assert answer.status_code in (400, 422), answer.text
    found = answer.json()
    error = found.get("error", found)
    assert field in str(found)
    assert "context_length_exceeded" in answer.text
    sentence = (
        r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) "
        r"tokens \((\d+) in the \w+, (\d+) in the completion\)\. Please reduce the length of the "
        r"\w+ or completion\."
    )
    matched = re.search(sentence, str(error))
    assert matched, answer.text
    limit, asked, prompt, written = map(int, matched.groups())
    assert asked == prompt + written > limit
    assert not api.worker.items


@pytest.mark.parametrize("path", ["chat/completions", "completions", "predictions", "responses"])
async def test_only_max_tokens_that_were_asked_for_are_demanded(
    api: ApiUnderTest, path: str
) -> None:
    text = "say the mill"
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"model": "writer", "messages": SAY},
        "completions": {"model": "writer", "prompt": text},
        "predictions": {"version": "writer", "input": {"prompt": text}},
        "responses": {"model": "writer", "input": text, "store": False},
    }
    given = bodies[path]
    name = "max_output_tokens" if path == "responses" else "max_tokens"
    place: dict[str, Any] = given["input"] if path == "predictions" else given
    for asked in ({}, {name: 16}):
        place |= asked
        answer = await api.http.post(f"/v1/{path}", json=given, headers={"prefer": "wait"})
        assert answer.status_code in (200, 201), answer.text
        (*_, last) = api.worker.items
        assert isinstance(last.input, GenerationInput)
        assert last.input.ends_with_context == (not asked)


NULLS = [
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "moderation",
    "n",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]


@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(NULLS),
        {"logit_bias": {}, "prompt_cache_retention": "24h"},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
    ],
    ids=lambda given: str(given)[:24],
)
async def test_what_changes_nothing_is_accepted(api: ApiUnderTest, given: dict[str, Any]) -> None:
    answer = await api.http.post("/v1/chat/completions", json=chat(**given))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


async def test_an_error_repeats_little_of_a_long_name(api: ApiUnderTest) -> None:
    answer = await api.http.post("/v1/chat/completions", json=chat(model="x" * 100_000))
    assert answer.status_code == 404
    assert len(answer.text) < 400


async def test_refusals_of_earlier_answers_are_what_was_said(api: ApiUnderTest) -> None:
    earlier = [
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
    ]
    given = chat(messages=[*SAY, *earlier, *SAY])
    answer = await api.http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    item = api.worker.items[-1].input
    assert isinstance(item, GenerationInput)
    assert [one["content"] for one in item.messages[1:3]] == ["no", "never"]


async def test_options_of_sampling_reach_the_worker(api: ApiUnderTest) -> None:
    given = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": {"50": -100, "7": 2.5},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = await api.http.post("/v1/chat/completions", json=chat(**given))
    assert answer.status_code == 200, answer.text
    item = api.worker.items[-1].input
    assert isinstance(item, GenerationInput)
    assert (item.min_p, item.repetition_penalty) == (0.1, 1.2)
    assert list(item.logit_bias.items()) == [(7, 2.5), (50, -100)]
    assert item.template_options == {"enable_thinking": False}


ECHOED = {"model": "writer", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}


async def test_an_echo_is_what_lm_eval_reads(api: ApiUnderTest) -> None:
    """The client sends token ids, and skips the context's ids and the single generated token."""
    prompts = [[1, 2, 3], [4, 5]]
    given = {**ECHOED, "prompt": prompts, "seed": 1234}
    reply = (await api.http.post("/v1/completions", json=given)).json()
    for choice, ids in zip(reply["choices"], prompts, strict=True):
        told = choice["logprobs"]
        assert told["tokens"][:-1] == [f"<{one}>" for one in ids]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert choice["text"].startswith("".join(told["tokens"][:-1]))
        assert told["text_offset"] == [3 * place for place in range(len(ids) + 1)]
        chances, tops = told["token_logprobs"][1:-1], told["top_logprobs"][1:-1]
        assert chances == [-0.5] * (len(ids) - 1)
        assert all(one in top.values() for one, top in zip(chances, tops, strict=True))


async def test_an_echo_of_a_text_is_the_text(api: ApiUnderTest) -> None:
    given = {**ECHOED, "prompt": ["say mill", "say the"], "logprobs": None, "n": 2}
    reply = (await api.http.post("/v1/completions", json=given)).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == ["say millmill"] * 2 + ["say thethe"] * 2
    answer = await api.http.post("/v1/completions", json={**given, "stream": True, "n": 1})
    assert answer.status_code == 400
    assert "echo" in answer.text


async def test_prompts_are_as_many_as_texts_may_be(api: ApiUnderTest) -> None:
    prompts = [f"say p{number}" for number in range(512)]
    reply = (
        await api.http.post("/v1/completions", json={"model": "writer", "prompt": prompts})
    ).json()
    assert [choice["text"] for choice in reply["choices"]] == [one[4:] for one in prompts]
    for wrong, most in (
        ({"prompt": [*prompts, "a"]}, "512"),
        ({"prompt": prompts[:129], "n": 8}, "1024"),
        ({"prompt": prompts[:33], "n": 2, "stream": True}, "64"),
    ):
        answer = await api.http.post("/v1/completions", json={"model": "writer", **wrong})
        assert answer.status_code == 400
        assert most in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": [None]}, "stop[0]: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: Input should be"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: List should"),
    ],
    ids=str,
)
async def test_an_error_is_about_the_form_that_was_meant(
    api: ApiUnderTest, wrong: dict[str, Any], message: str
) -> None:
    answer = await api.http.post("/v1/chat/completions", json=chat(**wrong))
    assert answer.json()["error"]["message"].startswith(message)


async def test_a_completion_takes_lists_of_token_ids(api: ApiUnderTest) -> None:
    given = {"model": "writer", "prompt": [[5, 6], [7]], "seed": 1}
    reply = await api.openai().completions.create(**given)
    assert [getattr(one.input, "prompt", None) for one in api.worker.items[-2:]] == [[5, 6], [7]]
    async with await api.openai().completions.create(**given, stream=True) as stream:
        told = [choice async for chunk in stream for choice in chunk.choices]
    for choice in reply.choices:
        assert choice.text == "".join(one.text for one in told if one.index == choice.index)


@pytest.mark.parametrize(("mode", "is_forced"), [("auto", False), ("required", True)])
async def test_only_tools_that_are_allowed_count(
    api: ApiUnderTest, mode: str, is_forced: bool
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("tides", "weather")]
    said = 'say <tool_call>{"name": "tides", "arguments": {}}</tool_call>'
    given = chat(messages=[{"role": "user", "content": said}], tools=tools, max_tokens=40)
    for name in ("tides", "weather", "stars"):
        named = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        answer = await api.http.post("/v1/chat/completions", json=given | {"tool_choice": choice})
        if name == "stars":
            assert answer.status_code == 400
            continue
        item = api.worker.items[-1].input
        assert isinstance(item, GenerationInput)
        assert [tool["function"]["name"] for tool in item.tools] == [name]
        assert bool(item.json_schema) == is_forced
        called = answer.json()["choices"][0]["message"].get("tool_calls", [])
        assert [call["function"]["name"] for call in called] == (["tides"] * (name == "tides"))


async def test_a_key_of_another_stream_is_refused(api: ApiUnderTest) -> None:
    key = {"idempotency-key": "k"}
    first, second = [
        await api.http.post(
            "/v1/chat/completions", json=chat(stream=True, max_tokens=most), headers=key
        )
        for most in (3, 4)
    ]
    assert first.status_code == 200
    assert second.status_code == 422
    assert second.json()["error"]["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    "arguments",
    ["[" * 900 + "]" * 900, "[" * 100_000, '{"a": "\\ud800"}', "9" * 5000, "NaN"],
    ids=lambda arguments: arguments[:8],
)
async def test_arguments_that_are_no_sound_json_stay_text(
    api: ApiUnderTest, arguments: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*SAY, {"role": "assistant", "content": None, "tool_calls": [call]}, *SAY]
    answer = await api.http.post("/v1/chat/completions", json=chat(messages=messages))
    if len(arguments) < 50_000:  # longer ones are not valid prompts of this model
        assert answer.status_code == 200, answer.text
        item = api.worker.items[-1].input
        assert isinstance(item, GenerationInput)
        assert item.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert answer.status_code < 500, answer.text


async def test_tool_calls_come_back_as_the_client_reads_them(api: ApiUnderTest) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    said = 'say sure <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    given = chat(messages=[{"role": "user", "content": said}], tools=[tool], max_tokens=40)
    client = api.openai()
    reply = await client.chat.completions.create(**given)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Bern"},
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content == "sure"
    async with client.chat.completions.stream(**given) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.message.tool_calls[0].function.name == "weather"
    assert final.finish_reason == "tool_calls"
    assert final.message.content.strip() == "sure"


async def test_a_streamed_chat_comes_token_by_token(api: ApiUnderTest) -> None:
    api.worker.written = asyncio.Semaphore(0)
    asked = chat(stream=True, stream_options={"include_usage": True})
    got: list[Any] = []

    async def read() -> None:
        # It begins with the first token.
        async for chunk in await api.openai().chat.completions.create(**asked):
            got.append(chunk)

    def has(words: int) -> bool:
        return text_of(got).split() == TEXT.split()[:words]

    reading = asyncio.create_task(read())
    for words in range(1, 6):
        api.worker.written.release()
        await until(partial(has, words))
    await asyncio.wait_for(reading, WAIT_LIMIT_S)
    assert text_of(got) == TEXT
    assert got[0].choices[0].delta.role == "assistant"
    assert got[-2].choices[0].finish_reason == "length"
    assert got[-1].usage.completion_tokens == 5
    assert len({chunk.id for chunk in got}) == 1


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def events_of(
    api: ApiUnderTest, method: str, path: str, **given: Any
) -> list[dict[str, str]]:
    """All of a stream's events, each with its id and data."""
    async with api.http.stream(method, path, **given) as answer:
        text = (await answer.aread()).decode()
        assert answer.status_code == 200, text
    return parsed(text)


def parsed(text: str) -> list[dict[str, str]]:
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines()]
        if fields := {name: value for name, _, value in lines if name}:
            found.append(fields)
    return found


def said(events: list[dict[str, str]]) -> str:
    read = [json.loads(one["data"]) for one in events if one["data"] != "[DONE]"]
    return "".join(
        choice["delta"].get("content") or "" for one in read for choice in one["choices"]
    )


async def test_a_stream_goes_on_behind_any_event_on_another_instance(
    redis_url: str, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with (
        running_api(settings) as first,
        running_api(
            settings, transport=first.broker, admin=first.broker, worker=first.worker
        ) as second,
    ):
        keyed = {"idempotency-key": "night"}
        body = chat(stream=True, logprobs=True)
        events = await events_of(first, "POST", "/v1/chat/completions", json=body, headers=keyed)
        assert said(events) == TEXT
        assert events[-1]["data"] == "[DONE]"
        made = json.loads(events[0]["data"])["id"]
        for at, event in enumerate(events[:-1]):
            headers = keyed | {"last-event-id": event["id"]}
            rest = await events_of(
                second, "POST", "/v1/chat/completions", json=body, headers=headers
            )
            assert said(events[: at + 1]) + said(rest) == TEXT
            again = await events_of(
                second,
                "GET",
                f"/v1/chat/completions/{made}?stream=true&starting_after={event['id']}",
            )
            assert [one["data"] for one in again] == [one["data"] for one in rest]
        assert len(first.worker.jobs) == 1
        whole = await second.http.get(f"/v1/chat/completions/{made}")
        assert whole.json()["choices"][0]["message"]["content"] == TEXT


async def test_a_stream_whose_instance_is_gone_goes_on_where_it_was(
    redis_url: str, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings) as second:
        second.worker.written = asyncio.Semaphore(3)
        seen = ""
        async with (
            running_api(
                settings, transport=second.broker, admin=second.broker, worker=second.worker
            ) as first,
            first.http.stream(
                "POST",
                "/v1/chat/completions",
                json=chat(stream=True),
                headers={"idempotency-key": "gone"},
            ) as answer,
        ):
            async for piece in answer.aiter_text():
                seen += piece
                if said(parsed(seen)).split() == TEXT.split()[:3]:
                    break
        before = [one for one in parsed(seen) if "data" in one]
        for _ in TEXT.split():
            second.worker.written.release()
        rest = await events_of(
            second,
            "POST",
            "/v1/chat/completions",
            json=chat(stream=True),
            headers={"idempotency-key": "gone", "last-event-id": before[-1]["id"]},
        )
        assert said(before) + said(rest) == TEXT
        assert len(second.worker.jobs) == 1


async def test_the_answer_comes_whole_when_no_tokens_reached_redis(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*given: Any) -> None:
        return None

    assert api.worker.stores is not None
    monkeypatch.setattr(api.worker.stores.tokens, "append", nothing)
    events = await events_of(api, "POST", "/v1/chat/completions", json=chat(stream=True))
    assert said(events) == TEXT


async def test_a_client_reads_on_after_a_pause(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_stream, "HEARTBEAT_S", 0.01)
    api.worker.written = asyncio.Semaphore(2)
    stream = await api.openai().chat.completions.create(**chat(stream=True))
    got: list[Any] = []
    with anyio.fail_after(WAIT_LIMIT_S):
        async for chunk in stream:
            got.append(chunk)
            if text_of(got).split() == TEXT.split()[:2]:
                break
        # Meanwhile, the client reads heartbeats, and then the events that follow.
        later = asyncio.get_running_loop()
        for _ in range(3):
            later.call_later(0.1, api.worker.written.release)
        async for chunk in stream:
            got.append(chunk)
    assert text_of(got) == TEXT


@pytest.mark.parametrize("last_id", ["x", "1.2", "-1", "99999999999", "1g", "0f1.", "1f", "--"])
async def test_an_id_of_no_event_is_refused(api: ApiUnderTest, last_id: str) -> None:
    answer = await api.http.post(
        "/v1/chat/completions", json=chat(stream=True), headers={"last-event-id": last_id}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "last-event-id"
    assert not api.worker.jobs


async def test_an_id_that_no_event_had_ends_the_stream_with_an_error(
    api: ApiUnderTest, redis_url: str
) -> None:
    keyed = {"idempotency-key": "far"}
    await events_of(api, "POST", "/v1/chat/completions", json=chat(stream=True), headers=keyed)
    events = await events_of(
        api,
        "POST",
        "/v1/chat/completions",
        json=chat(stream=True),
        headers=keyed | {"last-event-id": "3"},
    )
    assert said(events) == " ".join(TEXT.split()[3:]), "each token is an event here"
    assert api.worker.stores is not None
    record = api.worker.jobs[0].envelope.request_id
    with redis.from_url(redis_url) as store:
        store.delete(*token_keys(KEY_PREFIX, record))
    lost = await events_of(
        api,
        "POST",
        "/v1/chat/completions",
        json=chat(stream=True),
        headers=keyed | {"last-event-id": "3"},
    )
    assert json.loads(lost[-1]["data"])["error"]["code"] == "stream_lost"


async def test_a_deleted_stream_of_many_texts_leaves_no_token(
    api: ApiUnderTest, redis_url: str
) -> None:
    prompts = [f"say {letter} a b" for letter in "abcdefgh"]
    body = {"model": "writer", "prompt": prompts, "n": 8, "seed": 1, "stream": True}
    answer = await api.http.post("/v1/completions", json=body)
    made = json.loads(parsed(answer.text)[0]["data"])["id"].replace("cmpl-", "pred_")
    with redis.Redis.from_url(redis_url) as kept:
        assert len(kept.keys(f"*tokens:{made}:*")) == 64
        assert (await api.http.delete(f"/v1/predictions/{made}")).status_code == 204
        assert not kept.keys(f"*tokens:{made}:*")


async def test_a_failed_text_ends_its_stream_with_the_error(api: ApiUnderTest) -> None:
    api.worker.broken = {""}
    with pytest.raises(openai.APIError, match="breaks the model"):
        async for _ in await api.openai().chat.completions.create(**chat(stream=True)):
            pass


async def test_another_tenant_reads_no_stream(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        events = await events_of(
            api, "POST", "/v1/chat/completions", json=chat(stream=True), headers=bearer("ours")
        )
        made = json.loads(events[0]["data"])["id"]
        for query in ("", "?stream=true"):
            answer = await api.http.get(
                f"/v1/chat/completions/{made}{query}", headers=bearer("theirs")
            )
            assert answer.status_code == 404
