"""A key that expires or is revoked while its caller reads or waits: open requests end within
seconds.

Keys are in a file that another process changes, so each instance learns of the change as usual.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.http import connection
from api.http.auth import ApiKeys
from api.predictions import generation_stream
from shared.stores.key_stores import key_store
from shared.tenants.administration import Administration
from tests.api.harness import IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import TEXT
from tests.api.test_generation import parsed
from tests.api.test_generation_charges import BODY, served
from tests.api.test_streamed_images import PATH as IMAGES
from tests.api.test_streamed_images import events as events_in
from tests.api.test_streamed_images import record_being_drawn, show
from tests.keys import bearer, key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "say a b c"}]}
RESPONSE = {"model": "writer", "input": "say a b c"}
ENDED = "the API key is revoked"


@pytest.fixture(autouse=True)
def checks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, generation_stream):
        monkeypatch.setattr(module, "CHECK_S", 0.05)


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    url = keys_url(tmp_path, a="acme", b="acme")
    async with running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=url)) as running:
        running.worker.written = asyncio.Semaphore(1)
        yield running
        running.worker.go.set()
        for _ in range(64):
            running.worker.written.release()


async def freeze(api: ApiUnderTest, folder: Path) -> None:
    """Freezes the tenant, as another process would."""
    url = keys_url(folder, a="acme", b="acme")
    async with key_store(url, is_writable=True) as store:
        await Administration(store, actor="user x", address="").freeze_tenant(
            "acme", is_frozen=True
        )
    access = api.dependencies.access
    assert isinstance(access, ApiKeys)
    await access.directory.refresh()


async def revoke(api: ApiUnderTest, folder: Path) -> None:
    """Revokes the key `a`, as another process would. The instance learns of it as usual."""
    keys_url(folder, b="acme", keys=[stored("a", "acme", revoked_s=5)])
    access = api.dependencies.access
    assert isinstance(access, ApiKeys)
    await access.directory.refresh()


@asynccontextmanager
async def streaming(
    api: ApiUnderTest, method: str, path: str, body: Any = None
) -> AsyncIterator[httpx.Response]:
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        api.http.stream(method, path, json=body, headers=bearer("a")) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        yield answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "writer", "prompt": "say a b c"}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_stream_of_a_text_ends_with_the_error(
    api: ApiUnderTest, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with streaming(api, "POST", path, body | {"stream": True}) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await revoke(api, tmp_path)
        text += "".join([piece async for piece in pieces])
    last = json.loads(parsed(text)[-1]["data"])
    if path == "/v1/responses":
        error = last["response"]["error"]
        assert (last["type"], error["code"]) == ("response.failed", "invalid_api_key")
    else:
        error = last["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert error["message"] == ENDED


async def test_frozen_tenant_is_refused_and_its_streams_end(
    api: ApiUnderTest, tmp_path: Path
) -> None:
    reason = "this API key's tenant is frozen; contact the operator of this API"
    async with streaming(api, "POST", "/v1/chat/completions", CHAT | {"stream": True}) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await freeze(api, tmp_path)
        text += "".join([piece async for piece in pieces])
    assert json.loads(parsed(text)[-1]["data"])["error"]["message"] == reason
    for key in ("a", "b"):
        refused = await api.http.get("/v1/models", headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["message"]) == (403, reason)
        assert refused.json()["error"]["code"] == "tenant_frozen"
        assert "retry-after" not in refused.headers


async def test_client_raises_what_ended_its_stream(api: ApiUnderTest, tmp_path: Path) -> None:
    stream = await api.openai(api_key=key_for("a")).chat.completions.create(**CHAT, stream=True)
    await revoke(api, tmp_path)

    async def read() -> None:
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError, match=ENDED):
        await asyncio.wait_for(read(), WAIT_LIMIT_S)


async def test_image_that_its_reader_may_no_longer_see_is_not_drawn(
    api: ApiUnderTest, stores: RecordStores, tmp_path: Path
) -> None:
    api.worker.go.clear()
    body = {"prompt": "a", "stream": True, "partial_images": 1}
    request = api.http.build_request("POST", IMAGES, json=body, headers=bearer("a"))
    async with asyncio.timeout(WAIT_LIMIT_S), asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(api.http.send(request, stream=True))
        record = await record_being_drawn(api)
        await show(stores, record, 12)
        answer = await opening
        events = events_in(answer)
        assert (await anext(events))["event"] == "image_generation.partial_image"
        await revoke(api, tmp_path)
        assert [event["data"]["error"]["message"] async for event in events] == [ENDED]
        while True:
            snapshot = await stores.records.read(record)
            if snapshot is not None and snapshot.state == "canceled":
                break
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("model", [IMAGE_MODEL.name, "writer"])
async def test_events_of_a_prediction_end_with_the_error(
    api: ApiUnderTest, tmp_path: Path, model: str
) -> None:
    api.worker.go.clear()
    body = {"version": model, "input": {"prompt": "say a b c"}}
    made = (await api.http.post("/v1/predictions", json=body, headers=bearer("a"))).json()
    async with streaming(api, "GET", f"/v1/predictions/{made['id']}/stream") as answer:
        await revoke(api, tmp_path)
        events = parsed("".join([piece async for piece in answer.aiter_text()]))
    assert [one["event"] for one in events] == ["error", "done"]
    assert json.loads(events[0]["data"]) == {"detail": ENDED}
    # It was requested while the key was valid, and another of the tenant's keys reads it.
    found = await api.http.get(f"/v1/predictions/{made['id']}", headers=bearer("b"))
    assert found.json()["status"] in ("starting", "processing")
    # Anyone can use the link in it.
    async with asyncio.timeout(WAIT_LIMIT_S), api.http.stream("GET", made["urls"]["stream"]) as on:
        api.worker.go.set()
        for _ in range(64):
            api.worker.written.release()
        text = "".join([piece async for piece in on.aiter_text()])
    assert parsed(text)[-1]["event"] == "done"


@pytest.mark.parametrize("model", [IMAGE_MODEL.name, "writer"])
async def test_link_to_events_of_a_frozen_tenant_is_refused_and_its_streams_end(
    api: ApiUnderTest, tmp_path: Path, model: str
) -> None:
    reason = "this link's tenant is frozen; contact the operator of this API"
    api.worker.go.clear()
    body = {"version": model, "input": {"prompt": "say a b c"}}
    made = (await api.http.post("/v1/predictions", json=body, headers=bearer("a"))).json()
    link = made["urls"]["stream"]
    async with asyncio.timeout(WAIT_LIMIT_S), api.http.stream("GET", link) as answer:
        assert answer.status_code == 200
        await freeze(api, tmp_path)
        events = parsed("".join([piece async for piece in answer.aiter_text()]))
    assert [event["event"] for event in events] == ["error", "done"]
    assert json.loads(events[0]["data"]) == {"detail": reason}
    refused = await api.http.get(link)
    assert (refused.status_code, refused.json()["detail"]) == (403, reason)


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", CHAT, {}),
        ("/v1/embeddings", {"model": TEXT["version"], "input": "a"}, {}),
        ("/v1/embeddings", {"model": TEXT["version"], "input": "a"}, {"idempotency-key": "k"}),
        ("/v1/predictions", TEXT, {"prefer": "wait=60"}),
        ("/v1/responses", RESPONSE | {"store": True}, {}),
    ],
)
async def test_long_wait_ends_with_401(
    api: ApiUnderTest, tmp_path: Path, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    api.worker.go.clear()
    sent = bearer("a") | headers
    waiting = asyncio.create_task(api.http.post(path, json=body, headers=sent))
    await api.worker.until_taken(1)
    await revoke(api, tmp_path)
    answer = await asyncio.wait_for(waiting, WAIT_LIMIT_S)
    assert (answer.status_code, ENDED in answer.text) == (401, True), answer.text
    assert "x-penstock-cost-usd" not in answer.headers


async def test_what_was_delivered_until_then_is_charged(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_stream, "READER_S", 0.0)

    async def is_read(*_: object) -> bool:
        return False

    async with served(redis_url, tmp_path) as (api, harness):
        monkeypatch.setattr(api.dependencies.generation_streams._streams, "is_read", is_read)
        async with streaming(api, "POST", "/v1/completions", BODY) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            await revoke(api, tmp_path)
            text += "".join([piece async for piece in pieces])
        events = [json.loads(one["data"]) for one in parsed(text)]
        letters = "".join(one["choices"][0]["text"] for one in events[:-1])
        assert events[-1]["error"]["message"] == ENDED
        await harness.until(lambda: len(harness.rows) == 1)
        [row] = harness.rows
        assert row.status == "canceled"
        assert row.output_tokens is not None
        assert row.output_tokens >= len(letters) > 0
        assert row.cost_usd == pytest.approx((3 * 2 + row.output_tokens * 6) / 1e6)
