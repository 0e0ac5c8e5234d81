"""The API for tests: the real app with an in-memory broker and no port.

    async with running_api(InMemoryBroker(), [ENTRY]) as api:
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answer = await http.post("/v1/embeddings", json={...})

Routes, checks, limits, deadlines, and errors are the same as in production. Does not include
uvicorn's own checks (limits on request heads and slow bodies). Without `redis_url`, the API behaves
as if Redis were unreachable: predictions and streams are rejected. Something must process the jobs,
such as workers/testing.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from api.app import create_app
from shared.broker.in_memory import InMemoryBroker
from shared.models.catalog import Catalog, Flow, Model
from shared.settings import ApiSettings, read_settings
from shared.stores.redis_client import NO_REDIS
from shared.usage.row import Row
from shared.usage.row_list import RowList


@dataclass
class ApiUnderTest:
    """A running API. `rows`: the rows it would write to BigQuery."""

    app: FastAPI
    rows: list[Row]


@asynccontextmanager
async def running_api(
    broker: InMemoryBroker,
    entries: Sequence[Model],
    *,
    flows: Sequence[Flow] = (),
    redis_url: str = NO_REDIS,
    objects_url: str = "memory://",
    **settings: object,
) -> AsyncIterator[ApiUnderTest]:
    """Runs an API for the duration of the block.

    Args:
        broker: the broker shared with the workers. The API creates its inbox there.
        flows: flows that use these models, created by `shared.models.catalog.flow_of`.
        redis_url: URL of the Redis server for records, limits, streams, and results, if any.
        objects_url: URL of the store for large results. Workers must use the same object store.
        settings: fields of ApiSettings, by name. All others come from the environment.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    api_settings = read_settings(
        ApiSettings, redis_url=redis_url, objects_url=objects_url, **settings
    )
    rows = RowList()
    app = create_app(api_settings, Catalog(tuple(entries), tuple(flows)), broker, broker, rows)
    async with app.router.lifespan_context(app):
        yield ApiUnderTest(app, rows.rows)
