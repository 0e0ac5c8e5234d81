"""A worker with an in-memory broker, a real Redis and a fake model process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import (
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    ReceivedMessage,
    SubscriptionSettings,
    inbox_topic_id,
    jobs_topic_id,
    make_jobs,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.errors import BadInput, Canceled, ModelFailed, PenstockError, Unavailable
from shared.flows.engine import FlowEngine
from shared.messages import (
    Envelope,
    Item,
    Job,
    JobBody,
    Reply,
    decode_reply,
    decode_reply_batch,
    decode_reply_body,
    encode_job,
    is_reply_batch,
)
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.catalog import Catalog, Model
from shared.models.entry import Batch, Cache, Price
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import CustomResult
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.models.tasks.image import ImageResult
from shared.stores.cache import NO_TIMES, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.withdrawals import LiveWithdrawals
from shared.tenants.plan import Priority
from shared.tracing.spans import TraceContext
from shared.usage.row import Row
from tests.limits import REDIS_LIMIT_S, WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.waiting import until
from workers.identity import WorkerInfo
from workers.jobs.canary_share import CanaryShare
from workers.jobs.completion import Completion
from workers.jobs.consumer import JobConsumer
from workers.jobs.deadlines import Clock
from workers.jobs.registry import JobRegistry
from workers.jobs.step_completion import StepCompletion
from workers.metrics import ProcessTimes
from workers.models.base import Prepared, PreparedCustom, PreparedImage, PreparedText, Preparer
from workers.models.client import ModelProcessDied, OnPreviews, OnProgress, RunningBatch
from workers.models.reports import BatchResult, Failure, ResidencyReport
from workers.runtime.pool import ModelPool
from workers.start_report import StartReport
from workers.tasks import WORKER_TASKS
from workers.worker import Worker

MODEL = Model(
    name="letters",
    task="embedding",
    source="local:nowhere",
    dimensions=1,
    batch=Batch(max_tokens=100, max_items=4),
    cache=Cache(ttl_s=60),
    price=Price(per_million_tokens_usd=2.0),
)
LARGE_IMAGE = b"p" * (INLINE_LIMIT_BYTES + 1)


class LetterPreparer:
    """A token is a letter; a text that contains a digit is rejected."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText | BadInput]:
        return [self._prepare(given) for given in inputs]

    def _prepare(self, given: Input) -> PreparedText | BadInput:
        assert isinstance(given, TextInput)
        if any(letter.isdigit() for letter in given.text):
            return BadInput("no digits", field="input")
        return PreparedText(key="", length=len(given.text), ids=given.text.encode())


class LoneBatches:
    """A process that runs one batch at a time, like PooledProcess."""

    def overlaps(self, model: int) -> bool:
        return False

    async def send(self, batch: Sequence[Any], **given: Any) -> RunningBatch:
        running = asyncio.ensure_future(self.run(batch, **given))
        return RunningBatch(running, self.cancel, self.watch)

    async def finish(self, done: BatchResult, model: int) -> None:
        return None

    run: Callable[..., Coroutine[Any, Any, BatchResult]]

    def cancel(self) -> None:
        return None

    def watch(self, slots: Sequence[int]) -> None:
        return None


class LetterProcess(LoneBatches):
    """Returns the text itself; `gate` pauses it, and `deaths` is how many times it dies first.

    "!" fails by itself, "†" kills the process each time, and "short" runs out of memory in a batch.
    `is_deaf`: the process has no steps, so it never receives cancellations.
    """

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.image = LARGE_IMAGE
        self.loaded_at_s = 0.0
        self.computed_work: list[int] = []
        self.deaths = 0
        self.died_of = "killed"
        self.started = asyncio.Event()
        self.residency = ResidencyReport([0])
        self.resident = [0]
        self.canceled = False
        """True if the running batch has been canceled."""
        self.cancels = 0
        """Number of batches that were canceled; never decreases."""
        self.is_deaf = False
        self.holds = ""
        """Closes the gate when the process receives this text."""
        self.step_told: tuple[int, int] | None = None
        self.on_step: OnProgress | None = None
        self.on_previews: OnPreviews | None = None
        self.watched: list[list[int]] = []

    async def ready(self) -> None:
        return None

    async def run(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        model: int,
        on_step: OnProgress | None = None,
        on_previews: OnPreviews | None = None,
    ) -> BatchResult:
        texts = [self._text(prepared) for prepared in batch]
        self.batches.append(texts)
        self.started.set()
        if self.holds in texts:
            self.gate.clear()
        if self.step_told and on_step:
            on_step(*self.step_told)
        self.on_step, self.on_previews = on_step, on_previews
        await asyncio.wait_for(self.gate.wait(), timeout_s)
        if self.deaths or any("†" in text for text in texts):
            self.deaths, self.canceled = max(0, self.deaths - 1), False
            raise ModelProcessDied(self.died_of)
        results: list[Result | PenstockError] = [self._result(text) for text in texts]
        was_canceled, self.canceled = self.canceled, False
        if was_canceled:
            results = [Canceled() for _ in texts]
        now_s, letters = time.time(), sum(map(len, texts))
        short = "short" in texts and len(texts) > 1
        saved = 47 if was_canceled else None
        return BatchResult(
            results=[
                Failure.from_error(one) if isinstance(one, PenstockError) else one
                for one in results
            ],
            started_at_s=now_s,
            finished_at_s=now_s,
            inference_ms=1.5,
            real_work=letters,
            padded_work=letters,
            out_of_memory=short,
            steps_saved=saved,
            loaded_at_s=self.loaded_at_s,
            computed_work=self.computed_work,
        )

    def _text(self, prepared: Prepared) -> str:
        assert isinstance(prepared, PreparedText)
        return prepared.ids.decode()

    def _result(self, text: str) -> Result | PenstockError:
        if text == "IMAGE":
            return ImageResult(Blob("image/png", data=self.image), 8, 8, 1, 64)
        return ModelFailed("a bang") if "!" in text else EmbeddingResult(text.encode(), len(text))

    def watch(self, slots: Sequence[int]) -> None:
        self.watched.append(list(slots))

    def cancel(self) -> None:
        if not self.is_deaf:
            self.canceled = True
            self.cancels += 1
            self.gate.set()


class PaintProcess(LetterProcess):
    """The equivalent for images, whose color depends on the seed. A prompt with "!" fails."""

    def _text(self, prepared: Prepared) -> str:
        assert isinstance(prepared, PreparedImage)
        size = f"{prepared.width} {prepared.height} {prepared.seed} {prepared.steps}"
        return f"{size} {prepared.prompt}"

    def _result(self, text: str) -> Result | PenstockError:
        if "!" in text:
            return ModelFailed("a bang")
        width, height, seed, steps = map(int, text.split()[:4])
        image = io.BytesIO()
        Image.new("RGB", (width, height), (seed % 256, 0, 0)).save(image, "png")
        blob = Blob("image/png", data=image.getvalue())
        return ImageResult(blob, width, height, seed, width * height * steps)


class WordProcess(LetterProcess):
    """A class that converts a word to uppercase.

    A word with "!" fails, and "0" is rejected.
    """

    def _text(self, prepared: Prepared) -> str:
        assert isinstance(prepared, PreparedCustom)
        return str(prepared.values["word"])

    def _result(self, text: str) -> Result | PenstockError:
        if text == "0":
            return BadInput("no digits", field="word")
        return ModelFailed("a bang") if "!" in text else CustomResult(text.upper())


class LetterPool:
    def __init__(self, process: LetterProcess | None = None) -> None:
        self.processes = [process or LetterProcess()]
        self.device_name = "letters"


class WorkerHarness:
    """The caller's side: sends jobs, receives replies, and sees rows."""

    def __init__(
        self,
        broker: InMemoryBroker,
        process: LetterProcess,
        rows: RowList,
        stores: RecordStores,
        stop: asyncio.Event,
    ) -> None:
        self.broker, self.process, self.rows, self.stores, self.stop = (
            broker,
            process,
            rows,
            stores,
            stop,
        )
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.reply_messages: list[ReceivedMessage] = []
        self.running: asyncio.Task[None] | None = None
        self.consumer: JobConsumer | None = None
        self.registry: JobRegistry | None = None

    async def send_items(self, items: list[Item], *, request_id: str) -> None:
        """Sends a job with items of any kind."""
        now_s = time.time()
        envelope = Envelope(
            request_id=request_id,
            part=0,
            model=MODEL.name,
            tenant="t",
            inbox=inbox_topic_id("1"),
            slot="0",
            deadline_s=now_s + WAIT_LIMIT_S,
            received_at_s=now_s,
            published_at_s=now_s,
        )
        await self.publish(Job(envelope, JobBody(items)))

    async def send(
        self,
        *texts: str,
        request_id: str = "req",
        left_s: float = 30.0,
        priority: Priority = "interactive",
        tenant: str = "t",
        prediction: str = "",
        webhook: str = "",
        queue_limit_s: float = 0.0,
        age_s: float = 0.0,
        received_ago_s: float = 0.0,
        trace: TraceContext | None = None,
        slot: str = "0",
        replies: str = "n",
        **body: bool,
    ) -> None:
        now_s = time.time()
        envelope = Envelope(
            replies=replies,
            request_id=request_id,
            part=0,
            model=MODEL.name,
            tenant=tenant,
            inbox=inbox_topic_id("1"),
            slot=slot,
            deadline_s=now_s + left_s,
            received_at_s=now_s - received_ago_s,
            published_at_s=now_s - age_s,
            priority=priority,
            prediction=prediction,
            webhook=webhook,
            start_by_s=now_s + queue_limit_s if queue_limit_s else 0.0,
            traceparent=trace.traceparent if trace else "",
        )
        items = [
            Item(index, TextInput(text), cache_key=f"key-{text}")
            for index, text in enumerate(texts)
        ]
        await self.publish(Job(envelope, JobBody(items, **body)))

    async def publish(self, job: Job) -> None:
        data, attributes = encode_job(job)
        await self.broker.publish(jobs_topic_id(MODEL.name), data, attributes)

    async def reply(self) -> Reply:
        return await asyncio.wait_for(self.replies.get(), WAIT_LIMIT_S)

    async def queued(self, items: int) -> None:
        """Returns once this many items are waiting for the model."""
        assert self.consumer is not None
        queue = self.consumer.queue
        await self.until(lambda: queue.waiting == items)

    async def joined(self, items: int) -> None:
        """Returns once this many identical items share the running one."""
        assert self.consumer is not None
        queue = self.consumer.queue
        await self.until(lambda: len(queue.running[0][0].waiters) == items)

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds)

    async def ask(self, *texts: str, **given: object) -> list[tuple[str, bytes | None]]:
        await self.send(*texts, **given)  # type: ignore[arg-type]
        outcomes = (await self.reply()).body.outcomes
        return [
            (o.status, o.result.vector if isinstance(o.result, EmbeddingResult) else None)
            for o in outcomes
        ]


class RowList(list[Row]):
    """Rows are safe immediately, unless they are `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Callable[[], None]] | None = None

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        self.extend(rows)
        if on_safe is not None and self.held is not None:
            self.held.append(on_safe)
        elif on_safe is not None:
            on_safe()


class FailingStore(ObjectStore):
    """A store whose first puts fail, as if it were unreachable."""

    def __init__(self, url: str, failures: int) -> None:
        super().__init__(url)
        self._failures = failures

    async def put(self, key: str, data: bytes, media_type: str) -> None:
        self._failures -= 1
        if self._failures >= 0:
            raise Unavailable("the store is away")
        await super().put(key, data, media_type)


class HeldCache(ResultCache):
    """A cache that does not reach Redis until `gate` opens."""

    gate = asyncio.Event()

    async def put_many(
        self,
        results: Mapping[str, Result],
        ttl_s: int,
        finished_at_s: Mapping[str, float | None] = NO_TIMES,
    ) -> None:
        await asyncio.wait_for(self.gate.wait(), WAIT_LIMIT_S)
        await super().put_many(results, ttl_s, finished_at_s)


@asynccontextmanager
async def running_worker(
    redis_url: str,
    folder: Path,
    *,
    drain_s: float = WAIT_LIMIT_S,
    cache_kind: type[ResultCache] = ResultCache,
    pool: ModelPool | LetterPool | None = None,
    objects: ObjectStore | None = None,
    broker: InMemoryBroker | None = None,
    model: Model = MODEL,
    times: ProcessTimes | None = None,
    start: StartReport | None = None,
    preparer: Preparer | None = None,
    clock: Clock | None = None,
    canary: CanaryShare | None = None,
    withdrawals: LiveWithdrawals | None = None,
    catalog: Catalog | None = None,
    redis_limit_s: float = REDIS_LIMIT_S,
) -> AsyncIterator[WorkerHarness]:
    """Runs a worker on `pool`, or on a fake model process that the test controls.

    It runs flow steps if given their `catalog`. `redis_limit_s` limits a round trip to the records.
    """
    letters = pool if isinstance(pool, LetterPool) else LetterPool()
    broker, name = broker or InMemoryBroker(), model.name
    await make_jobs(broker, name)
    await broker.ensure_topic(WEBHOOKS_TOPIC_ID)
    await broker.ensure_topic(inbox_topic_id("1"))
    for subscription_id, settings in (
        (slot_subscription_id("1", 0), SubscriptionSettings(inbox_topic_id("1"))),
        (WEBHOOKS_SUBSCRIPTION_ID, SubscriptionSettings(WEBHOOKS_TOPIC_ID)),
    ):
        await broker.ensure_subscription(subscription_id, settings)
    rows, stop = RowList(), asyncio.Event()
    async with (
        cache_kind(redis_url, 1_000_000) as cache,
        RecordStores(redis_url, timeout_s=redis_limit_s, retry_s=0.01) as stores,
    ):
        assert await cache.wait_up(WAIT_LIMIT_S)
        harness = WorkerHarness(broker, letters.processes[0], rows, stores, stop)
        objects = objects or ObjectStore(f"file://{folder}")
        records, tokens = stores.records, stores.tokens
        info = WorkerInfo("w", "here", "letters")
        parts = model, broker, cache, records, tokens, objects, rows, info
        completion = (
            Completion(*parts, canary)
            if catalog is None
            else StepCompletion(
                *parts, FlowEngine(catalog, records, stores.flow_runs, broker, cache), canary
            )
        )
        preparer = preparer or LetterPreparer()
        consumer = JobConsumer(
            model,
            preparer,
            cache,
            records,
            tokens,
            stores.previews,
            objects,
            completion,
            in_steps=WORKER_TASKS[model.task].computes_steps(model, folder),
            clock=clock,
            withdrawals=withdrawals,
        )
        harness.consumer, harness.registry = consumer, completion.registry
        worker = Worker(
            [consumer],
            broker,
            records,
            pool or letters,  # type: ignore[arg-type]
            drain_s=drain_s,
            times=times,
            start=start,
        )
        harness.running = asyncio.create_task(worker.run(stop))
        receiving = asyncio.create_task(_receive(harness))
        try:
            yield harness
        finally:
            stop.set()
            with contextlib.suppress(ModelFailed):
                await asyncio.wait_for(harness.running, WAIT_LIMIT_S + drain_s)
            receiving.cancel()
    assert broker.backlog(workers_subscription_id(name)) == 0 or drain_s == 0


async def _receive(harness: WorkerHarness) -> None:
    async with harness.broker.subscribe(slot_subscription_id("1", 0), max_messages=100) as replies:
        async for message in replies:
            replies.ack(message)
            harness.reply_messages.append(message)
            for reply in replies_in(message):
                harness.replies.put_nowait(reply)


def replies_in(message: ReceivedMessage) -> list[Reply]:
    """The replies in a message: one or several."""
    if not is_reply_batch(message.attributes):
        return [decode_reply(message.data, message.attributes)]
    slot = message.attributes.get("slot", "")
    return [
        Reply(one.request_id, one.part, slot, decode_reply_body(one.body))
        for one in decode_reply_batch(message.data, message.attributes)
    ]
