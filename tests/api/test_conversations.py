"""/v1/conversations as OpenAI's client calls it, and responses that continue conversations."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from api.predictions import conversations, service
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.test_responses import CALLS, asked, weather_tool
from tests.api.test_stored_responses import prompt_of
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


async def texts_of(client: Any, conversation: str) -> list[str]:
    pages = client.conversations.items.list(conversation, order="asc", limit=2)
    return [item.content[0].text async for item in pages]


async def test_responses_continue_a_conversation_and_add_to_it(api: ApiUnderTest) -> None:
    client = api.openai()
    begun = await client.conversations.create(
        items=[{"role": "system", "content": "be short"}], metadata={"night": "monday"}
    )
    first = await client.responses.create(**asked("say one", conversation=begun.id))
    assert first.conversation.id == begun.id
    async with client.responses.stream(**asked("say two", conversation={"id": begun.id})) as stream:
        async for _ in stream:
            pass
    await client.responses.create(**asked("say three", conversation=begun.id))
    said = [one["content"] for one in prompt_of(api)]
    assert said == ["be short", "say one", "one", "say two", "two", "say three"]
    assert await texts_of(client, begun.id) == [*said, "three"]
    found = await client.conversations.retrieve(begun.id)
    assert found.metadata == {"night": "monday"}


async def test_items_are_added_read_and_removed(api: ApiUnderTest) -> None:
    client = api.openai()
    begun = await client.conversations.create()
    added = await client.conversations.items.create(
        begun.id, items=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    one = await client.conversations.items.retrieve(added.data[0].id, conversation_id=begun.id)
    assert one.content[0].text == "a"
    await client.conversations.items.delete(added.data[0].id, conversation_id=begun.id)
    assert await texts_of(client, begun.id) == ["b"]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.delete(added.data[0].id, conversation_id=begun.id)
    changed = await client.conversations.update(begun.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"}
    deleted = await client.conversations.delete(begun.id)
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        await client.conversations.retrieve(begun.id)


async def test_an_item_of_the_conversation_can_be_referred_to(api: ApiUnderTest) -> None:
    client = api.openai()
    begun = await client.conversations.create(items=[{"role": "user", "content": "a"}])
    (item,) = (await client.conversations.items.list(begun.id)).data
    given = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "say b"}]
    await client.responses.create(**asked(given, conversation=begun.id))
    assert [one["content"] for one in prompt_of(api)] == ["a", "a", "say b"]


async def test_a_conversation_waits_for_the_response_that_is_being_written(
    api: ApiUnderTest,
) -> None:
    api.worker.written = asyncio.Semaphore(0)
    client = api.openai()
    begun = await client.conversations.create()
    late = await client.responses.create(**asked("say one", conversation=begun.id, background=True))
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**asked("say two", conversation=begun.id))
    assert refused.value.code == "conversation_locked"
    api.worker.written.release()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while late.status in ("queued", "in_progress"):
            late = await client.responses.retrieve(late.id)
    assert await texts_of(client, begun.id) == ["say one", "one"]


async def test_changes_at_a_time_are_all_kept(api: ApiUnderTest) -> None:
    client = api.openai()
    begun = await client.conversations.create()
    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            items = [{"role": "user", "content": str(number)}]
            tasks.create_task(client.conversations.items.create(begun.id, items=items))
    assert sorted(await texts_of(client, begun.id)) == [str(number) for number in range(5)]


async def test_what_its_conversation_does_not_take_is_kept_nowhere(api: ApiUnderTest) -> None:
    """A failed response is not charged, so it must not be readable."""
    api.worker.go.clear()
    client = api.openai()
    begun = await client.conversations.create()
    body = asked("say one", conversation=begun.id)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(api.http.post("/v1/responses", json=body))
        await api.worker.until_taken(1)
        await client.conversations.delete(begun.id)
        api.worker.go.set()
    answer = asking.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.headers["x-penstock-cost-usd"] == "0"
    assert (await api.http.get("/v1/predictions")).json()["results"] == []


async def test_what_a_conversation_took_is_answered_if_it_is_not_stored_elsewhere(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output can be read in the conversation, so the response is charged."""
    monkeypatch.setattr(service, "DOCUMENT_MAX_BYTES", 100)
    client = api.openai()
    begun = await client.conversations.create()
    made = await client.responses.create(**asked("say one", conversation=begun.id, store=True))
    assert (made.output_text, made.store) == ("one", False)
    assert await texts_of(client, begun.id) == ["say one", "one"]


async def test_a_full_conversation_is_refused_before_anything_is_written(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    begun = await api.openai().conversations.create(items=items)
    for options in ({}, {"background": True}):
        body = asked("say one", conversation=begun.id, **options)
        answer = await api.http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")
    assert not api.worker.jobs
    assert (await api.http.get("/v1/predictions")).json()["results"] == []


@pytest.mark.parametrize("options", [{"background": True}, {"stream": True}])
async def test_a_response_that_its_conversation_does_not_take_is_canceled(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    api.worker.written = asyncio.Semaphore(0)
    monkeypatch.setattr(conversations, "DOCUMENT_MAX_BYTES", 500)
    begun = await api.openai().conversations.create()
    body = asked(f"say {'one ' * 100}", conversation=begun.id, **options)
    answer = await api.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            (made,) = (await api.http.get("/v1/predictions")).json()["results"]
            if made["status"] == "canceled":
                break
            await asyncio.sleep(0.01)
    assert await texts_of(api.openai(), begun.id) == []


@pytest.mark.parametrize("options", [{"background": True}, {"stream": True}])
async def test_a_retry_with_its_key_adds_a_response_that_its_conversation_did_not_take(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    begun = await api.openai().conversations.create()
    body, key = asked("say one", conversation=begun.id, **options), {"idempotency-key": "once"}
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "_ATTEMPTS", 0)
        for _ in range(2):
            answer = await api.http.post("/v1/responses", json=body, headers=key)
            assert answer.json()["error"]["code"] == "conversation_locked"
    answer = await api.http.post("/v1/responses", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    async with asyncio.timeout(WAIT_LIMIT_S):
        while len(texts := await texts_of(api.openai(), begun.id)) < 2:
            pass
    assert texts == ["say one", "one"]
    assert len(api.worker.jobs) == 1


@pytest.mark.parametrize("options", [{"background": True}, {"stream": True}])
async def test_a_retry_with_its_key_continues_after_others_added_to_its_conversation(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    client = api.openai()
    begun = await client.conversations.create(items=[{"role": "user", "content": "a"}])
    (first,) = (await client.conversations.items.list(begun.id)).data
    given = [{"type": "item_reference", "id": first.id}, {"role": "user", "content": "say one"}]
    body, key = asked(given, conversation=begun.id, **options), {"idempotency-key": "once"}
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "_ATTEMPTS", 0)
        answer = await api.http.post("/v1/responses", json=body, headers=key)
        assert answer.json()["error"]["code"] == "conversation_locked"
    added = {"items": [{"role": "user", "content": "b"}]}
    await api.http.post(f"/v1/conversations/{begun.id}/items", json=added)
    other = asked("say two", conversation=begun.id, **options)
    refused = await api.http.post("/v1/responses", json=other, headers=key)
    assert refused.status_code == 422
    answer = await api.http.post("/v1/responses", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (texts := await texts_of(client, begun.id))[-1] != "one":
            pass
    assert texts == ["a", "b", "a", "say one", "one"]
    assert len(api.worker.jobs) == 1


async def test_a_retry_with_its_key_gets_a_stream_that_is_already_in_its_conversation(
    api: ApiUnderTest,
) -> None:
    client = api.openai()
    begun = await client.conversations.create(items=[{"role": "user", "content": "a"}])
    body = asked("say one", conversation=begun.id, stream=True)
    key = {"idempotency-key": "once"}
    answers = []
    for _ in range(3):  # the output is only added when the conversation is read
        answers.append(await api.http.post("/v1/responses", json=body, headers=key))
        assert await texts_of(client, begun.id) == ["a", "say one", "one"]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert "response.incomplete" in answers[0].text
    assert {answer.text for answer in answers} == {answers[0].text}
    assert len(api.worker.jobs) == 1


async def test_a_retry_with_its_key_joins_a_stream_that_its_conversation_waits_for(
    api: ApiUnderTest,
) -> None:
    api.worker.written = asyncio.Semaphore(0)
    client = api.openai()
    begun = await client.conversations.create()
    body = asked("say one", conversation=begun.id, stream=True)
    key = {"idempotency-key": "once"}
    async with asyncio.timeout(WAIT_LIMIT_S), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(api.http.post("/v1/responses", json=body, headers=key))
        await api.worker.until_taken(1)
        second = tasks.create_task(api.http.post("/v1/responses", json=body, headers=key))
        for _ in range(10):
            api.worker.written.release()
    assert "response.incomplete" in first.result().text
    assert "response.incomplete" in second.result().text
    assert await texts_of(client, begun.id) == ["say one", "one"]


async def test_items_have_the_same_ids_in_a_conversation_and_in_a_responses_input(
    api: ApiUnderTest,
) -> None:
    client = api.openai()
    begun = await client.conversations.create(items=[{"role": "user", "content": "a"}])
    body = asked("say one", conversation=begun.id, stream=True)
    *_, last = [event async for event in await client.responses.create(**body)]
    response = last.response
    items = (await client.conversations.items.list(begun.id, order="asc")).data
    given = (await client.responses.input_items.list(response.id, order="asc")).data
    assert [item.id for item in items[:2]] == [item.id for item in given]
    assert items[2].id == response.output[0].id


async def test_a_retry_with_its_key_is_refused_if_its_conversation_is_still_too_full(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "DOCUMENT_MAX_BYTES", 500)
    begun = await api.openai().conversations.create()
    body = asked(f"say {'one ' * 100}", conversation=begun.id, stream=True)
    for _ in range(2):
        answer = await api.http.post("/v1/responses", json=body, headers={"idempotency-key": "a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")


async def test_a_conversation_that_its_last_output_overfills_can_be_read(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pending response counts as one item, no matter how many items its output has."""
    monkeypatch.setattr(conversations, "MAX_ITEMS", 2)
    client = api.openai()
    begun = await client.conversations.create()
    body = asked(CALLS, tools=[weather_tool()], conversation=begun.id, background=True)
    late = await client.responses.create(**body)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while late.status in ("queued", "in_progress"):
            late = await client.responses.retrieve(late.id)
    kinds = ["message", "message", "function_call"]
    for _ in range(2):
        items = (await client.conversations.items.list(begun.id, order="asc")).data
        assert [item.type for item in items] == kinds
    answer = await api.http.post("/v1/responses", json=asked("say one", conversation=begun.id))
    assert answer.json()["error"]["param"] == "conversation"
    assert "only 0 more items fit" in answer.json()["error"]["message"]
    await client.conversations.items.delete(items[0].id, conversation_id=begun.id)
    items = (await client.conversations.items.list(begun.id, order="asc")).data
    assert [item.type for item in items] == kinds[1:]


PARTS = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 4500}]
"""Close to the maximum size of one body."""


async def test_parts_are_bounded_however_many_requests_gather_them(api: ApiUnderTest) -> None:
    begun = (await api.http.post("/v1/conversations", json={"items": PARTS})).json()["id"]
    path = f"/v1/conversations/{begun}/items"
    answer = await api.http.post(path, json={"items": PARTS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")
    for before in ({"conversation": begun}, {"previous_response_id": ""}):
        if "previous_response_id" in before:
            first = await api.http.post("/v1/responses", json=asked(PARTS))
            before = {"previous_response_id": first.json()["id"]}
        answer = await api.http.post("/v1/responses", json=asked(PARTS, **before))
        error = answer.json()["error"]
        assert (answer.status_code, [error["param"]]) == (400, list(before))
        assert (
            "parts, including those from earlier items, which exceeds the maximum of 8192"
            in error["message"]
        )


async def test_a_key_of_other_models_has_no_part_in_it(redis_url: str, tmp_path: Path) -> None:
    keys = [stored("others", "a", models=(TEXT_MODEL.name,))]
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, keys=keys, ours="a")
    )
    body: dict[str, Any] | None
    async with running_api(settings) as api:
        ids = []
        for options in ({"background": True}, {"stream": True}, {}):
            begun = await api.http.post("/v1/conversations", json={}, headers=bearer("ours"))
            ids.append(begun.json()["id"])
            body = asked("say a secret", conversation=ids[-1], **options)
            await api.http.post("/v1/responses", json=body, headers=bearer("ours"))
        added = {"items": [{"role": "user", "content": "a"}]}
        for path, (method, rest, body) in itertools.product(
            (f"/v1/conversations/{one}" for one in ids),
            [
                ("GET", "", None),
                ("GET", "/items", None),
                ("GET", "/items/x", None),
                ("POST", "", {"metadata": {}}),
                ("POST", "/items", added),
                ("DELETE", "/items/x", None),
                ("DELETE", "", None),
            ],
        ):
            answer = await api.http.request(
                method, path + rest, json=body, headers=bearer("others")
            )
            assert answer.json()["error"]["code"] == "model_not_allowed", (method, rest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"items": [{"type": "web_search_call"}]}, "items"),
    ],
)
async def test_what_is_wrong_is_named(api: ApiUnderTest, body: dict[str, Any], param: str) -> None:
    answer = await api.http.post("/v1/conversations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_either_a_conversation_or_an_earlier_response(api: ApiUnderTest) -> None:
    body = asked(conversation="conv_1", previous_response_id="resp_1")
    answer = await api.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert "not both" in answer.json()["error"]["message"]


async def test_another_tenant_has_no_part_in_it(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        begun = await api.http.post("/v1/conversations", json={}, headers=bearer("ours"))
        path = f"/v1/conversations/{begun.json()['id']}"
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
            answer = await api.http.request(method, path + rest, headers=bearer("theirs"))
            assert answer.status_code == 404, (method, rest)
        body = asked(conversation=begun.json()["id"])
        answer = await api.http.post("/v1/responses", json=body, headers=bearer("theirs"))
        assert answer.status_code == 404
