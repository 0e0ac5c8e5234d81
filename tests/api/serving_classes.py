"""Serves a class of one's own: its API and a worker, which share a broker, Redis and objects."""

from __future__ import annotations

from contextlib import AsyncExitStack
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


async def serve_class(
    opened: AsyncExitStack, tmp_path: Path, redis_url: str, body: str, **more: Any
) -> ApiUnderTest:
    """Starts them. They end with `opened`.

    Args:
        opened: gets what must be closed.
        tmp_path: gets the folder `class`, and the objects.
        redis_url: of the records.
        body: of predict.py.
        more: fields of the entry.
    """
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
        running_api(settings, broker, broker, Catalog((entry,)), worker=FakeWorker(broker, ()))
    )
    api.rows = harness.rows
    return api


async def predict(
    api: ApiUnderTest, headers: dict[str, str] | None = None, **given: Any
) -> dict[str, Any]:
    """The prediction of the model `mine` for an input, once it is over."""
    body = {"version": "mine", "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=WAIT | (headers or {}))
    found: dict[str, Any] = response.json()
    assert response.status_code == 201, found
    return await until_over(api, found)
