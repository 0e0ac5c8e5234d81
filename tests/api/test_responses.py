"""/v1/responses as OpenAI's client calls it: whole, streamed, in the background, and retrieved
later.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from shared.models.tasks.text import GenerationInput
from tests.api.fake_worker import LAST_WORD
from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.test_generation import TEXT, parsed
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
SAY = f"say {TEXT}"


class Weather(BaseModel):
    """Tells the weather."""

    city: str


def weather_tool() -> dict[str, Any]:
    function = pydantic_function_tool(Weather)["function"]
    return {"type": "function", **function}


CALLS = (
    "say sure <tool_call>{'name': 'Weather', 'arguments': {'city': 'Bern'}}</tool_call>".replace(
        "'", '"'
    )
)


api = api_with_redis()


def asked(text: Any = SAY, **options: Any) -> dict[str, Any]:
    return {"model": "writer", "input": text, **options}


async def test_a_response_is_answered_as_the_client_reads_it(api: ApiUnderTest) -> None:
    response = await api.openai().responses.create(**asked(metadata={"night": "monday"}))
    assert response.output_text == TEXT
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"night": "monday"}
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.input_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("text", [SAY, CALLS])
async def test_whatever_is_answered_has_the_types_of_the_client(
    api: ApiUnderTest, text: str
) -> None:
    strict = api.openai().with_options(max_retries=0)
    strict._strict_response_validation = True
    given = asked(text, tools=[weather_tool()], parallel_tool_calls=False, max_output_tokens=40)
    response = await strict.responses.create(**given)
    assert response.parallel_tool_calls is False
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    events = [one async for one in await strict.responses.create(**given, stream=True)]
    assert type(events[-1].response) is type(response)
    kept = await strict.responses.create(**given, background=True)
    assert (await strict.responses.retrieve(kept.id)).store


async def test_a_message_that_was_cut_is_incomplete(api: ApiUnderTest) -> None:
    cut = await api.openai().responses.create(**asked())
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"name": "Weather", "arguments": {"ci', '{"ci'),
        ('{"name": "Weather", "argu', ""),
        ('{"name": "Weather", "arguments": {"city": "Bern"}', '{"city": "Bern"}'),
    ],
)
async def test_a_call_that_was_cut_is_incomplete(
    api: ApiUnderTest, choice: str, said: str, arguments: str
) -> None:
    given = asked(f"say {said}", tools=[weather_tool()], tool_choice=choice, max_output_tokens=40)
    responses = api.openai().responses
    at_once = await responses.create(**given)
    events = [one async for one in await responses.create(**given, stream=True)]
    again = await responses.retrieve(events[-1].response.id)
    for found in (at_once, events[-1].response, again):
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        (call,) = found.output
        assert (call.type, call.status, call.arguments) == (
            "function_call",
            "incomplete",
            arguments,
        )
    (done,) = [one.item for one in events if one.type == "response.output_item.done"]
    assert done.status == "incomplete"
    after = await responses.create(
        **asked([{"type": "function_call_output", "call_id": call.call_id, "output": "no"}]),
        previous_response_id=at_once.id,
    )
    assert after.output_text, "it can be answered as any call"


@pytest.mark.parametrize(
    ("calls", "statuses"),
    [
        (2, ["completed", "completed", "completed"]),
        (1, ["completed", "completed", "incomplete"]),
    ],
)
async def test_only_the_call_that_was_cut_is_incomplete(
    api: ApiUnderTest, calls: int, statuses: list[str]
) -> None:
    whole = '<tool_call>{"name": "Weather", "arguments": {"city": "Bern"}}</tool_call>'
    said = f"say sure {whole * calls}{whole[:-24] if calls == 1 else ''}"
    given = asked(said, tools=[weather_tool()], max_output_tokens=40)
    made = await api.openai().responses.create(**given)
    assert [item.status for item in made.output] == statuses
    assert made.status == "incomplete", "the fake worker always says length"


@pytest.mark.parametrize(
    ("text", "status"), [(SAY, "incomplete"), (f"{SAY} {LAST_WORD}", "completed")]
)
async def test_it_says_when_it_was_completed(api: ApiUnderTest, text: str, status: str) -> None:
    responses = api.openai().responses
    at_once = await responses.create(**asked(text))
    streamed = [one async for one in await responses.create(**asked(text), stream=True)]
    again = await responses.retrieve(streamed[-1].response.id)
    for found in (at_once, streamed[-1].response, again):
        assert found.status == status
        if status == "completed":
            assert found.created_at <= found.completed_at <= time.time()
        else:
            assert found.completed_at is None, "it was cut"
    assert streamed[0].response.completed_at is None
    assert again.completed_at == streamed[-1].response.completed_at


async def test_only_tools_that_are_allowed_count(api: ApiUnderTest) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": []}
    for name, status in (("Weather", 200), ("Stars", 400)):
        choice = allowed | {"tools": [{"type": "function", "name": name}]}
        given = asked(CALLS, tools=[weather_tool()], tool_choice=choice)
        answer = await api.http.post("/v1/responses", json=given)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.json()["tool_choice"] == choice


async def test_what_changes_nothing_is_accepted(api: ApiUnderTest) -> None:
    nulls = [
        "background",
        "context_management",
        "conversation",
        "include",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    ]
    given: list[dict[str, Any]] = [
        dict.fromkeys(nulls),
        {"include": ["reasoning.encrypted_content"]},
    ]
    for one in given:
        answer = await api.http.post("/v1/responses", json=asked(**one))
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"][0]["content"][0]["logprobs"] == []


async def test_an_error_is_about_the_form_that_was_meant(api: ApiUnderTest) -> None:
    answer = await api.http.post("/v1/responses", json=asked([]))
    assert answer.json()["error"]["message"].startswith("input: List should have at least 1")


async def test_items_become_the_messages_of_a_chat(api: ApiUnderTest) -> None:
    client = api.openai()
    first = await client.responses.create(**asked(CALLS, tools=[weather_tool()], temperature=0))
    message, call = first.output
    assert (message.content[0].text, call.name) == ("sure", "Weather")
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "how is it?"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        {"role": "user", "content": "say fine"},
    ]
    second = await client.responses.create(**asked(given, instructions="be short"))
    assert second.output_text == "fine"
    item = api.worker.items[-1].input
    assert isinstance(item, GenerationInput)
    assert [one["role"] for one in item.messages] == [
        *("system", "user", "assistant", "assistant", "tool", "user")
    ]
    assert item.messages[3]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


async def test_the_clients_stream_gives_text_and_calls(api: ApiUnderTest) -> None:
    given = asked(CALLS, tools=[weather_tool()], max_output_tokens=40)
    async with api.openai().responses.stream(**given) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert "response.function_call_arguments.done" in kinds
    assert kinds[-1] == "response.incomplete", "the fake worker always says length"


async def test_a_response_can_be_streamed_again_behind_any_event(
    api: ApiUnderTest, redis_url: str, tmp_path: Path
) -> None:
    given = asked(CALLS + " so", tools=[weather_tool()], stream=True, max_output_tokens=40)
    events = parsed((await api.http.post("/v1/responses", json=given)).text)
    told = [json.loads(one["data"]) for one in events]
    numbers = [one["sequence_number"] for one in told]
    assert numbers == sorted(set(numbers))
    made = told[0]["response"]["id"]
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "sure  so"
    deltas = [one["delta"] for one in told if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "sure  so"
    settings = settings_for(tmp_path, redis_url=redis_url)
    others: dict[str, Any] = {
        "transport": api.broker,
        "admin": api.broker,
        "worker": api.worker,
    }
    async with running_api(settings, **others) as other:
        for at, number in enumerate(numbers):
            path = f"/v1/responses/{made}?stream=true&starting_after={number}"
            rest = parsed((await other.http.get(path)).text)
            assert [json.loads(one["data"]) for one in rest] == told[at + 1 :]
    whole = await api.openai().responses.retrieve(made)
    assert whole.output_text == "sure  so"


async def test_numbers_are_the_same_if_no_tokens_could_be_read(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*given: Any) -> None:
        return None

    plain = parsed((await api.http.post("/v1/responses", json=asked(stream=True))).text)
    assert api.worker.stores is not None
    monkeypatch.setattr(api.worker.stores.tokens, "append", nothing)
    late = parsed((await api.http.post("/v1/responses", json=asked(stream=True))).text)
    numbers = [
        {one["event"]: json.loads(one["data"])["sequence_number"] for one in events}
        for events in (plain, late)
    ]
    # The text itself arrived in one piece at the end.
    assert numbers[0].pop("response.output_text.delta") < numbers[1].pop(
        "response.output_text.delta"
    )
    assert numbers[0] == numbers[1]


async def test_a_background_response_is_written_alone(api: ApiUnderTest) -> None:
    api.worker.written = asyncio.Semaphore(0)
    client = api.openai()
    response = await client.responses.create(**asked(background=True))
    assert response.status in ("queued", "in_progress")
    for _ in TEXT.split():
        api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while response.status in ("queued", "in_progress"):
            response = await client.responses.retrieve(response.id)
    assert response.output_text == TEXT
    async with client.responses.stream(response_id=response.id, starting_after=1) as stream:
        text = "".join([one.delta async for one in stream if one.type.endswith("text.delta")])
    assert text == TEXT
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_background_response_can_be_canceled(api: ApiUnderTest) -> None:
    api.worker.written = asyncio.Semaphore(0)
    client = api.openai()
    response = await client.responses.create(**asked(background=True))
    assert (await client.responses.cancel(response.id)).status == "cancelled"
    assert (await client.responses.retrieve(response.id)).status == "cancelled"


async def test_a_failed_response_says_so(api: ApiUnderTest) -> None:
    api.worker.broken = {""}
    client = api.openai()
    given = asked(stream=True, background=True)
    events = [one async for one in await client.responses.create(**given)]
    assert events[-1].type == "response.failed"
    assert "breaks the model" in events[-1].response.error.message
    again = await client.responses.retrieve(events[-1].response.id)
    assert (again.status, again.error.message) == ("failed", events[-1].response.error.message)


async def test_parsed_text_has_the_form_of_its_schema(api: ApiUnderTest) -> None:
    client = api.openai()
    response = await client.responses.parse(**asked('say {"city": "Bern"}'), text_format=Weather)
    assert response.output_parsed == Weather(city="Bern")
    (item,) = api.worker.items
    assert isinstance(item.input, GenerationInput)
    assert json.loads(item.input.json_schema)["required"] == ["city"]


async def test_a_response_goes_on_behind_an_earlier_one(api: ApiUnderTest) -> None:
    client = api.openai()
    given = asked(CALLS, tools=[weather_tool()], store=True, instructions="be long")
    first = await client.responses.create(**given)
    assert first.output[1].name == "Weather"
    sunny = {"call_id": first.output[1].call_id, "output": "sunny"}
    second = await client.responses.create(
        **asked(
            [{"type": "function_call_output", **sunny}, {"role": "user", "content": "say so"}],
            previous_response_id=first.id,
            stream=False,
            background=True,
        )
    )
    assert second.previous_response_id == first.id
    async with asyncio.timeout(WAIT_LIMIT_S):
        while second.status in ("queued", "in_progress"):
            second = await client.responses.retrieve(second.id)
    last = asked("say that is all", previous_response_id=second.id)
    third = await client.responses.create(**last)
    assert third.output_text == "that is all"
    item = api.worker.items[-1].input
    assert isinstance(item, GenerationInput)
    roles = ["user", "assistant", "assistant", "tool", "user", "assistant", "user"]
    assert [one["role"] for one in item.messages] == roles, "instructions are not carried over"
    assert item.messages[5]["content"] == "so"


async def test_a_refusal_of_the_moment_is_not_kept_under_its_key(api: ApiUnderTest) -> None:
    api.worker.written = asyncio.Semaphore(0)
    earlier = (await api.http.post("/v1/responses", json=asked(background=True))).json()["id"]
    body = asked("say more", previous_response_id=earlier)
    key = {"idempotency-key": "once"}
    refused = await api.http.post("/v1/responses", json=body, headers=key)
    assert refused.status_code == 400
    assert "has no output" in refused.json()["error"]["message"]
    again = await api.http.post("/v1/responses", json=body, headers=key)
    assert again.status_code == 400
    assert "idempotent-replayed" not in again.headers
    for _ in range(1000):
        api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (await api.openai().responses.retrieve(earlier)).status in ("queued", "in_progress"):
            pass
    first = await api.http.post("/v1/responses", json=body, headers=key)
    assert first.status_code == 200, first.text
    second = await api.http.post("/v1/responses", json=body, headers=key)
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json()["id"] == first.json()["id"]


async def test_an_earlier_response_that_is_not_found_may_be_found_later(api: ApiUnderTest) -> None:
    body = asked(previous_response_id="resp_" + "0" * 32)
    for _ in range(2):
        refused = await api.http.post(
            "/v1/responses", json=body, headers={"idempotency-key": "once"}
        )
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert "idempotent-replayed" not in refused.headers


async def test_an_earlier_response_that_is_unknown_or_has_no_output_is_named(
    redis_url: str, tmp_path: Path
) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:

        async def after(made: str, who: str) -> dict[str, Any]:
            body = asked(previous_response_id=made)
            answer = await api.http.post("/v1/responses", json=body, headers=bearer(who))
            assert answer.status_code == 400, answer.text
            error: dict[str, Any] = answer.json()["error"]
            assert error["param"] == "previous_response_id"
            return error

        stored = await api.http.post(
            "/v1/responses", json=asked(store=True), headers=bearer("ours")
        )
        made = stored.json()["id"]
        assert stored.json()["output"][0]["content"][0]["text"] == TEXT
        for unknown, who in ((made, "theirs"), ("resp_" + "0" * 32, "ours"), ("x", "ours")):
            error = await after(unknown, who)
            assert error["code"] == "previous_response_not_found"
            assert error["message"] == f"Previous response with id '{unknown}' not found."
        api.worker.broken = {""}
        failed = await api.http.post(
            "/v1/responses", json=asked(background=True), headers=bearer("ours")
        )
        path = f"/v1/responses/{failed.json()['id']}"
        async with asyncio.timeout(WAIT_LIMIT_S):
            while failed.json()["status"] in ("queued", "in_progress"):
                failed = await api.http.get(path, headers=bearer("ours"))
        assert failed.json()["status"] == "failed"
        assert "no output" in (await after(failed.json()["id"], "ours"))["message"]


async def test_log_probabilities_come_as_they_are_asked_for(api: ApiUnderTest) -> None:
    client = api.openai()
    given = asked(include=["message.output_text.logprobs"], top_logprobs=2)
    response = await client.responses.create(**given)
    told = response.output[0].content[0].logprobs
    assert "".join(one.token for one in told) == TEXT
    assert len(told[0].top_logprobs) == 2
    events = [one async for one in await client.responses.create(**given, stream=True)]
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    assert [one.logprobs[0].token for one in deltas] == [one.token for one in told]
    (done,) = [one for one in events if one.type == "response.output_text.done"]
    assert len(done.logprobs) == len(told)
    plain = await client.responses.create(**asked())
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 65}, "max_output_tokens"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
async def test_what_is_wrong_is_named(api: ApiUnderTest, wrong: dict[str, Any], field: str) -> None:
    answer = await api.http.post("/v1/responses", json=asked() | wrong)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error["param"] or "") + error["message"]


async def test_another_tenant_has_no_part_in_it(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        made = await api.http.post(
            "/v1/responses", json=asked(background=True), headers=bearer("ours")
        )
        path = f"/v1/responses/{made.json()['id']}"
        for method, rest in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            answer = await api.http.request(method, path + rest, headers=bearer("theirs"))
            assert answer.status_code == 404, (method, rest)
