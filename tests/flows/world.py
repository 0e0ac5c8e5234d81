"""Flows over an in-memory broker: an API, and workers with small models on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import msgspec

from api.testing import running_api
from shared.broker.in_memory import InMemoryBroker
from shared.errors import PenstockError
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomResult, with_places
from shared.models.tasks.image import ImageResult
from shared.usage.row import Row
from tests.flows.models import MODELS, Compute, catalog_of
from tests.limits import WAIT_LIMIT_S
from workers.models.base import OnStep, PreparedCustom, PreparedImage, PreparedItem, Preparer
from workers.models.custom.preparation import CustomPreparer
from workers.models.image.preprocessing import ImagePreparer
from workers.testing import running_worker

OVER = {"succeeded", "failed", "canceled"}


class ThreadModel:
    """A class that runs on a thread."""

    device_name = "cpu"
    pads = False

    def __init__(self, name: str, compute: Compute) -> None:
        self._name = name
        self._compute = compute

    def setup(self) -> None:
        """Does nothing, because there are no weights to load."""

    def warmup(self) -> None:
        """Does nothing, because there is nothing to compile."""

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        return [[number] for number in range(len(batch))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        results: list[Result | PenstockError] = []
        for item in batch:
            try:
                if isinstance(item, PreparedImage):
                    results.append(self._drawn(item))
                    continue
                assert isinstance(item, PreparedCustom)
                files = {str(one.at[0]): one.data for one in item.files}
                output = self._compute.output(self._name, item.values | files)
                results.append(CustomResult(*with_places(output)))
            except PenstockError as error:
                results.append(error)
        return results

    def _drawn(self, item: PreparedImage) -> ImageResult:
        png = self._compute.output(self._name, msgspec.structs.asdict(item))
        work = item.width * item.height * item.steps
        return ImageResult(Blob("image/png", png), item.width, item.height, item.seed, work)


@dataclass
class World:
    """An API and its workers."""

    http: httpx.AsyncClient
    broker: InMemoryBroker
    compute: Compute
    written: list[list[Row]]
    """Each worker's rows, and the API's."""

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.written for row in rows]

    async def run(
        self, flow: str, given: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Runs a flow and returns the run once it has finished."""
        body = {"version": flow, "input": dict(given)}
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                answer = await self.http.post("/v1/predictions", json=body, headers=headers)
                if answer.status_code != 503:  # limits are checked within 0.1 s or not at all
                    break
                await asyncio.sleep(0.1)
        assert answer.status_code == 201, answer.text
        return await self.until_over(answer.json()["id"], headers)

    async def until_over(
        self, prediction_id: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Returns a prediction once it has finished."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                shown: dict[str, Any] = (
                    await self.http.get(f"/v1/predictions/{prediction_id}", headers=headers)
                ).json()
                if shown["status"] in OVER:
                    return shown
                await asyncio.sleep(0.02)

    async def until_began(self, word: str) -> None:
        """Waits until a word is being checked."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while word not in self.compute.began:  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.02)

    async def until_rows(self, count: int) -> list[Row]:
        """Returns all rows once there are `count` of them."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(self.rows) < count:  # noqa: ASYNC110 - the product has no use for an event here
                await asyncio.sleep(0.02)
        return self.rows


def preparer_of(entry: Model) -> Preparer:
    """Returns the preparer for one of these models' inputs."""
    return CustomPreparer(entry) if entry.definition.has_interface else ImagePreparer(entry.image)


@asynccontextmanager
async def world(
    redis_url: str,
    *flows: Mapping[str, Any],
    models: Sequence[Model] = MODELS,
    computes: type[Compute] = Compute,
    idle: Collection[str] = (),
    **settings: Any,
) -> AsyncIterator[World]:
    """Serves flows over `models`. Models in `idle` have no worker. `settings` apply to the API."""
    broker, compute, written = InMemoryBroker(), computes(), list[list[Row]]()
    catalog = catalog_of(*flows, models=models)
    async with AsyncExitStack() as opened:
        for entry in (one for one in models if one.name not in idle):
            worker = await opened.enter_async_context(
                running_worker(
                    broker,
                    entry,
                    preparer=preparer_of(entry),
                    model=partial(ThreadModel, entry.name, compute),
                    redis_url=redis_url,
                    catalog=catalog,
                )
            )
            written.append(worker.rows)
        api = await opened.enter_async_context(
            running_api(broker, models, flows=catalog.flows, redis_url=redis_url, **settings)
        )
        http = await opened.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://localhost")
        )
        written.append(api.rows)
        yield World(http, broker, compute, written)
