"""How many times a request waits for Redis. If Redis is far away, each wait costs a round trip.

Redis is behind a proxy that forwards nothing until the test allows it. All commands the API has
sent by then are forwarded together, as one round trip.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.stores.cache import ResultCache
from shared.tenants.plan import Plan
from tests.api.fake_worker import FakeWorker
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.test_limits import PRICED
from tests.gated_link import GatedLink, gated_redis
from tests.keys import bearer, keys_url, stored
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio

REQUESTS = 8
"""Reports to other instances occasionally pass through too, so the lowest count is used."""


@asynccontextmanager
async def gated_api(
    tmp_path: Path, redis_url: str
) -> AsyncIterator[tuple[ApiUnderTest, GatedLink]]:
    """An API whose tenant has limits, and whose Redis is behind a gate."""
    plan = Plan(requests_per_min=1000, budget_usd_per_month=1000.0)
    url = keys_url(
        tmp_path, plans={"theirs": plan}, tenants={"acme": "theirs"}, keys=[stored("a", "acme")]
    )
    async with gated_redis(redis_url) as (link, far):
        settings = settings_for(tmp_path, redis_url=far, keys_url=url, memory_cache_bytes=0)
        async with (
            ResultCache(redis_url, 0) as cache,
            running_api(settings, catalog=PRICED, cache=cache) as api,
        ):
            yield api, link


async def fewest(api: ApiUnderTest, link: GatedLink, cache: str, *texts: str) -> int:
    """The minimum number of round trips for requests that each have one of these texts."""
    found = list[str]()

    async def embed(text: str) -> httpx.Response:
        body = {"model": TEXT_MODEL.name, "input": text}
        answer = await api.http.post("/v1/embeddings", json=body, headers=bearer("a"))
        found.append(answer.headers["x-penstock-cache"])
        return answer

    await embed(texts[0] if cache == "hit" else "the first takes limits ahead")
    counted = [await link.trips(embed(text)) for text in texts]
    assert {answer.status_code for _, answer in counted} == {200}
    assert set(found[1:]) == {cache}
    trips = min(count for count, _ in counted)
    assert trips >= 1
    return trips


async def test_a_miss_waits_for_redis_twice_at_most(tmp_path: Path, redis_url: str) -> None:
    async with gated_api(tmp_path, redis_url) as (api, link):
        texts = [f"text {number}" for number in range(REQUESTS)]
        assert await fewest(api, link, "miss", *texts) <= 2


async def test_a_prediction_waits_for_redis_twice_at_most(tmp_path: Path, redis_url: str) -> None:
    broker = InMemoryBroker()
    async with gated_redis(redis_url) as (link, far), RecordStores(redis_url) as stores:
        settings = settings_for(tmp_path, redis_url=far, memory_cache_bytes=0)
        worker = FakeWorker(broker, PRICED.models, None, stores)
        async with (
            worker.running(broker),
            running_api(settings, broker, broker, PRICED, worker=worker) as api,
        ):
            counted = [
                await link.trips(
                    api.http.post(
                        "/v1/predictions",
                        json={"version": TEXT_MODEL.name, "input": {"text": f"text {number}"}},
                        headers={"prefer": "wait=60"},
                    )
                )
                for number in range(REQUESTS)
            ]
    assert {answer.json()["status"] for _, answer in counted} == {"succeeded"}
    assert 1 <= min(trips for trips, _ in counted) <= 2  # it is created, and read when it has ended


async def test_a_hit_waits_for_redis_once(tmp_path: Path, redis_url: str) -> None:
    async with gated_api(tmp_path, redis_url) as (api, link):
        assert await fewest(api, link, "hit", *["the same"] * REQUESTS) <= 1
