"""Two API instances, a real worker's internals, and the embedded BigQuery that receives their
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from infra import bigquery as tables
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from shared.models.entry import Cache, Price
from shared.settings import ApiSettings
from shared.tenants.plan import Plan
from shared.usage.row import Row
from shared.usage.writer import fields_of
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker

PRICED = MODEL.model_copy(
    update={
        "price": Price(per_million_tokens_usd=2.0, cached_share=0.25),
        "cache": Cache(ttl_s=60),
    }
)
DAY_S = 86_400
SHIPPED = read_catalog(Path("models.yaml"))


@dataclass
class Sent:
    """Requests that the test sent for one tenant, and their expected charges."""

    requests: int = 0
    refused: int = 0
    items: int = 0
    succeeded: int = 0
    tokens: int = 0
    charged_tokens: float = 0.0
    by_header_usd: float = 0.0


@dataclass
class World:
    """The pipeline, and the totals of the requests sent."""

    apis: list[ApiUnderTest]
    harness: WorkerHarness
    client: bigquery.Client
    settings: ApiSettings
    sent: dict[str, Sent] = field(default_factory=lambda: defaultdict(Sent))

    async def embed(self, key: str, *texts: str, api: int = 0, **headers: str) -> httpx.Response:
        return await self.apis[api].http.post(
            "/v1/embeddings",
            json={"model": MODEL.name, "input": list(texts), "encoding_format": "base64"},
            headers=bearer(key) | {name.replace("_", "-"): text for name, text in headers.items()},
        )

    async def get(self, path: str, key: str = "a", /, **query: Any) -> httpx.Response:
        return await self.apis[0].http.get(path, params=query, headers=bearer(key))

    def rows(self) -> list[Row]:
        return [row for api in self.apis for row in api.rows] + list(self.harness.rows)

    async def store_rows(self, count: int) -> None:
        """Waits for `count` items' rows and stores them. Every third row is stored twice."""
        await self.harness.until(lambda: len({row.row_id for row in self.rows()}) >= count)
        rows = [fields_of(row) for row in self.rows()]
        assert len({row["row_id"] for row in rows}) == count
        place = f"{self.settings.dataset}.rows"
        for part in (rows, rows[::3]):
            assert not self.client.insert_rows_json(place, part, row_ids=[None] * len(part))


_EMPTY: dict[str, list[str]] = defaultdict(list)
"""Unused projects with empty tables and views, keyed by the BigQuery they belong to.

Creating them takes a second of CPU time, which is more than most tests here take.
"""


@asynccontextmanager
async def opened_world(
    redis_url: str, tmp_path: Path, endpoint: str, **given: object
) -> AsyncIterator[World]:
    keys = keys_url(
        tmp_path,
        plans={"few": Plan(requests_per_min=1)},
        tenants={"limited": "few"},
        a="acme",
        a2="acme",
        o="other",
        l="limited",
        keys=[
            stored("boss", "house", scopes=("all", "admin")),
            stored("narrow", "acme", scopes=("embeddings",)),
        ],
    )
    is_made = bool(_EMPTY[endpoint])
    project = _EMPTY[endpoint].pop() if is_made else f"usage-{uuid4().hex[:8]}"
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        keys_url=keys,
        bigquery_endpoint=endpoint,
        project=project,
        **given,
    )
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": endpoint},
    )
    if not is_made:
        tables.create(client, settings.dataset)
    async with AsyncExitStack() as opened:
        harness = await opened.enter_async_context(
            running_worker(redis_url, tmp_path, model=PRICED)
        )
        nobody, catalog = FakeWorker(harness.broker, ()), Catalog((PRICED,))
        apis = [
            await opened.enter_async_context(
                running_api(settings, harness.broker, harness.broker, catalog, worker=nobody)
            )
            for _ in range(2)
        ]
        yield World(apis, harness, client, settings)
    # Tests store nothing else.
    client.query(f"TRUNCATE TABLE {settings.dataset}.rows").result(timeout=WAIT_LIMIT_S)
    client.close()
    _EMPTY[endpoint].append(project)
