"""The API as callers see it: a real uvicorn on its own port, over an in-memory broker with a fake
worker.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import httpx
import openai
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.http.dependencies import Dependencies
from api.limits.spent import SpentReader
from api.server import QuietServer, server_config
from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import Admin, Transport
from shared.models.catalog import Catalog, Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Batch, Generation
from shared.settings import ApiSettings, read_settings
from shared.stores.cache import ResultCache
from shared.stores.redis_client import NO_REDIS
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.declared import Declared
from tests.api.fake_worker import FakeWorker
from tests.api.row_sums import RowSums
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.waiting import until

SERVED = read_catalog(Path(__file__).parents[2] / "models.yaml")
PAIRS_MODEL = Model.model_validate(
    SERVED.default("embedding").model_dump() | {"name": "pairs-of-texts", "task": "similarity"}
)
WRITER = Model(
    name="writer",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=4096, max_items=8),
    generation=Generation(context_tokens=512, default_tokens=16, longest_tokens=64),
)
CATALOG = Catalog(
    tuple(
        model.model_copy(update={"aliases": (f"{model.name}-too",)})
        for model in (*SERVED.models, PAIRS_MODEL, WRITER)
    )
)
"""The shipped models plus models for similarity and text, each also under a second name."""
TEXT_MODEL, IMAGE_MODEL = CATALOG.default("embedding"), CATALOG.default("image")
DRAIN_LIMIT_S = 0.1
"""How long a server waits for its connections before it uses uvicorn's steps."""
ACCEPT_TURNS = 5
"""Event loop iterations until an accepted socket becomes a connection. asyncio needs three."""
T = TypeVar("T")


@dataclass
class ApiUnderTest:
    """A running API and everything around it."""

    url: str
    app: FastAPI
    worker: FakeWorker
    broker: InMemoryBroker
    """The default broker, unless the test provides another."""
    rows: list[Row]
    http: httpx.AsyncClient
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def dependencies(self) -> Dependencies:
        dependencies = self.app.state.dependencies
        assert isinstance(dependencies, Dependencies)
        return dependencies

    def openai(self, **options: Any) -> Any:
        """OpenAI's client, untyped so that tests can inspect raw responses; it does not retry by
        default.
        """
        given: dict[str, Any] = {"api_key": "any", "max_retries": 0, **options}
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)
        self.clients.append(client)
        return client

    async def until_idle(self) -> None:
        """Waits until the dispatcher has nothing in flight."""
        await until(lambda: not self.dependencies.dispatcher.in_flight)


def settings_for(tmp_path: Path, **settings: object) -> ApiSettings:
    usual = {
        "objects_url": f"file://{tmp_path}/objects",
        "redis_url": NO_REDIS,
        "reply_slots": 4,
        "port": 0,
        "fetch_hosts": "",  # by default, tests do not query a name server
    }
    return read_settings(ApiSettings, **{**usual, **settings})


@asynccontextmanager
async def running_api(
    settings: ApiSettings,
    transport: Transport | None = None,
    admin: Admin | None = None,
    catalog: Catalog = CATALOG,
    cache: ResultCache | None = None,
    worker: FakeWorker | None = None,
    written: list[Row] | None = None,
    spent: SpentReader | None = None,
) -> AsyncIterator[ApiUnderTest]:
    """An API and a worker. `worker` replaces the worker with one that the caller keeps running.

    `written` receives the API's rows. `spent` adds up rows; by default, the rows that this API
    wrote.
    """
    in_memory = InMemoryBroker()
    broker, inbox_admin, rows = transport or in_memory, admin or in_memory, RowList(written)
    parts = (already_open(broker), already_open(inbox_admin), rows)
    app = create_app(settings, catalog, *parts, spent or RowSums([rows.rows]))
    async with AsyncExitStack() as opened:
        if worker is None:
            stores = None if settings.redis_url == NO_REDIS else RecordStores(settings.redis_url)
            worker = FakeWorker(
                broker, catalog.models, cache, stores and await opened.enter_async_context(stores)
            )
            await opened.enter_async_context(worker.running(inbox_admin))
        url = await opened.enter_async_context(serving(app, settings))
        declared = Declared(app)
        http = await opened.enter_async_context(
            httpx.AsyncClient(
                base_url=url,
                timeout=WAIT_LIMIT_S,
                verify=False,  # plain HTTP, because loading this machine's certificates is slow
                event_hooks={"response": [declared.check]},
            )
        )
        under_test = ApiUnderTest(url, app, worker, in_memory, rows.rows, http)
        try:
            yield under_test
        finally:
            for client in under_test.clients:
                await client.close()
        lacking = sorted(set(declared.undeclared))
        assert not lacking, f"the OpenAPI document lacks: {lacking}"


def api_with_redis(**settings: object) -> Any:
    """A fixture: an API with these settings and an empty Redis."""

    @pytest.fixture
    async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
        async with running_api(settings_for(tmp_path, redis_url=redis_url, **settings)) as running:
            yield running

    return api


class PromptServer(QuietServer):
    """Shuts down using the same steps as uvicorn.

    Uvicorn pauses for a tenth of a second, which would slow down each test that starts an API.
    """

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        state = self.server_state
        # A connection that was just accepted is not in the list yet and would not be closed. Python
        # 3.12 and 3.13.0 lose it if the server is closed first.
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LIMIT_S):
                while state.connections or state.tasks:  # noqa: ASYNC110  (they have no event)
                    await asyncio.sleep(0.001)
        if state.connections or state.tasks:
            await super().shutdown(sockets)
        else:
            await self.lifespan.shutdown()


@asynccontextmanager
async def serving(app: FastAPI, settings: ApiSettings) -> AsyncIterator[str]:
    server = PromptServer(server_config(app, settings))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not server.started:
            assert not serving.done(), "the app did not start"
            await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
        await serving


@asynccontextmanager
async def already_open(part: T) -> AsyncIterator[T]:
    yield part
