"""Previews reach the readers that request them, from any instance, at no cost to others."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.harness import IMAGE_MODEL, ApiUnderTest, api_with_redis, running_api, settings_for
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
BODY = {"version": IMAGE_MODEL.name, "input": {"prompt": "a"}}


api = api_with_redis(secret="s")


async def being_drawn(api: ApiUnderTest) -> dict[str, Any]:
    api.worker.go.clear()
    created: dict[str, Any] = (await api.http.post("/v1/predictions", json=BODY)).json()
    await api.worker.claimed.wait()
    return created


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    event: dict[str, str] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name:
            event[name] = value
        else:
            yield event
            event = {}


async def test_reader_who_asks_is_shown_previews_and_resumes_elsewhere(
    api: ApiUnderTest, stores: RecordStores, tmp_path: Path, redis_url: str
) -> None:
    created = await being_drawn(api)
    path = f"/v1/predictions/{created['id']}/stream?events=preview"
    async with api.http.stream("GET", path) as answer:
        following = events(answer)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not await stores.records.progress(created["id"], 1, 20):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for step in (1, 2):
            await stores.previews.add(created["id"], 0, step, 20, b"image %d" % step)
        seen = [await anext(following) for _ in range(3)]
    kinds = {event["event"] for event in seen}
    assert kinds == {"logs", "preview"}
    first, second = (event for event in seen if event["event"] == "preview")
    assert json.loads(first["data"]) == {
        "index": 0,
        "step": 1,
        "steps": 20,
        "image": f"data:image/webp;base64,{base64.b64encode(b'image 1').decode()}",
    }
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, worker=api.worker) as other:
        await stores.previews.add(created["id"], 0, 3, 20, b"image 3")
        headers = {"last-event-id": second["id"]}
        async with other.http.stream("GET", path, headers=headers) as answer:
            following = events(answer)
            resumed = [await anext(following)]
            api.worker.go.set()
            resumed += [event async for event in following]
    shown = [json.loads(event["data"])["step"] for event in resumed if event["event"] == "preview"]
    assert shown == [3]
    assert [event["event"] for event in resumed][-2:] == ["output", "done"]


async def test_a_reader_who_only_saw_previews_gets_the_first_log_event(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    created = await being_drawn(api)
    path = f"/v1/predictions/{created['id']}/stream?events=preview"
    await stores.previews.add(created["id"], 0, 1, 20, b"image 1")
    async with api.http.stream("GET", path) as answer:
        preview = await anext(events(answer))
    assert preview["event"] == "preview"
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not await stores.records.progress(created["id"], 0, 20):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with api.http.stream("GET", path, headers={"last-event-id": preview["id"]}) as answer:
        assert (await anext(events(answer)))["event"] == "logs"
    api.worker.go.set()


async def test_other_readers_are_shown_none_and_have_none_drawn(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    created = await being_drawn(api)
    async with api.http.stream("GET", created["urls"]["stream"]) as answer:
        following = events(answer)
        assert not await stores.records.progress(created["id"], 1, 20)
        await stores.previews.add(created["id"], 0, 1, 20, b"image")
        assert (await anext(following))["event"] == "logs"
        api.worker.go.set()
        assert [event["event"] async for event in following][-2:] == ["output", "done"]


async def test_unknown_events_are_refused(api: ApiUnderTest) -> None:
    created = await being_drawn(api)
    url = created["urls"]["stream"]
    answer = await api.http.get(url, params={"events": "preview,weather"})
    assert (answer.status_code, answer.json()["invalid_fields"][0]["field"]) == (422, "events")
    assert "weather" in answer.text
