"""A custom class behind an API, with a real worker and the class's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from shared.broker.in_memory import InMemoryBroker
from shared.models.catalog import Catalog
from shared.stores.objects import ObjectStore
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT, until_over
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.worker_harness import running_worker
from workers.models.custom.preparation import CustomPreparer
from workers.runtime.pool import HostedModel, ModelPool


@asynccontextmanager
async def served_class(
    tmp_path: Path,
    redis_url: str,
    body: str,
    settings: Mapping[str, object] | None = None,
    *,
    processes: int = 1,
    **more: Any,
) -> AsyncIterator[ApiUnderTest]:
    """Serves a class as `mine`. The API and worker share a broker, a Redis, and an object store.

    `processes` are the worker's processes.
    """
    (tmp_path / "class").mkdir()
    folder = write_class(tmp_path / "class", body)
    entry = entry_of(folder, **{"price": {"per_item_usd": 0.25}, **more})
    given = settings_for(tmp_path, redis_url=redis_url, secret="s", **(settings or {}))
    async with AsyncExitStack() as opened:
        pool = ModelPool([HostedModel(entry, folder)], device="cpu", processes=processes)
        await opened.enter_async_context(pool)
        broker = InMemoryBroker()
        harness = await opened.enter_async_context(
            running_worker(
                redis_url,
                tmp_path,
                pool=pool,
                objects=ObjectStore(f"file://{tmp_path}/objects"),
                broker=broker,
                model=entry,
                preparer=CustomPreparer(entry),
            )
        )
        worker = FakeWorker(broker, ())
        api = await opened.enter_async_context(
            running_api(given, broker, broker, Catalog((entry,)), worker=worker)
        )
        api.rows, api.broker = harness.rows, broker
        yield api


async def serve_class(
    opened: AsyncExitStack, tmp_path: Path, redis_url: str, body: str, **more: Any
) -> ApiUnderTest:
    """Serves a class until `opened` is closed."""
    return await opened.enter_async_context(served_class(tmp_path, redis_url, body, **more))


async def predict(
    api: ApiUnderTest, headers: dict[str, str] | None = None, **given: Any
) -> dict[str, Any]:
    """The `mine` model's finished prediction for an input."""
    body = {"version": "mine", "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=WAIT | (headers or {}))
    found: dict[str, Any] = response.json()
    assert response.status_code == 201, found
    return await until_over(api, found)
