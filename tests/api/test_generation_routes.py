"""Other requests from text model clients: stored chats, token counts, multiple prompts, facts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from api.predictions import service
from shared.models.catalog import Catalog
from shared.tenants.plan import Plan
from tests.api.harness import CATALOG, WRITER, ApiUnderTest, running_api, settings_for
from tests.api.test_generation import TEXT, chat
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
CHATS = "/v1/chat/completions"


@pytest.fixture
async def api(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        yield api


async def test_stored_chats_are_listed_changed_and_deleted(api: ApiUnderTest) -> None:
    client = api.openai().chat.completions
    made = [
        (await client.create(**chat(store=True, metadata={"number": str(number % 2)}))).id
        for number in range(3)
    ]
    await client.create(**chat())
    assert [one.id async for one in client.list(limit=2)] == made
    assert [one.id async for one in client.list(limit=1, order="desc")] == made[::-1]
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.list(after="chatcmpl-" + "0" * 24)
    odd = client.list(extra_query={"metadata[number]": "1"}, order="desc")
    assert [one.id async for one in odd] == [made[1]]
    assert not [one async for one in client.list(model="other")]
    read = await client.retrieve(made[0])
    assert (read.choices[0].message.content, read.metadata) == (TEXT, {"number": "0"})
    changed = await client.update(made[0], metadata={"number": "7"})
    assert changed.metadata == {"number": "7"}
    assert (await client.retrieve(made[0])).metadata == {"number": "7"}
    messages = [one async for one in client.messages.list(made[0])]
    assert [(one.role, one.content) for one in messages] == [("user", f"say {TEXT}")]
    assert (await client.delete(made[0])).deleted
    with pytest.raises(openai.NotFoundError, match="Chat completion with id"):
        await client.retrieve(made[0])
    assert [one.id async for one in client.list()] == made[1:]


async def test_a_page_of_chats_reads_no_more_than_it_shows(
    api: ApiUnderTest, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand long chats, listing them all blocked the event loop for seconds."""
    monkeypatch.setattr(service, "PAGE", 2)
    made = [(await api.http.post(CHATS, json=chat(store=True))).json()["id"] for _ in range(9)]

    def reads() -> int:
        counts: Any = redis.Redis.from_url(redis_url).info("commandstats")
        return int(counts["cmdstat_hgetall"]["calls"])

    before = reads()
    page = (await api.http.get(f"{CHATS}?limit=1")).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (made[:1], True)
    # The API's services may read in the meantime, but not all nine of them.
    assert 2 <= reads() - before < len(made)


async def test_chats_of_a_model_that_is_gone_are_left_out(redis_url: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings) as api:
        await api.http.post(CHATS, json=chat(store=True))
    others = Catalog(tuple(model for model in CATALOG.models if model.name != WRITER.name))
    async with running_api(settings, catalog=others) as api:
        listed = await api.http.get(CHATS)
        assert (listed.status_code, listed.json()["data"]) == (200, [])


async def test_a_streamed_chat_is_stored_too(api: ApiUnderTest) -> None:
    client = api.openai().chat.completions
    chunks = [one async for one in await client.create(**chat(store=True, stream=True))]
    assert [one.id async for one in client.list()] == [chunks[0].id]


async def test_chats_that_are_not_stored_are_neither_listed_nor_changed(api: ApiUnderTest) -> None:
    client = api.openai().chat.completions
    chunks = [one async for one in await client.create(**chat(stream=True))]
    assert not [one async for one in client.list()]
    with pytest.raises(openai.NotFoundError):
        await client.update(chunks[0].id, metadata={})


async def test_another_tenant_sees_no_stored_chat(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, ours="a", theirs="b")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        made = await api.http.post(CHATS, json=chat(store=True), headers=bearer("ours"))
        listed = await api.http.get(CHATS, headers=bearer("theirs"))
        assert listed.json()["data"] == []
        path = f"{CHATS}/{made.json()['id']}"
        changed = await api.http.post(path, json={"metadata": {}}, headers=bearer("theirs"))
        deleted = await api.http.delete(path, headers=bearer("theirs"))
        assert (changed.status_code, deleted.status_code) == (404, 404)


async def test_tokens_are_counted_by_a_worker_and_cost_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    plans = {"team": Plan(budget_usd_per_month=1.0)}
    keys = keys_url(tmp_path, plans=plans, tenants={"a": "team"}, ours="a")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=keys)) as api:
        api.http.headers.update(bearer("ours"))
        asked = {"model": "writer", "input": "how many are these"}
        counted = await api.http.post("/v1/responses/input_tokens", json=asked)
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": 4}
        assert counted.headers["x-penstock-cost-usd"] == "0"
        messages = [{"role": "user", "content": "how many"}]
        body = {"model": "writer", "messages": messages, "system": "be short"}
        counted = await api.http.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": 4}
        body = {"model": "writer", "prompt": "a bcd"}
        assert (await api.http.post("/v1/tokenize", json=body)).json() == {
            "count": 2,
            "tokens": [1, 3],
            "max_model_len": WRITER.generation.context_tokens,
        }
        assert all(not row.cost_usd for row in api.rows)


async def test_input_that_comes_before_counts_too(api: ApiUnderTest) -> None:
    client = api.openai()
    first = await client.responses.create(model="writer", input="say one two")
    counted = await client.responses.input_tokens.count(
        model="writer", input="and now", previous_response_id=first.id
    )
    assert counted.input_tokens == len(["say", "one", "two", "one", "two", "and", "now"])


@pytest.mark.parametrize("is_in_conversation", [False, True])
async def test_a_personality_has_no_effect_on_input_that_comes_before(
    api: ApiUnderTest, is_in_conversation: bool
) -> None:
    client = api.openai()
    body: dict[str, Any] = {"model": "writer", "input": "now", "personality": "friendly"}
    if is_in_conversation:
        items = [{"role": "user", "content": "say one"}]
        begun = await client.conversations.create(items=items)
        (item,) = (await client.conversations.items.list(begun.id)).data
        reference = {"type": "item_reference", "id": item.id}
        body |= {"conversation": begun.id, "input": [reference]}
    else:
        first = await client.responses.create(model="writer", input="say one")
        body |= {"previous_response_id": first.id}
    answer = await api.http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["input_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"model": "writer"}, "prompt"),
        ("tokenize", {"model": "all-MiniLM-L6-v2", "prompt": "a"}, "model"),
        ("responses/input_tokens", {"model": "writer", "input": ""}, "input"),
    ],
)
async def test_what_is_wrong_is_named(
    api: ApiUnderTest, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await api.http.post(f"/v1/{path}", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


async def test_a_completion_takes_many_prompts(api: ApiUnderTest) -> None:
    prompts = [f"say {number}" for number in range(70)]
    reply = await api.openai().completions.create(model="writer", prompt=prompts, temperature=0)
    assert [choice.text for choice in reply.choices] == [str(number) for number in range(70)]
    for wrong, reason in (
        ({"stream": True}, "exceed the maximum of 64"),
        ({"n": 8, "prompt": prompts * 2}, "exceed the maximum of 1024"),
        ({"prompt": prompts * 8}, "at most 512"),
    ):
        body = {"model": "writer", "prompt": prompts, **wrong}
        answer = await api.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert reason in answer.json()["error"]["message"]


async def test_facts_that_clients_look_for_are_there(api: ApiUnderTest) -> None:
    model = (await api.http.get("/v1/models/writer")).json()
    assert model["max_model_len"] == model["context_length"] == WRITER.generation.context_tokens
    others = (await api.http.get("/v1/models")).json()["data"]
    assert [one["id"] for one in others if "max_model_len" in one] == ["writer"]
    assert (await api.http.get("/health")).status_code == 200
