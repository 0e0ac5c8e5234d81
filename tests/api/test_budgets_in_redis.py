"""A tenant that fills up Redis with responses and predictions: over HTTP, with a real Redis that
has little memory.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client import REGISTRY

from infra.local.redis_server import RedisServer
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.keys import bearer, keys_url

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
MIB = 1024 * 1024
NOISY, QUIET = bearer("one"), bearer("two")
UNCACHED = {"cache-control": "no-store"}
CAT = {"model": TEXT_MODEL.name, "input": "a cat", "encoding_format": "base64"}
ONE = {"version": TEXT_MODEL.name, "input": {"text": "a cat"}}
ROUNDS = 130
"""Each round leaves about 50 kB each of responses and predictions, three times Redis's capacity in
total.
"""


@contextlib.asynccontextmanager
async def _small(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    with (
        RedisServer(tmp_path / "redis", tmp_path) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        settings = settings_for(
            tmp_path,
            redis_url=server.url,
            keys_url=keys_url(tmp_path, one="noisy", two="quiet"),
            answers_max_bytes=MIB,
            predictions_max_bytes=MIB,
        )
        async with running_api(settings) as api:
            used: Any = client.info("memory")
            client.config_set("maxmemory", used["used_memory"] + 4 * MIB)
            yield api


def _dropped(what: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_{what}_dropped_total") or 0.0


async def _keyed(
    api: ApiUnderTest, who: dict[str, str], key: str, texts: str | list[str]
) -> httpx.Response:
    headers = {**who, **UNCACHED, "idempotency-key": key}
    return await api.http.post("/v1/embeddings", json=CAT | {"input": texts}, headers=headers)


async def _predicted(
    api: ApiUnderTest, who: dict[str, str], given: dict[str, Any]
) -> httpx.Response:
    prediction = {"version": TEXT_MODEL.name, "input": given}
    return await api.http.post(
        "/v1/predictions", json=prediction, headers={**who, **UNCACHED, **WAIT}
    )


async def test_tenant_that_fills_redis_takes_nothing_from_another(tmp_path: Path) -> None:
    async with _small(tmp_path) as api:
        kept = await _keyed(api, QUIET, "mine", "a cat")
        mine = (await _predicted(api, QUIET, {"text": "a cat"})).json()
        before = {what: _dropped(what) for what in ("answers", "predictions")}
        for number in range(ROUNDS):
            texts = [f"{number} {other}" for other in range(18)]
            assert (await _keyed(api, NOISY, f"k{number}", texts)).status_code == 200
            answered = await _predicted(api, NOISY, {"texts": texts})
            assert (answered.status_code, answered.json().get("status")) == (201, "succeeded")
        assert all(_dropped(what) > before[what] for what in before)

        # Stored responses still exist, and new ones are stored, including the noisy tenant's newest
        # response.
        again = await _keyed(api, QUIET, "mine", "a cat")
        assert (again.content, again.headers.get("idempotent-replayed")) == (kept.content, "true")
        found = await api.http.get(f"/v1/predictions/{mine['id']}", headers=QUIET)
        assert (found.status_code, found.json()["output"]) == (200, mine["output"])
        fresh = [await _keyed(api, QUIET, "new", "a dog") for _ in range(2)]
        assert [answer.headers.get("idempotent-replayed") for answer in fresh] == [None, "true"]
        assert (await _predicted(api, QUIET, {"text": "a dog"})).json()["status"] == "succeeded"
        newest = await _keyed(
            api, NOISY, f"k{ROUNDS - 1}", [f"{ROUNDS - 1} {other}" for other in range(18)]
        )
        assert newest.headers.get("idempotent-replayed") == "true"


async def test_predictions_under_way_leave_room_for_other_tenants(tmp_path: Path) -> None:
    async with _small(tmp_path) as api:
        api.worker.go.clear()
        many = {"version": TEXT_MODEL.name, "input": {"texts": ["a cat"] * 128}}
        for _ in range(20):
            last = await api.http.post("/v1/predictions", json=many, headers=NOISY)
            if last.status_code != 201:
                break
        assert last.status_code == 429
        assert int(last.headers["retry-after"]) >= 1
        assert "take up all the storage" in last.json()["detail"]
        created = [
            await api.http.post("/v1/predictions", json=ONE, headers=QUIET) for _ in range(10)
        ]
        assert [answer.status_code for answer in created] == [201] * 10
        api.worker.go.set()
        await api.worker.until_taken(10)
