"""Real workers with a model that only takes up time, on the embedded Pub/Sub and a real Redis.

Such a model does no work, so the rest of a worker can be measured even on a busy machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast
from uuid import uuid4

from prometheus_client import REGISTRY

from bench import async_device
from bench.pipeline import emulator
from infra.local.provision_servers import provision
from infra.local.redis_server import RedisServer
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.transport import (
    ReceivedMessage,
    Subscription,
    Transport,
    inbox_topic_id,
    jobs_topic_id,
    make_inbox,
    slot_subscription_id,
)
from shared.messages import (
    Envelope,
    Item,
    Job,
    JobBody,
    decode_reply,
    decode_reply_batch,
    encode_job,
    is_reply_batch,
)
from shared.models.catalog import Catalog, Model
from shared.models.entry import Batch, Cache
from shared.models.tasks import Input
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.token_streams import TokenStreams
from shared.usage.row import Row, RowSink
from workers.identity import WorkerInfo
from workers.jobs.completion import Completion
from workers.jobs.consumer import JobConsumer
from workers.models.base import PreparedItem, PreparedText
from workers.models.client import RunningBatch
from workers.models.reports import BatchResult, ResidencyReport
from workers.runtime.pool import HostedModel, ModelPool
from workers.worker import Worker

MODEL = Model(
    name="timed",
    task="embedding",
    source="local:nowhere",
    dimensions=1,
    batch=Batch(max_tokens=2048, max_items=64),
    cache=Cache(ttl_s=0),
)
DeviceKind = Literal["none", "one", "two"]
"""With `none`, a timer in the worker's I/O process takes as long as a batch. With `one` and `two`,
a model process takes that long, and its asynchronous device (bench/async_device.py) runs one or two
batches at a time.
"""
DEADLINE_S = 600.0
INBOX = "timed"
JOB_ITEMS = 16


@contextmanager
def servers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the endpoint of an embedded Pub/Sub and the URL of a Redis server."""
    with (
        emulator("pubsub", folder) as (_, port),
        RedisServer(folder / "redis", folder) as redis,
    ):
        yield f"127.0.0.1:{port}", f"redis://127.0.0.1:{redis.port}/0"


class _Preparer:
    """Prepares each text as a single token."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedText]:
        return [PreparedText(key="", length=1, ids=bytes(4)) for _ in inputs]


class _TimedProcess:
    """A model process that does no work."""

    residency = ResidencyReport([0])
    resident = (0,)

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s

    async def ready(self) -> None:
        """Returns immediately, because this process needs no time to start."""

    def overlaps(self, model: int) -> bool:
        return False

    async def send(self, batch: Sequence[PreparedItem], **_: object) -> RunningBatch:
        return RunningBatch(asyncio.ensure_future(self._run(batch)), _do_nothing, _do_nothing)

    async def finish(self, done: BatchResult, model: int) -> None:
        """Does nothing, because this process never runs out of memory."""

    async def _run(self, batch: Sequence[PreparedItem]) -> BatchResult:
        began_s, work = time.time(), sum(item.length for item in batch)
        await asyncio.sleep(self._batch_s)
        now_s = time.time()
        return BatchResult(
            results=[EmbeddingResult(b"", item.length) for item in batch],
            started_at_s=began_s,
            finished_at_s=now_s,
            inference_ms=1000 * (now_s - began_s),
            real_work=work,
            padded_work=work,
        )


def _do_nothing(*_: object) -> None:
    """Does nothing, because this process can't be interrupted and has nothing to show."""


class _TimedPool:
    device_name = "none"

    def __init__(self, batch_s: float) -> None:
        self.processes = [_TimedProcess(batch_s)]


@asynccontextmanager
async def _pool(device: DeviceKind, batch_s: float, model: Model) -> AsyncIterator[ModelPool]:
    if device == "none":
        yield cast(ModelPool, _TimedPool(batch_s))
        return
    command = async_device.command(batch_s, overlaps=device == "two")
    with tempfile.TemporaryDirectory() as folder:
        hosted = [HostedModel(model, Path(folder))]
        async with ModelPool(hosted, device="cpu", processes=1, command=command) as pool:
            yield pool


class _NoRows:
    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        if on_safe is not None:
            on_safe()


class _Counted:
    """A subscription that counts redelivered messages."""

    def __init__(self, subscription: Subscription, *, is_fixed: bool) -> None:
        self._subscription = subscription
        self._is_fixed = is_fixed
        self.redelivered = 0

    def hold(self, max_messages: int) -> None:
        if not self._is_fixed:
            self._subscription.hold(max_messages)

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        async for message in self._subscription:
            self.redelivered += message.delivery_attempt > 1
            yield message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscription, name)


class _OtherHand:
    """A transport whose subscriptions hold a different number of messages.

    `opened` contains the subscriptions opened so far.
    """

    def __init__(self, transport: Transport, messages: int) -> None:
        self._transport = transport
        self._messages = messages
        self.opened = list[_Counted]()

    @asynccontextmanager
    async def subscribe(self, subscription_id: str, **options: Any) -> AsyncIterator[Subscription]:
        if self._messages:
            options["max_messages"] = self._messages
        async with self._transport.subscribe(subscription_id, **options) as opened:
            counted = _Counted(opened, is_fixed=bool(self._messages))
            self.opened.append(counted)
            yield cast(Subscription, counted)


class Callers:
    """All callers of the workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent = 0
        # Runs may share a Redis server that still contains jobs from earlier runs.
        self._name = uuid4().hex[:8]
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def ask(self, count: int) -> None:
        """Sends a request for `count` items in one job, and waits for the response."""
        self._sent += 1
        now_s, request_id = time.time(), f"{self._name}-{self._sent}"
        envelope = Envelope(
            request_id=request_id, part=0, model=MODEL.name, tenant="one",
            inbox=inbox_topic_id(INBOX), slot="0", deadline_s=now_s + DEADLINE_S,
            received_at_s=now_s, published_at_s=now_s, replies="n",
        )  # fmt: skip
        items = [Item(index, TextInput("a")) for index in range(count)]
        data, attributes = encode_job(Job(envelope, JobBody(items, False, False)))
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiting
        await self._transport.publish(jobs_topic_id(MODEL.name), data, attributes)
        await waiting

    async def receive(self) -> None:
        inbox = self._transport.subscribe(slot_subscription_id(INBOX, 0), max_messages=1000)
        async with inbox as replies:
            async for message in replies:
                replies.ack(message)
                if is_reply_batch(message.attributes):
                    for batched in decode_reply_batch(message.data, message.attributes):
                        self._deliver(batched.request_id)
                else:
                    reply = decode_reply(message.data, message.attributes)
                    self._deliver(reply.request_id)

    def _deliver(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


@dataclass(frozen=True, slots=True)
class BrokerSite:
    """A run's servers: Redis, and either Pub/Sub or RabbitMQ.

    `near` is the broker's own address if the other address leads through a proxy.
    """

    redis_url: str
    pubsub_endpoint: str = ""
    rabbitmq_url: str = ""
    near: str = ""

    def transport(self, project: str) -> AbstractAsyncContextManager[Transport]:
        if self.rabbitmq_url:
            return RabbitTransport(project, self.rabbitmq_url)
        return PubSubTransport(project, self.pubsub_endpoint)

    async def provision(self, project: str) -> None:
        near = self.near or self.rabbitmq_url or self.pubsub_endpoint
        admin = RabbitAdmin if self.rabbitmq_url else PubSubAdmin
        async with admin(project, near) as opened:
            await provision(opened, Catalog((MODEL,)), 0, 1)
            await make_inbox(opened, INBOX, 1)


class WorkerCounts(NamedTuple):
    """A worker's totals since it started."""

    at_s: float
    busy_s: float
    """How long its processes have been running batches."""
    cpu_s: float
    """CPU time of this process."""
    batches: int
    items: int
    held: int
    """Number of messages it currently holds."""
    redelivered: int
    """Number of messages that had already been delivered to this or another worker."""


class TimedWorker:
    """A worker with the timed model.

    `hand` is the number of messages it holds, or 0 for the usual number.
    """

    def __init__(
        self,
        site: BrokerSite,
        project: str,
        *,
        hand: int,
        batch_s: float,
        max_items: int,
        rows: RowSink | None,
        device: DeviceKind = "none",
    ) -> None:
        self._site = site
        self._project = project
        self._hand = hand
        batch = MODEL.batch.model_copy(update={"max_items": max_items})
        self._model = MODEL.model_copy(update={"batch": batch})
        self._rows = rows or _NoRows()
        self._device = device
        self._batch_s = batch_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        pool = await enter(_pool(self._device, self._batch_s, self._model))
        transport = await enter(self._site.transport(self._project))
        redis_url = self._site.redis_url
        cache, redis = await enter(ResultCache(redis_url, 0)), await enter(RecordsRedis(redis_url))
        records, tokens = Records(redis), TokenStreams(redis)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        objects = ObjectStore(f"file://{folder}")
        info = WorkerInfo("0", "here", "none")
        completion = Completion(
            self._model, transport, cache, records, tokens, objects, self._rows, info
        )
        stores = (cache, records, tokens, PreviewStore(redis), objects)
        self._consumer = JobConsumer(self._model, _Preparer(), *stores, completion)
        self._subscriber = _OtherHand(transport, self._hand)
        worker = Worker([self._consumer], self._subscriber, records, pool)
        running = asyncio.create_task(worker.run(asyncio.Event()))
        self._stack.push_async_callback(_cancel, running)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def counts(self) -> WorkerCounts:
        return WorkerCounts(
            time.time(),
            _metric("penstock_worker_inference_seconds_sum"),
            time.process_time(),
            int(_metric("penstock_worker_batch_items_count")),
            int(_metric("penstock_worker_batch_items_sum")),
            len(self._consumer.registry.find()),
            sum(subscription.redelivered for subscription in self._subscriber.opened),
        )


def _metric(name: str) -> float:
    return REGISTRY.get_sample_value(name, {"model": MODEL.name}) or 0.0


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancels a task. Raises its error if it has already failed."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
