"""One tenant's input reveals nothing to another: over HTTP, through the API, broker, Redis and a
real worker's internals.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.broker.transport import workers_subscription_id
from shared.models.catalog import Catalog, Model
from shared.models.entry import Cache
from shared.usage.row import Row
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker

pytestmark = pytest.mark.anyio

SECRET = "the merger is off"
ACME, OTHER = "a", "o"


@dataclass
class Deployment:
    """Two API instances, one Redis, one worker."""

    here: ApiUnderTest
    there: ApiUnderTest
    harness: WorkerHarness

    async def embed(self, key: str, api: ApiUnderTest | None = None, *more: str) -> str:
        """Sends SECRET and returns the response's cache header."""
        body = {"model": MODEL.name, "input": [SECRET, *more], "encoding_format": "base64"}
        answer = await (api or self.here).http.post(
            "/v1/embeddings", json=body, headers=bearer(key)
        )
        assert answer.status_code == 200, answer.text
        return answer.headers["x-penstock-cache"]

    async def begin(self, key: str, api: ApiUnderTest, marker: str) -> asyncio.Task[str]:
        """Starts the same request and returns while it is in progress, once the job with its marker
        has been published.
        """
        published = self.harness.broker.published
        asked = asyncio.create_task(self.embed(key, api, marker))
        await self.harness.until(lambda: self.harness.broker.published > published)
        await self.harness.until(
            lambda: self.harness.broker.backlog(workers_subscription_id(MODEL.name)) == 0
        )
        return asked

    async def rows(self, count: int) -> list[Row]:
        """Returns SECRET's rows, from the API and the worker, once there are `count` of them."""

        def found() -> list[Row]:
            return [
                row
                for row in (*self.here.rows, *self.there.rows, *self.harness.rows)
                if row.item == 0
            ]

        await self.harness.until(lambda: len(found()) == count)
        return found()

    @property
    def computed(self) -> int:
        return sum(batch.count(SECRET) for batch in self.harness.process.batches)


@asynccontextmanager
async def deployed(
    redis_url: str, tmp_path: Path, model: Model = MODEL
) -> AsyncIterator[Deployment]:
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, a="acme", o="other")
    )
    async with AsyncExitStack() as opened:
        harness = await opened.enter_async_context(running_worker(redis_url, tmp_path, model=model))
        catalog, nobody = Catalog((model,)), FakeWorker(harness.broker, ())
        here, there = [
            await opened.enter_async_context(
                running_api(settings, harness.broker, harness.broker, catalog, worker=nobody)
            )
            for _ in range(2)
        ]
        yield Deployment(here, there, harness)


async def test_text_of_another_tenant_is_a_miss(redis_url: str, tmp_path: Path) -> None:
    async with deployed(redis_url, tmp_path) as one:
        assert await one.embed(ACME) == "miss"
        await one.rows(1)  # so that it is in Redis, in the API's memory, and in the worker's memory
        assert await one.embed(OTHER) == "miss"
        assert one.computed == 2
        await one.rows(2)
        assert [
            await one.embed(key, api) for api in (one.here, one.there) for key in (ACME, OTHER)
        ] == ["hit"] * 4
        assert one.computed == 2
        charged = sorted((row.tenant, row.cache, row.charged_share) for row in await one.rows(6))
        assert charged == [
            (tenant, *way)
            for tenant in ("acme", "other")
            for way in (("memory", 0.0), ("miss", 1.0), ("redis", 0.0))
        ]


async def test_text_of_another_tenant_in_flight_is_not_joined(
    redis_url: str, tmp_path: Path
) -> None:
    async with deployed(redis_url, tmp_path) as one:
        one.harness.process.gate.clear()
        asked = [
            await one.begin(key, api, f"{key} {name}")
            for name, api in (("here", one.here), ("there", one.there))
            for key in (ACME, OTHER)
        ]
        one.harness.process.gate.set()
        await asyncio.gather(*asked)
        assert one.computed == 2
        charged = sorted((row.tenant, row.cache) for row in await one.rows(4))
        assert charged == [
            ("acme", "joined"),
            ("acme", "miss"),
            ("other", "joined"),
            ("other", "miss"),
        ]


@pytest.mark.parametrize("share", [0.0, 0.25])
async def test_global_scope_is_a_choice_and_hits_cost_what_the_catalog_says(
    redis_url: str, tmp_path: Path, share: float
) -> None:
    price = MODEL.price.model_copy(update={"cached_share": share})
    model = MODEL.model_copy(update={"cache": Cache(ttl_s=60, scope="global"), "price": price})
    async with deployed(redis_url, tmp_path, model) as one:
        one.harness.process.gate.clear()
        asked = [
            await one.begin(ACME, one.here, "first"),
            await one.begin(OTHER, one.here, "joins in the API"),
            await one.begin(OTHER, one.there, "joins in the worker"),
        ]
        one.harness.process.gate.set()
        await asyncio.gather(*asked)
        await one.rows(3)
        assert await one.embed(OTHER) == "hit"
        assert one.computed == 1
        full_usd = len(SECRET) * 2.0 / 1e6
        charges = sorted((row.charged_share, row.cost_usd, row.tokens) for row in await one.rows(4))
        shared = (share, share * full_usd, len(SECRET))
        assert charges == [shared, shared, shared, (1.0, full_usd, len(SECRET))]
