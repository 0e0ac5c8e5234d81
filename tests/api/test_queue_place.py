"""Predictions show their place in the queue, including to Replicate's client."""

import json
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client

from shared.stores.record_state import ReleasedClaim
from tests.api.harness import TEXT_MODEL, ApiUnderTest, api_with_redis
from tests.api.predicting import TEXT, until_over
from tests.api.test_previews import events
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio


api = api_with_redis(secret="s")


async def waiting(api: ApiUnderTest, stores: RecordStores, count: int) -> list[dict[str, Any]]:
    """Creates `count` predictions that no worker has taken, in deadline order."""
    made = []
    for _ in range(count):
        api.worker.go.clear()
        api.worker.claimed.clear()
        made.append((await api.http.post("/v1/predictions", json=TEXT)).json())
        await api.worker.claimed.wait()
        await stores.records.release([ReleasedClaim(made[-1]["id"])])
    return made


async def test_place_is_in_the_body_and_in_the_stream(api: ApiUnderTest, redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        first, second = await waiting(api, stores, 2)
        assert first["queue"] is None
        client: Any = Client(api_token="any", base_url=api.url)
        assert (await client.predictions.async_get(second["id"])).status == "starting"
        await client._async_client.aclose()
        path = f"/v1/predictions/{second['id']}"
        found = (await api.http.get(path)).json()
        assert found["queue"] == {"position": 2, "estimated_s": None}
        async with api.http.stream("GET", f"{path}/stream?events=queue") as answer:
            following = events(answer)
            told = await anext(following)
            assert (told["event"], json.loads(told["data"])["position"]) == ("queue", 2)
            await stores.records.claim([first["id"]])
            told = await anext(following)
            assert (told["event"], json.loads(told["data"])["position"]) == ("queue", 1)
            api.worker.go.set()
            assert [event["event"] async for event in following][-2:] == ["output", "done"]
    assert (await until_over(api, second))["queue"] is None


async def test_others_are_not_counted(tmp_path: Path, redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        for tenant in ("acme", "umbrella"):
            place = await _place_of_one(stores, tenant)
            assert place == (1, None)


async def _place_of_one(stores: RecordStores, tenant: str) -> Any:
    deadline_s = 4e9
    await stores.predictions.create(
        tenant, tenant, b"{}", deadline_s=deadline_s, keep_s=60, model=TEXT_MODEL.name
    )
    return await stores.lines.position(tenant, tenant, TEXT_MODEL.name, deadline_s)
