"""Responses are stored unless `store` is false: they can be retrieved, continued and referred
to.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from shared.models.tasks.text import GenerationInput
from shared.tenants.plan import Plan
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.test_generation import TEXT, parsed
from tests.api.test_responses import CALLS, asked, weather_tool
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


def prompt_of(api: ApiUnderTest) -> list[dict[str, Any]]:
    """The messages in the model's latest prompt."""
    item = api.worker.items[-1].input
    assert isinstance(item, GenerationInput)
    return item.messages


async def test_a_response_can_be_read_again_without_asking(api: ApiUnderTest) -> None:
    answer = await api.http.post(RESPONSES, json=asked(temperature=0))
    made = answer.json()
    assert made["store"] is True
    assert "x-penstock-cost-usd" in answer.headers, "it is answered as any request"
    again = await api.http.get(f"{RESPONSES}/{made['id']}")
    assert again.json() == made | {"created_at": again.json()["created_at"]}
    events = parsed((await api.http.get(f"{RESPONSES}/{made['id']}?stream=true")).text)
    assert events[-1]["event"] == "response.incomplete"
    await api.openai().responses.delete(made["id"])
    gone = await api.http.get(f"{RESPONSES}/{made['id']}")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == f"Response with id '{made['id']}' not found."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_not_stored_is_not_there(api: ApiUnderTest, stream: bool) -> None:
    answer = await api.http.post(RESPONSES, json=asked(store=False, stream=stream))
    made = f"resp_{answer.text.partition('resp_')[2][:24]}"
    assert '"store":false' in answer.text
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        missing = await api.http.request(method, f"{RESPONSES}/{made}{rest}")
        assert missing.status_code == 404, (method, rest)
    after = await api.http.post(RESPONSES, json=asked(previous_response_id=made))
    assert after.json()["error"]["code"] == "previous_response_not_found"
    if stream:
        resumed = await api.http.get(f"{RESPONSES}/{made}?stream=true&starting_after=1")
        assert TEXT.split()[-1] in resumed.text, "a stream can be resumed all the same"


async def test_a_tool_loop_of_three_steps_refers_to_earlier_items(api: ApiUnderTest) -> None:
    """The AI SDK's default provider sends them this way."""
    client, given = api.openai(), {"tools": [weather_tool()], "max_output_tokens": 40}
    items: list[Any] = [{"role": "user", "content": CALLS}]
    for step in range(3):
        response = await client.responses.create(**asked(items, **given))
        message, call = response.output
        items += [
            {"type": "item_reference", "id": message.id},
            {"type": "item_reference", "id": call.id},
            {"type": "function_call_output", "call_id": call.call_id, "output": f"sunny {step}"},
            {"role": "user", "content": CALLS},
        ]
    roles = [one["role"] for one in prompt_of(api)]
    assert roles == ["user", *("assistant", "assistant", "tool", "user") * 2]
    assert prompt_of(api)[2]["tool_calls"][0]["function"]["name"] == "Weather"


@pytest.mark.parametrize("name", ["x", "msg_" + "0" * 24, "rs_" + "1" * 24])
async def test_an_item_that_is_not_there_is_named(api: ApiUnderTest, name: str) -> None:
    items = [{"type": "item_reference", "id": name}, {"role": "user", "content": "say a"}]
    answer = await api.http.post(RESPONSES, json=asked(items))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404, "input")
    assert error["message"].startswith(f"Item with id '{name}' not found.")


async def test_the_limit_of_references_counts_responses(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.openai.stored.MAX_REFERENCED", 2)
    client, given = api.openai(), {"tools": [weather_tool()], "max_output_tokens": 40}
    made = [await client.responses.create(**asked(CALLS, **given)) for _ in range(3)]
    names = [[item.id for item in response.output] for response in made]
    assert [len(of_response) for of_response in names] == [2, 2, 2]
    for responses, status in ((2, 200), (3, 400)):
        items: list[Any] = [{"role": "user", "content": "say a"}]
        for of_response in names[:responses]:
            items += [{"type": "item_reference", "id": name} for name in of_response]
        answer = await api.http.post(RESPONSES, json=asked(items, **given))
        assert answer.status_code == status, answer.text
    assert "at most 2 responses" in answer.json()["error"]["message"]


async def test_a_response_follows_another_that_nobody_asked_to_store(api: ApiUnderTest) -> None:
    client = api.openai()
    first = await client.responses.create(**asked("say one"))
    second = await client.responses.create(**asked("say two", previous_response_id=first.id))
    await client.responses.create(**asked("say three", previous_response_id=second.id))
    said = [one["content"] for one in prompt_of(api)]
    assert said == ["say one", "one", "say two", "two", "say three"]


async def test_the_input_of_a_response_is_listed(api: ApiUnderTest) -> None:
    client = api.openai()
    first = await client.responses.create(**asked("say one"))
    second = await client.responses.create(**asked("say two", previous_response_id=first.id))
    newest = await client.responses.input_items.list(second.id)
    assert [one.content[0].text for one in newest.data] == ["say two", "one", "say one"]
    assert newest.data[1].id == first.output[0].id
    pages = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert [one.content[0].text async for one in pages] == ["say one", "one", "say two"]
    wrong = await api.http.get(f"{RESPONSES}/{second.id}/input_items?after=msg_x")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


async def test_what_was_thought_is_kept_and_goes_to_templates_that_know_it(
    api: ApiUnderTest,
) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    items = [
        {"role": "user", "content": "hi"},
        thought | {"content": [{"type": "reasoning_text", "text": "be kind"}]},
        {"role": "assistant", "content": "hello"},
        thought | {"summary": [{"type": "summary_text", "text": "not read"}]},
        {"role": "user", "content": "say bye"},
    ]
    response = await api.openai().responses.create(**asked(items))
    assert prompt_of(api) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "be kind"},
        {"role": "user", "content": "say bye"},
    ]
    listed = await api.openai().responses.input_items.list(response.id, order="asc")
    assert [one.type for one in listed.data].count("reasoning") == 2


async def test_a_background_response_has_to_be_stored(api: ApiUnderTest) -> None:
    answer = await api.http.post(RESPONSES, json=asked(background=True, store=False))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "background"
    assert "store: true" in answer.json()["error"]["message"]
    assert not api.worker.jobs


async def test_only_background_responses_can_be_canceled(api: ApiUnderTest) -> None:
    client = api.openai()
    response = await client.responses.create(**asked())
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(response.id)
    assert (await client.responses.retrieve(response.id)).status == response.status


async def test_it_is_kept_for_as_long_as_the_plan_says(redis_url: str, tmp_path: Path) -> None:
    days = 3 * 24 * 3600
    keys = keys_url(
        tmp_path, plans={"team": Plan(prediction_keep_s=days)}, tenants={"a": "team"}, ours="a"
    )
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        answer = await api.http.post(RESPONSES, json=asked(), headers=bearer("ours"))
        record = "pred_" + answer.json()["id"].removeprefix("resp_")
        with redis.Redis.from_url(redis_url) as kept:
            key = f"penstock:record:{record}"
            ends: Any = kept.zscore("penstock:predictions:ends", key)
            began: Any = kept.hget(key, "ended_at_s")
            counted: Any = kept.hget("penstock:predictions:counted", key)
    assert ends - float(began) == pytest.approx(days)
    assert counted.endswith(b" a"), "it counts for its tenant"


async def test_the_oldest_responses_of_a_tenant_make_room(redis_url: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, predictions_max_bytes=2**20)
    async with running_api(settings) as api:
        made = []
        for number in range(8):
            # Annotated tools are stored with the request but not sent to any model.
            tool = weather_tool() | {"description": "x" * 200_000}
            body = asked(f"say {number}", tools=[tool], tool_choice="none")
            made.append((await api.http.post(RESPONSES, json=body)).json()["id"])
        found = [(await api.http.get(f"{RESPONSES}/{one}")).status_code for one in made]
    assert found[0] == 404
    assert found[-1] == 200
    assert found == sorted(found, reverse=True)


async def test_without_redis_it_is_answered_and_says_that_it_is_not_kept(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path)) as api:
        answer = await api.http.post(RESPONSES, json=asked())
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        wanted = await api.http.post(RESPONSES, json=asked(store=True))
        assert wanted.status_code == 503


async def test_a_repeated_request_is_the_same_response(api: ApiUnderTest) -> None:
    key = {"idempotency-key": "once"}
    made = {
        (await api.http.post(RESPONSES, json=asked(), headers=key)).json()["id"] for _ in range(2)
    }
    (one,) = made
    assert (await api.http.get(f"{RESPONSES}/{one}")).json()["id"] == one
    assert len(api.worker.jobs) == 1


async def test_a_deleted_response_is_not_created_again_with_its_key(
    api: ApiUnderTest, redis_url: str
) -> None:
    key = {"idempotency-key": "once"}
    made = (await api.http.post(RESPONSES, json=asked(), headers=key)).json()["id"]
    await api.openai().responses.delete(made)
    with redis.Redis.from_url(redis_url) as forgetful:  # drops the response it would replay
        forgetful.delete(*forgetful.keys("*answers*"))
    again = await api.http.post(RESPONSES, json=asked(store=True), headers=key)
    assert again.status_code == 400, again.text
    error = again.json()["error"]
    assert error["param"] == "idempotency-key"
    assert "was deleted recently; use a different key" in error["message"]


async def test_another_tenant_can_neither_read_nor_refer_to_it(
    redis_url: str, tmp_path: Path
) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        made = (await api.http.post(RESPONSES, json=asked(), headers=bearer("ours"))).json()
        for path in (made["id"], made["id"] + "/input_items"):
            answer = await api.http.get(f"{RESPONSES}/{path}", headers=bearer("theirs"))
            assert answer.status_code == 404
        items = [{"type": "item_reference", "id": made["output"][0]["id"]}]
        answer = await api.http.post(RESPONSES, json=asked(items), headers=bearer("theirs"))
        assert answer.status_code == 404
