"""Two revisions of a model side by side: the real API and real workers for both, with model
processes that a test can break.
"""

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import numpy as np

from infra.local.provision_servers import provision
from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import dead_letter_subscription_id
from shared.canary.store import JUDGE_EVERY_S, CanaryStore
from shared.canary.verdict import COMPARISON_TENANT
from shared.errors import ModelFailed
from shared.models.catalog import Catalog, Model
from shared.models.entry import Batch, Canary, Price
from shared.models.tasks.embedding import EmbeddingResult
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore
from shared.usage.row import Row
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.workers.worker_harness import LetterPreparer, LoneBatches, RowList
from workers.functions.dead_letter import DeadLetters
from workers.identity import WorkerInfo
from workers.jobs.canary_share import CanaryShare
from workers.jobs.completion import Completion
from workers.jobs.consumer import JobConsumer
from workers.models.base import PreparedText
from workers.models.client import ModelProcessDied, OnPreviews, OnProgress
from workers.models.reports import BatchResult, Failure, ResidencyReport
from workers.worker import Worker

Fault = Literal["", "errors", "dies", "slow", "hangs", "wrong"]
DIMENSIONS = 8
SLOW_S = 0.4
MODEL = Model(
    name="letters",
    task="embedding",
    source="local:nowhere",
    revision="1",
    dimensions=DIMENSIONS,
    batch=Batch(max_tokens=1000, max_items=16),
    price=Price(per_million_tokens_usd=2.0),
    canary=Canary(revision="2", share=0.5, compare_share=1.0),
)
CATALOG = Catalog((MODEL,))
CANARY = CATALOG.canaries[MODEL.name]
_numbers = itertools.count()


def vector_of(text: str) -> bytes:
    drawn = np.random.default_rng(zlib.crc32(text.encode())).standard_normal(DIMENSIONS)
    return drawn.astype("<f4").tobytes()


class RevisionProcess(LoneBatches):
    """Computes one vector for each text, unless it is made to fail."""

    def __init__(self) -> None:
        self.fault: Fault = ""
        self.residency = ResidencyReport([0])
        self.resident = [0]
        self.texts: list[str] = []
        self.released = asyncio.Event()

    async def ready(self) -> None:
        return None

    async def run(
        self,
        batch: Sequence[PreparedText],
        *,
        timeout_s: float,
        model: int,
        on_step: OnProgress | None = None,
        on_previews: OnPreviews | None = None,
    ) -> BatchResult:
        texts = [prepared.ids.decode() for prepared in batch]
        self.texts += texts
        if self.fault == "dies":
            raise ModelProcessDied("killed")
        if self.fault == "slow":
            await asyncio.sleep(SLOW_S)  # a slow model
        if self.fault == "hangs":
            await self.released.wait()
        now_s = time.time()
        return BatchResult(
            results=[self._result(text) for text in texts],
            started_at_s=now_s,
            finished_at_s=now_s,
            inference_ms=1.0,
            real_work=1,
            padded_work=1,
        )

    def _result(self, text: str) -> EmbeddingResult | Failure:
        if self.fault == "errors":
            return Failure.from_error(ModelFailed("a bang"))
        return EmbeddingResult(vector_of(text[::-1] if self.fault == "wrong" else text), len(text))


class RevisionPool:
    def __init__(self, process: RevisionProcess) -> None:
        self.processes = [process]
        self.device_name = "fake"


@dataclass
class RunningWorker:
    """A worker for one revision."""

    process: RevisionProcess
    task: asyncio.Task[None]
    stop: asyncio.Event
    rows: list[Row]

    async def end(self) -> None:
        self.stop.set()
        self.process.released.set()
        await asyncio.wait_for(self.task, WAIT_LIMIT_S)

    async def kill(self) -> None:
        """Kills the worker without notifying the canary store."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class CanaryWorld:
    """An API, and workers for both revisions."""

    api: ApiUnderTest
    broker: InMemoryBroker
    canary_store: CanaryStore
    redis_url: str
    folder: Path
    workers: dict[str, RunningWorker] = field(default_factory=dict)

    async def ask(self, *texts: str, **headers: str) -> httpx.Response:
        given = list(texts) or [f"text {_letters(next(_numbers))}"]
        body = {"model": MODEL.name, "input": given}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.api.http.post("/v1/embeddings", json=body, headers=named)

    async def ask_many(self, count: int, **headers: str) -> list[httpx.Response]:
        return await asyncio.gather(*(self.ask(**headers) for _ in range(count)))

    async def until_serving(self) -> None:
        """Waits until the API sends the canary its share."""
        router = self.api.dependencies.dispatcher.canaries
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not router.is_serving(CANARY):  # noqa: ASYNC110  (it looks by the clock)
                await asyncio.sleep(0.01)

    async def until_not_serving(self) -> None:
        """Waits until the API sends nothing to the canary."""
        router = self.api.dependencies.dispatcher.canaries
        async with asyncio.timeout(WAIT_LIMIT_S):
            while router.is_serving(CANARY):  # noqa: ASYNC110  (it looks by the clock)
                await asyncio.sleep(0.01)

    async def until_rows(self, count: int) -> None:
        """Waits until `count` of the callers' items have their rows."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while sum(row.tenant != COMPARISON_TENANT for row in self.rows()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_judged(self) -> None:
        """Waits until every count so far has been judged, and there is at least one."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            # Workers send their counts only periodically, so there is no event to wait for.
            while not (await self.canary_store.counts(CANARY)).canary.items:  # noqa: ASYNC110
                await asyncio.sleep(JUDGE_EVERY_S)
        for _ in range(2):
            before = (await self.canary_store.counts(CANARY)).canary.items
            await self.api.dependencies.dispatcher.canaries.refresh()
            await asyncio.sleep(JUDGE_EVERY_S)
            assert before

    async def taken_back(self) -> str:
        """The reason the canary was rolled back. Empty if it was not."""
        return (await self.canary_store.state(CANARY)).taken_back

    def rows(self) -> list[Row]:
        return [
            *self.api.rows,
            *(row for worker in self.workers.values() for row in worker.rows),
        ]

    async def start(self, model: Model) -> RunningWorker:
        """Starts a worker for a revision.

        It runs until its own `end` is called, or until the world ends.
        """
        process, rows, stop = RevisionProcess(), RowList(), asyncio.Event()
        running = asyncio.create_task(self._work(model, process, rows, stop))
        self.workers[model.name] = RunningWorker(process, running, stop, rows)
        return self.workers[model.name]

    async def _work(
        self, model: Model, process: RevisionProcess, rows: RowList, stop: asyncio.Event
    ) -> None:
        """Runs a worker, and another one after it dies, as Kubernetes does."""
        while not stop.is_set():
            with contextlib.suppress(ModelFailed):
                await self._work_once(model, process, rows, stop)

    async def _work_once(
        self, model: Model, process: RevisionProcess, rows: RowList, stop: asyncio.Event
    ) -> None:
        async with (
            ResultCache(self.redis_url, 1_000_000) as cache,
            RecordStores(self.redis_url, retry_s=0.01) as stores,
            CanaryStore(self.redis_url, retry_s=0.01) as canary_store,
        ):
            part = CanaryShare(model, CANARY, canary_store, self.broker, refresh_s=0.05)
            objects, facts = ObjectStore("memory://"), WorkerInfo(model.name, "here", "fake")
            completion = Completion(
                model, self.broker, cache, stores.records, stores.tokens, objects, rows, facts, part
            )
            consumer = JobConsumer(
                model,
                LetterPreparer(),
                cache,
                stores.records,
                stores.tokens,
                stores.previews,
                objects,
                completion,
            )
            worker = Worker([consumer], self.broker, stores.records, RevisionPool(process))  # type: ignore[arg-type]
            await worker.run(stop)


class NoTable:
    """The dead-letter function writes no rows here, because the other revision's worker does."""

    async def write(self, rows: list[Row]) -> None:
        raise AssertionError(f"a canary's job ended in the dead letters: {rows}")


@asynccontextmanager
async def _dead_letter_function(broker: InMemoryBroker, redis_url: str) -> AsyncIterator[None]:
    """Runs the function for dead letters from the canary's workers."""

    async def run(stores: RecordStores) -> None:
        function = DeadLetters(stores.records, stores.flow_runs, broker, NoTable(), CATALOG, "here")
        keep = dead_letter_subscription_id(CANARY.name)
        async with broker.subscribe(keep, max_messages=100) as letters:
            async for message in letters:
                await function.answer(message)
                letters.ack(message)

    async with RecordStores(redis_url, retry_s=0.01) as stores:
        running = asyncio.create_task(run(stores))
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def _letters(number: int) -> str:
    """Formats a number as a text that the models accept."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


@asynccontextmanager
async def running_world(
    redis_url: str, folder: Path, **given: object
) -> AsyncIterator[CanaryWorld]:
    broker = InMemoryBroker()
    await provision(broker, CATALOG, inbox_pool=1, slots=4)
    settings = settings_for(folder, redis_url=redis_url, records_url=redis_url, **given)
    async with AsyncExitStack() as stack:
        canary_store = await stack.enter_async_context(CanaryStore(redis_url))
        api = await stack.enter_async_context(
            running_api(
                settings, broker, broker, catalog=CATALOG, worker=FakeWorker(broker, (), None)
            )
        )
        world = CanaryWorld(api, broker, canary_store, redis_url, folder)
        await stack.enter_async_context(_dead_letter_function(broker, redis_url))
        for model in CATALOG.deployed:
            await world.start(model)
        try:
            yield world
        finally:
            for worker in world.workers.values():
                if not worker.task.done():
                    await worker.end()
