"""Pulls one model's jobs and queues their items.

In call order: `start` → `_pull` → `_admit`, which decodes jobs, drops late ones, claims records,
checks the cache, fetches source images, prepares inputs, and queues items. The worker takes batches
from `queue` and passes their results to `batches` (both in items.py). Every outcome is passed to
completion.py.

Canceled and late jobs are dropped, whether queued or in a running batch. Each held job has a timer,
which fires at the queue limit and at the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from shared.broker.transport import ReceivedMessage, Subscription
from shared.errors import BadInput, PenstockError, UndecodableMessage
from shared.messages import Item, decode_job, failure
from shared.models.catalog import Model
from shared.models.tasks.custom import CustomInput
from shared.stores.cache import Hit, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.token_streams import TokenStreams
from shared.stores.withdrawals import LiveWithdrawals, no_withdrawals, withdrawn_error
from shared.tracing.spans import is_recorded
from workers.jobs.canary_share import CanaryShare
from workers.jobs.cancellation import Cancellation
from workers.jobs.claims import Claims
from workers.jobs.completion import Completion
from workers.jobs.deadlines import Clock, Deadlines, SystemClock
from workers.jobs.items import Arrived, BatchResults, ModelQueue, TokenOutput
from workers.jobs.preprocessor import Preprocessor
from workers.models.base import Prepared, PreparedPrompt, Preparer, WithoutModel
from workers.scheduling.job import TOLERATED_CRASHES, ItemRun, PulledJob, QueuedItem
from workers.tasks import WORKER_TASKS

CANARY_PART = 0.5
"""Share of a job's time that a canary may use. Jobs not finished by then are forwarded."""
ADMIT_MESSAGES_MAX = 256
"""Maximum number of messages to admit together, with one cache lookup and one tokenizer call for
all of them.
"""

log = logging.getLogger(__name__)


class JobConsumer:
    """Consumes one model's subscriptions. The caller opens and closes the parts passed in.

    `queue` holds the waiting items, `batches` takes the results, `tokens` takes generations'
    partial output, and `cancellation` drops jobs.
    """

    def __init__(
        self,
        model: Model,
        preparer: Preparer,
        cache: ResultCache,
        records: Records,
        tokens: TokenStreams,
        previews: PreviewStore,
        objects: ObjectStore,
        completion: Completion,
        *,
        in_steps: bool = False,
        clock: Clock | None = None,
        withdrawals: LiveWithdrawals | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.model = model
        self._withdrawals = withdrawals or no_withdrawals()
        self._withdrawals.on_withdrawn(self._end_withdrawn)
        self.computes_steps = in_steps
        """True if the model batches continuously: items are admitted between steps."""
        self.queue = ModelQueue(model, completion, self._notify_queued)
        self.batches = BatchResults(model, self.queue, completion, records, previews)
        self.cancellation = Cancellation(self.queue, completion, records, self._notify_unwanted)
        self.tokens = TokenOutput(completion, tokens)
        self._preprocessor = Preprocessor(
            preparer, objects, on_thread=WORKER_TASKS[model.task].prepares_on_thread(model)
        )
        self._cache = cache
        self._claims = Claims(records, completion, self.cancellation)
        self._completion = completion
        self._forwarding = completion.forwarding
        self._deadlines = (
            Deadlines(self.cancellation.expire_start, self.cancellation.expire, clock)
            if self._forwarding is None
            else Deadlines(self._forward_unstarted, self._forward_late, clock, CANARY_PART)
        )
        self.registry = completion.registry
        """Jobs held by this consumer."""
        self._arrived: asyncio.Queue[tuple[ReceivedMessage, Subscription]] = asyncio.Queue(
            ADMIT_MESSAGES_MAX
        )
        self._subscriptions: Sequence[Subscription] = ()
        self._pulling: list[asyncio.Task[None]] = []
        self._on_queued: Callable[[], None] | None = None
        self._on_unwanted: Callable[[], None] | None = None

    @property
    def canary(self) -> CanaryShare | None:
        """The worker's part in the comparison of two revisions. None if the model has no canary."""
        return self._completion.canary

    @property
    def is_connected(self) -> bool:
        """True if jobs published now would arrive here."""
        return bool(self._subscriptions) and all(
            subscription.is_connected for subscription in self._subscriptions
        )

    def start(
        self,
        subscriptions: Sequence[Subscription],
        on_queued: Callable[[], None],
        on_unwanted: Callable[[], None],
    ) -> list[asyncio.Task[None]]:
        """Starts pulling and admitting.

        Returns the tasks, which stop only if there is an error. The caller cancels them.

        Args:
            on_queued: called when there are more items to take.
            on_unwanted: called when a running batch may have lost its last caller.
        """
        self._subscriptions = subscriptions
        self._on_queued, self._on_unwanted = on_queued, on_unwanted
        self._pulling = [
            asyncio.create_task(self._pull(subscription)) for subscription in subscriptions
        ]
        return [*self._pulling, asyncio.create_task(self._admit_all())]

    def _notify_queued(self) -> None:
        if self._on_queued is not None:
            self._on_queued()

    def _notify_unwanted(self) -> None:
        if self._on_unwanted is not None:
            self._on_unwanted()

    def note_suspects(self, batch: Sequence[QueuedItem]) -> AbstractAsyncContextManager[None]:
        """Records, until the context exits, that a suspect is running by itself."""
        is_alone = len(batch) == 1 and batch[0].is_suspect
        return self._claims.mark_alone(
            [pulled for pulled, _ in batch[0].open_waiters()] if is_alone else ()
        )

    async def cancel(self, record: str | None) -> None:
        """Drops the jobs of a canceled record.

        None means that some cancellations may have been missed.
        """
        if record is None:
            await self.cancellation.recheck()
        else:
            self.cancellation.cancel(record)

    async def drain(self) -> None:
        """Stops pulling, and returns once no jobs remain.

        Called when the worker is asked to shut down.
        """
        await self.registry.leave()
        for subscription in self._subscriptions:
            await subscription.stop()
        await asyncio.gather(*self._pulling)
        await self._arrived.join()
        await self.registry.wait_idle()

    async def hand_back_all(self) -> None:
        """Hands back the remaining jobs when the worker shuts down."""
        self._subscriptions = ()
        await self.registry.hand_back_all()

    async def _pull(self, subscription: Subscription) -> None:
        async for message in subscription:
            await self._arrived.put((message, subscription))

    async def _admit_all(self) -> None:
        """Admits all messages that arrived during the last admission together."""
        while True:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            await self._admit(arrived)
            for _ in arrived:
                self._arrived.task_done()

    async def _admit(self, arrived: Sequence[tuple[ReceivedMessage, Subscription]]) -> None:
        """Decodes jobs, drops late and finished ones, replies from the cache, queues the rest."""
        decoded = [self._decode(message, subscription) for message, subscription in arrived]
        pulled_jobs = [pulled for pulled in decoded if pulled is not None]
        cached = await self._claim_and_look_up(pulled_jobs)
        missing = []
        for pulled in pulled_jobs:
            for item in () if pulled.is_over else pulled.items:
                if pulled.reads_cache and item.cache_key in cached:
                    hit = cached[item.cache_key]
                    cached[item.cache_key] = hit.repeated
                    self._completion.settle(pulled, pulled.hit(item, hit))
                elif not self.queue.coalesce(pulled, item):
                    missing.append((pulled, item))
        # Cache hits are useless for jobs that have already ended.
        unused = {key: hit.owed for key, hit in cached.items() if hit.owed is not None}
        self._cache.mark_unpaid(unused, self.model.cache.ttl_s)
        if missing:
            await self._enqueue(missing)

    async def _claim_and_look_up(self, pulled_jobs: Sequence[PulledJob]) -> dict[str, Hit]:
        """Claims jobs, and returns their items' cached results."""
        if all(pulled.is_fresh for pulled in pulled_jobs):  # the cache in Redis is not read
            await self._claims.claim(pulled_jobs)
            return await self._look_up(pulled_jobs)
        _, hits = await asyncio.gather(self._claims.claim(pulled_jobs), self._look_up(pulled_jobs))
        return hits

    def _decode(self, message: ReceivedMessage, subscription: Subscription) -> PulledJob | None:
        """Returns the job in `message`.

        If it is late or misdirected, closes it and returns None.
        """
        now_s = time.time()
        try:
            job = decode_job(message.data, message.attributes)
            self._check_model(job.envelope.model)
            if job.envelope.flow and not self._completion.has_flows:
                raise UndecodableMessage("this worker does not run flow steps", field="flow")
        except UndecodableMessage as error:
            self.registry.spawn(self._completion.replies.refuse(message, error, subscription))
            return None
        job.envelope.attempt = max(job.envelope.attempt, message.delivery_attempt)
        trace = job.envelope.trace
        runs = list[ItemRun]() if is_recorded(trace) else None
        pulled = PulledJob(job, message, subscription, now_s, trace=trace, runs=runs)
        self.registry.add(pulled)
        if pulled.start_by_s > now_s:
            self._deadlines.watch(pulled)
            if self._withdrawals.is_withdrawn(self.model):
                self._fail_withdrawn(pulled)
            return None if pulled.is_over or self._is_forwarded(pulled) else pulled
        for item in pulled.items:
            self._completion.settle(pulled, pulled.expired(item.index))
        return None

    def _check_model(self, name: str) -> None:
        if name != self.model.name and name not in self.model.adapted:
            raise UndecodableMessage(f"the job is for the model {name!r}", field="model")

    def _end_withdrawn(self) -> None:
        """Fails all jobs, including running ones, if the model has been withdrawn."""
        if self._withdrawals.is_withdrawn(self.model):
            for pulled in self.registry.find():
                self._fail_withdrawn(pulled)
            self.queue.discard_unwanted()
            self.cancellation.on_unwanted()

    def _fail_withdrawn(self, pulled: PulledJob) -> None:
        model = self.model.find_adapted(pulled.envelope.model)
        self.cancellation.fail(pulled, withdrawn_error(model))

    def _is_forwarded(self, pulled: PulledJob) -> bool:
        """Forwards a job that reached a canary after the canary was rolled back."""
        part = self._completion.canary
        if self._forwarding is None or part is None or not part.is_taken_back:
            return False
        self._forwarding.begin(pulled, "taken_back")
        return True

    def _forward_unstarted(self, pulled: PulledJob) -> None:
        if not self.cancellation.has_started(pulled):
            self._forward_late(pulled)

    def _forward_late(self, pulled: PulledJob) -> None:
        """Forwards a job early enough for the other revision to finish it."""
        if self._forwarding is None or pulled.is_over:
            return
        if self._completion.canary is not None:
            self._completion.canary.count_late(pulled)
        self._forwarding.begin(pulled, "late")
        self.queue.discard_unwanted()
        self.cancellation.on_unwanted()

    async def _look_up(self, pulled_jobs: Sequence[PulledJob]) -> dict[str, Hit]:
        """Returns cached results. Doesn't read Redis again right after the API has done so.

        Doesn't look up the first steps of flows.
        """
        in_memory, in_redis = list[str](), list[str]()
        for pulled in pulled_jobs:
            if pulled.reads_cache:
                keys = [item.cache_key for item in pulled.items if item.cache_key is not None]
                is_asked = pulled.is_fresh and not pulled.envelope.flow
                (in_memory if is_asked else in_redis).extend(keys)
        return await self._cache.get_many([*self._cache.list_in_memory(in_memory), *in_redis])

    async def _enqueue(self, missing: list[tuple[PulledJob, Item]]) -> None:
        """Prepares inputs and queues them. A job that killed two workers runs by itself."""
        parts: dict[PulledJob | None, list[tuple[PulledJob, Item]]] = {}
        for pulled, item in missing:
            is_suspect = pulled.unfinished_claims > TOLERATED_CRASHES
            parts.setdefault(pulled if is_suspect else None, []).append((pulled, item))
        for suspect, part in parts.items():
            await self._enqueue_part(part, [suspect] if suspect is not None else [])
        self.queue.on_queued()

    def _work_of_refusal(self, item: Item, error: PenstockError) -> int:
        """Returns the amount of work counted for an input that could not be prepared.

        Measuring a custom class's input takes little work, unless the measurement reached its time
        limit.
        """
        if isinstance(item.input, CustomInput) and isinstance(error, BadInput):
            return 1
        return item.input.estimate_work(self.model)

    def _choose_adapter(self, pulled: PulledJob, ready: Prepared) -> None:
        """Makes a text use the adapter that its job names instead of the model."""
        if isinstance(ready, PreparedPrompt) and pulled.envelope.model != self.model.name:
            ready.adapter = pulled.envelope.model

    async def _enqueue_part(
        self, missing: list[tuple[PulledJob, Item]], suspects: list[PulledJob]
    ) -> None:
        """Prepares all inputs in one call and queues them.

        An input that can't be prepared fails on its own.
        """
        async with self._claims.mark_alone(suspects):
            prepared = await self._preprocessor.prepare([item for _, item in missing])
        written = await self.tokens.resume(missing, prepared)
        arrived = list[Arrived]()
        for (pulled, item), ready, before in zip(missing, prepared, written, strict=True):
            if isinstance(ready, PenstockError):
                receipt = pulled.receipt(spent_work=self._work_of_refusal(item, ready))
                self._completion.settle(pulled, failure(item.index, ready, receipt))
            elif isinstance(ready, WithoutModel):  # no model is needed
                self._completion.settle(pulled, pulled.without_model(item, ready))
            else:
                self._choose_adapter(pulled, ready)
                arrived.append((pulled, item, ready, before))
        self.queue.add(arrived, time.time())
