"""Serves classes of one's own behind an API, with a real worker and the process of the class."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from shared.catalog import Catalog
from shared.in_memory_broker import InMemoryBroker
from shared.stores.objects import ObjectStore
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT, until_over
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.worker_harness import running_worker
from workers.models.custom.preparation import CustomPreparer
from workers.runtime.pool import HostedModel, ModelPool


@asynccontextmanager
async def serving(tmp_path: Path, redis_url: str) -> AsyncIterator[Any]:
    """Serves a class: its API and a worker, which share a broker, a Redis and an object store."""
    async with AsyncExitStack() as opened:

        async def served(body: str, **more: Any) -> ApiUnderTest:
            (tmp_path / "class").mkdir()
            folder = write_class(tmp_path / "class", body)
            entry = entry_of(folder, **{"price": {"per_item_usd": 0.25}, **more})
            pool = ModelPool([HostedModel(entry, folder)], device="cpu", processes=1)
            await opened.enter_async_context(pool)
            broker = InMemoryBroker()
            settings = settings_for(tmp_path, redis_url=redis_url, url_secret="s")
            worker = running_worker(
                redis_url,
                tmp_path,
                pool=pool,
                objects=ObjectStore(f"file://{tmp_path}/objects"),
                broker=broker,
                model=entry,
                preparer=CustomPreparer(entry),
            )
            harness = await opened.enter_async_context(worker)
            api = await opened.enter_async_context(
                running_api(
                    settings,
                    broker,
                    broker,
                    Catalog((entry,)),
                    worker=FakeWorker(broker, ()),
                )
            )
            api.rows = harness.rows
            return api

        yield served


async def predict(api: ApiUnderTest, **given: Any) -> dict[str, Any]:
    body = {"version": "mine", "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    found: dict[str, Any] = response.json()
    assert response.status_code == 201, found
    return await until_over(api, found)
