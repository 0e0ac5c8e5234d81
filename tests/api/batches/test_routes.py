"""/v1/batches: which batches callers can create, list, and see."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from api.batches import service
from api.batches.documents import HEADER_BYTES, BatchCreated
from api.batches.names import RUNS
from shared.stores.objects import ObjectStore
from tests.api.batches.batching import (
    batching,
    created,
    jsonl,
    line,
    until,
)
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


async def test_lists_are_in_pages(api: ApiUnderTest) -> None:
    client, made = api.openai(), []
    for _ in range(5):
        made.append((await created(client, jsonl([line("1")]))).id)
        await asyncio.sleep(0.002)  # ids sort by millisecond
    assert [one.id async for one in client.batches.list(limit=2)] == made[::-1]
    page = await client.batches.list(limit=2)
    assert ([one.id for one in page.data], page.has_more) == (made[:2:-1], True)
    for wrong in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=wrong)


async def test_filtered_lists_are_in_pages(tmp_path: Path, redis_url: str) -> None:
    url = keys_url(tmp_path, a="alice", b="alice")
    async with batching(tmp_path, redis_url, keys_url=url) as (api, _):
        clients = {key: api.openai(api_key=key_for(key)) for key in "ab"}
        made = list[tuple[Any, str]]()
        for number in range(6):
            key = "b" if number % 2 else "a"
            lines = [line("1")] if number % 3 else [line("1"), line("1")]
            batch = await created(clients[key], jsonl(lines))
            made.append((await until(clients[key], batch), key))
        keys = dict[str, str]()
        for batch in (await clients["a"].batches.list(extra_query={"include": "api_key_id"})).data:
            keys |= {key: batch.api_key_id for other, key in made if other.id == batch.id}
        assert len(set(keys.values())) == 2
        middle = datetime.fromtimestamp(made[3][0].created_at, UTC)
        cases: list[tuple[dict[str, Any], Any]] = [
            ({}, lambda _batch, _key: True),
            ({"status": "failed"}, lambda batch, _key: batch.status == "failed"),
            ({"status": "expired"}, lambda _batch, _key: False),
            ({"model": TEXT_MODEL.name}, lambda batch, _key: batch.model == TEXT_MODEL.name),
            ({"api_key_id": keys["b"]}, lambda _batch, key: key == "b"),
            (
                {"created_after": middle.isoformat()},
                lambda batch, _key: batch.created_at >= middle.timestamp(),
            ),
            (
                {"created_before": middle.isoformat()},
                lambda batch, _key: batch.created_at < middle.timestamp(),
            ),
        ]
        for query, is_wanted in cases:
            listed = clients["a"].batches.list(limit=1, extra_query=query)
            expected = [batch.id for batch, key in reversed(made) if is_wanted(batch, key)]
            assert [batch.id async for batch in listed] == expected, query
        assert "api_key_id" not in (await clients["a"].batches.list()).data[0].model_dump()


async def test_a_page_checks_a_limited_number_of_batches(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PAGE", 2)
    monkeypatch.setattr(service, "MAX_CHECKED", 6)
    async with batching(tmp_path, redis_url) as (api, _):
        client, made = api.openai(), list[str]()
        for number in range(8):
            lines = [line("1")] if number in (0, 3) else [line("1"), line("1")]
            made.append((await until(client, await created(client, jsonl(lines)))).id)
        pages = list[tuple[list[str], bool, str | None]]()
        query = {"status": "completed", "limit": "1"}
        while not pages or pages[-1][1]:
            page = (await api.http.get("/v1/batches", params=query)).json()
            ids = [batch["id"] for batch in page["data"]]
            pages.append((ids, page["has_more"], page["last_id"]))
            query["after"] = page["last_id"]
        assert pages == [([made[3]], True, made[2]), ([made[0]], False, made[0])]
        listed = client.batches.list(limit=1, extra_query={"status": "completed"})
        assert [batch.id async for batch in listed] == [made[3], made[0]]


async def test_a_page_without_a_match_is_never_followed_by_another(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_CHECKED", 2)
    async with batching(tmp_path, redis_url) as (api, _):
        client, made = api.openai(), list[str]()
        for number in range(4):
            lines = [line("1")] if number == 1 else [line("1"), line("1")]
            made.append((await until(client, await created(client, jsonl(lines)))).id)
        query = {"status": "completed"}
        refused = (await api.http.get("/v1/batches", params=query)).json()["error"]
        assert refused["param"] == "created_before"
        before = refused["created_before"]
        assert refused["message"].endswith(f"set it to {before}")
        page = (await api.http.get(f"/v1/batches?status=completed&created_before={before}")).json()
        assert [batch["id"] for batch in page["data"]] == [made[1]]


@pytest.mark.parametrize("name", ["created", "ended"])
async def test_a_damaged_batch_is_left_out_of_the_list(
    tmp_path: Path, redis_url: str, name: str
) -> None:
    async with batching(tmp_path, redis_url) as (api, _):
        client = api.openai()
        batches = [await until(client, await created(client, jsonl([line("1")]))) for _ in range(2)]
        (document,) = (tmp_path / "objects").rglob(f"{batches[0].id}/{name}.json")
        document.write_bytes(document.read_bytes()[:20])
        listed = [batch.id async for batch in client.batches.list()]
        intact = [batches[1].id] if name == "ended" else [batches[1].id, batches[0].id]
        assert listed == intact


@pytest.mark.parametrize("name", ["cancel", "segment"])
async def test_a_damaged_open_batch_is_left_out_of_the_list(
    tmp_path: Path, redis_url: str, name: str
) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        client = api.openai()
        batches = [await created(client, jsonl([line("1")])) for _ in range(2)]
        folder = next((tmp_path / "objects").rglob(f"open/*/{batches[0].id}"))
        if name == "cancel":
            (folder / name).write_bytes(b'{"at_s":')
        else:
            owner = folder.parent.name
            segments = ObjectStore(f"file://{tmp_path}/objects")
            key = f"{RUNS}/{owner}/{batches[0].id}/segments/{0:05d}"
            await segments.put(key, b"{".ljust(HEADER_BYTES), "application/octet-stream")
        listed = [batch.id async for batch in client.batches.list()]
        assert listed == [batches[1].id]


async def test_an_owner_without_a_model_is_refused(api: ApiUnderTest) -> None:
    refused = await api.http.get("/v1/batches", params={"model": "acme/"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    batch = await until(api.openai(), await created(api.openai(), jsonl([line("1")])))
    for name in (TEXT_MODEL.name, f"acme/{TEXT_MODEL.name}"):
        page = (await api.http.get("/v1/batches", params={"model": name})).json()
        assert [listed["id"] for listed in page["data"]] == [batch.id]


async def test_key_of_other_models_reads_no_batch_and_no_output(
    tmp_path: Path, redis_url: str
) -> None:
    keys = [
        stored("embeds", "alice", models=(TEXT_MODEL.name,)),
        stored("writes", "alice", models=("writer",)),
    ]
    url = keys_url(tmp_path, keys=keys, a="alice")
    async with batching(tmp_path, redis_url, keys_url=url) as (api, _):
        owner = api.openai(api_key=key_for("a"))
        embeds, writes = (api.openai(api_key=key_for(name)) for name in ("embeds", "writes"))
        batch = await until(owner, await created(owner, jsonl([line("1")])))
        output = batch.output_file_id
        for asked in (
            writes.batches.retrieve(batch.id),
            writes.batches.cancel(batch.id),
            writes.files.retrieve(output),
            writes.files.content(output),
            writes.files.delete(output),
        ):
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await asked
            assert refused.value.code == "model_not_allowed"
        assert (await writes.batches.list()).data == []
        assert [one.id for one in (await writes.files.list()).data] == [batch.input_file_id]
        assert (await embeds.batches.retrieve(batch.id)).output_file_id == output
        assert (await embeds.files.content(output)).text
        assert {one.id for one in (await embeds.files.list()).data} == {batch.input_file_id, output}


async def test_another_tenants_batch_does_not_exist(tmp_path: Path, redis_url: str) -> None:
    async with batching(tmp_path, redis_url, keys_url=keys_url(tmp_path, a="alice", b="bob")) as (
        api,
        _,
    ):
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        batch = await created(alice, jsonl([line("1")]))
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert [one async for one in bob.batches.list()] == []
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/embeddings",
                completion_window="24h",
            )
        done = await until(alice, batch)
        with pytest.raises(openai.NotFoundError):
            await bob.files.content(done.output_file_id)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/v1/responses"},
        {"completion_window": "1h"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"x" * 65: "x"}},
        {"metadata": {"x": "x" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
        {"webhook": "ftp://example.com/"},
        {"webhook": "https://127.0.0.1/"},
        {"surprise": 1},
    ],
)
async def test_wrong_creations_name_the_field(api: ApiUnderTest, wrong: dict[str, Any]) -> None:
    client = api.openai()
    file = await client.files.create(file=("a", jsonl([line("1")])), purpose="batch")
    body = {
        "input_file_id": file.id,
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    } | wrong
    answer = await api.http.post("/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(wrong))


async def test_output_of_a_batch_is_no_input(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, jsonl([line("1")])))
    with pytest.raises(openai.BadRequestError, match="purpose must be batch, got batch_output"):
        await client.batches.create(
            input_file_id=done.output_file_id,
            endpoint="/v1/embeddings",
            completion_window="24h",
        )


async def test_input_of_an_open_batch_is_not_deleted(api: ApiUnderTest) -> None:
    client = api.openai()
    api.worker.go.clear()
    batch = await created(client, jsonl([line("1")]))
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    api.worker.go.set()
    await until(client, batch)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            try:
                await client.files.delete(batch.input_file_id)
                break
            except openai.BadRequestError:
                await asyncio.sleep(0.02)


async def test_tenant_has_a_bound_of_open_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_OPEN", 2)
    settings = settings_for(tmp_path, keys_url=keys_url(tmp_path, a="alice", b="bob"))
    async with running_api(settings) as api:
        alice, bob = api.openai(api_key=key_for("a")), api.openai(api_key=key_for("b"))
        for _ in range(2):
            await created(alice, jsonl([line("1")]))
        with pytest.raises(openai.RateLimitError, match="you already have 2 open batches"):
            await created(alice, jsonl([line("1")]))
        await created(bob, jsonl([line("1")]))


async def test_input_outlives_its_batch(api: ApiUnderTest) -> None:
    client = api.openai()
    file = await client.files.create(
        file=("a", jsonl([line("1")])),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    assert (await client.files.retrieve(file.id)).expires_at > batch.expires_at


async def test_each_documented_endpoint_is_accepted(api: ApiUnderTest) -> None:
    document = (await api.http.get("/openapi.json")).json()
    endpoints = document["components"]["schemas"]["BatchBody"]["properties"]["endpoint"]["enum"]
    assert {"/v1/embeddings", "/v1/chat/completions", "/v1/predictions"} <= {*endpoints}
    file = await api.openai().files.create(file=("a", jsonl([line("1")])), purpose="batch")
    body = {"input_file_id": file.id, "completion_window": "24h"}
    for endpoint in endpoints:
        answer = await api.http.post("/v1/batches", json=body | {"endpoint": endpoint})
        assert answer.status_code == 200, answer.text
    answer = await api.http.post("/v1/batches", json=body | {"endpoint": "/v1/responses"})
    assert answer.json()["error"]["message"].startswith("endpoint: must be one of /v1/embeddings, ")


def test_documents_of_earlier_releases_are_read() -> None:
    known = msgspec.json.encode(
        BatchCreated(
            id="b",
            tenant="t",
            endpoint="/v1/embeddings",
            input_file_id="f",
            created_at_s=1.0,
            expires_at_s=2.0,
            output_keep_s=3,
        )
    )
    assert msgspec.json.decode(known[:-1] + b',"later":1}', type=BatchCreated).id == "b"
