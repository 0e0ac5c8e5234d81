"""Pulls the jobs of one model and queues their items.

In call order: `start` → `_pull` → `_admit` decodes, drops late jobs, claims records, asks the
cache, fetches source images, prepares inputs, and queues. The worker takes batches from `queue`
and passes their results to `batches` (both in items.py). Every outcome goes to completion.py.

Jobs that are canceled or late are dropped, in the queue or in a running batch. Each held job has a
timer, which fires at the queue limit and at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from shared.broker.transport import ReceivedMessage, Subscription
from shared.errors import BadInput, ModelFailed, PenstockError, Unavailable, UndecodableMessage
from shared.flows.engine import FlowEngine
from shared.messages import Item, Receipt, decode_job, failure
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks import Input
from shared.models.tasks.custom import CustomInput
from shared.models.tasks.embedding import TextToTokenize
from shared.stores.cache import Hit, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.record_state import Claim
from shared.stores.records import Records
from shared.stores.withdrawals import LiveWithdrawals, no_withdrawals, withdrawn_error
from shared.tracing.spans import is_recorded
from workers.jobs.canary_share import CanaryShare
from workers.jobs.completion import Completion, is_streamed
from workers.jobs.items import BatchResults, ModelQueue, TokenOutput
from workers.jobs.registry import JobRegistry
from workers.jobs.steps import StepJobs
from workers.models.base import Prepared, Preparer, WithoutModel
from workers.scheduling.job import TOLERATED_CRASHES, ItemRun, JobTimer, PulledJob, QueuedItem
from workers.tasks import WORKER_TASKS

JobCallback = Callable[[PulledJob], None]
_Ready = Prepared | WithoutModel | PenstockError
"""An item that a model can compute, one that needs none, or one that is wrong."""

SOURCE_LIMIT_BYTES = 64 * 1024 * 1024
"""The largest source that is fetched from the object store."""

UNFINISHED_MAX, ALONE_MAX = 3, 2
"""A job is given up after so many workers died while they held it, if it was alone in so many of
them. As with model processes: a death with another cause, or over another job, accuses nobody.
"""

CANARY_PART = 0.5
"""Share of a job's time that a canary has. Jobs it does not finish by then are forwarded."""
ADMIT_MESSAGES_MAX = 256
"""Messages that are admitted together, with one cache look-up and one tokenizer call for all."""

log = logging.getLogger(__name__)


class Clock(Protocol):
    """The clock that deadlines are measured by. Tests have one that they move."""

    def now_s(self) -> float: ...

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job in this many seconds, unless the timer is canceled before."""
        ...


class SystemClock:
    """The clock of the system, and timers of the running event loop."""

    def now_s(self) -> float:
        return time.time()

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job in this many seconds, unless the timer is canceled before."""
        return asyncio.get_running_loop().call_later(delay_s, act, pulled)


class Deadlines:
    """Watches jobs until they are over.

    Args:
        on_start_expired: called at a job's queue limit, if that is before its deadline.
        on_expired: called at a job's deadline.
        part: of the time that is left, after which a limit counts as passed.
    """

    def __init__(
        self,
        on_start_expired: JobCallback,
        on_expired: JobCallback,
        clock: Clock,
        part: float = 1.0,
    ) -> None:
        self._clock = clock
        self._part = part
        self._on_start_expired = on_start_expired
        self._on_expired = on_expired

    def watch(self, pulled: PulledJob) -> None:
        """Starts the timer of a job that was just pulled."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = self._at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)
        self._on_start_expired(pulled)

    def _at(self, unix_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        left_s = max(0.0, unix_s - self._clock.now_s())
        return self._clock.call_later(left_s * self._part, act, pulled)


class Cancellation:
    """Ends jobs early.

    `on_unwanted` is called when a running batch may have lost its last caller. The worker sets it.
    """

    def __init__(self, queue: ModelQueue, completion: Completion, records: Records) -> None:
        self._queue = queue
        self._completion = completion
        self._records = records
        self.on_unwanted: Callable[[], None] = lambda: None

    def cancel(self, record: str) -> None:
        """Drops the jobs of `record`. Items that run now end with their batch."""
        for pulled in self._completion.registry.find(record):
            pulled.is_canceled = True
            self._drop(pulled)

    def expire(self, pulled: PulledJob) -> None:
        pulled.is_late = True
        self._drop(pulled)
        self.on_unwanted()

    def fail(self, pulled_jobs: Iterable[PulledJob], error: PenstockError) -> None:
        """Ends jobs with an error. Results that some of their items have are not delivered."""
        for pulled in pulled_jobs:
            if not pulled.is_over:
                pulled.outcomes.clear()
                for item in pulled.items:
                    self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))

    def expire_start(self, pulled: PulledJob) -> None:
        """Drops the items of a job that did not start by its queue limit."""
        started = _items_in(self._queue.running, pulled)
        for item in pulled.items:
            if item.index not in started and item.index not in pulled.outcomes:
                self._completion.settle(pulled, pulled.expired(item.index))
        self._queue.discard_unwanted()

    def has_started(self, pulled: PulledJob) -> bool:
        """Returns whether the model has every item of a job that has no outcome yet."""
        started = _items_in(self._queue.running, pulled)
        return all(item.index in started or item.index in pulled.outcomes for item in pulled.items)

    async def recheck(self) -> None:
        """Reads all records again, to find jobs that were canceled while Redis was unavailable."""
        for pulled in self._completion.registry.find():
            with contextlib.suppress(Unavailable):
                record = await self._records.read(pulled.run)
                if record is not None and (record.state == "canceled" or record.closed):
                    self.cancel(pulled.run)

    def is_unwanted(self, batch: Sequence[QueuedItem]) -> bool:
        """Returns whether all callers of a batch are gone."""
        return all(pulled.is_unwanted for queued in batch for pulled, _ in queued.waiters)

    def _drop(self, pulled: PulledJob) -> None:
        """Settles all items, except those in batches that stop after their current step."""
        running = self._queue.running
        started = _items_in(running, pulled)
        stopping = _items_in(filter(self.is_unwanted, running), pulled)
        for item in pulled.items:
            if item.index not in stopping:
                queued, receipt = started.get(item.index), None
                if queued is not None:
                    receipt = _receipt_of_leaver(pulled, item, queued)
                outcome = pulled.unwanted(item.index, receipt, started=queued is not None)
                self._completion.settle(pulled, outcome)
        # The ack makes room for new jobs, so the items of this one must not stay in the queue.
        self._queue.discard_unwanted()


def _receipt_of_leaver(pulled: PulledJob, item: Item, queued: QueuedItem) -> Receipt | None:
    """Returns the receipt of an item whose caller leaves while its batch continues for others.

    If another caller waits for the same item, that one pays for all of it. What was read of a
    stream is charged to its reader, because a caller that stays may leave without reading.
    """
    is_last = all(other is pulled or other.is_unwanted for other, _ in queued.waiters)
    spent = queued.spent_work() if is_last else None
    if pulled.reads_cache and item.cache_key:
        cache = "miss" if is_streamed(item) else "joined"
        return pulled.receipt(cache=cache, work=queued.work, spent_work=spent)
    return pulled.receipt(spent_work=spent) if is_last else None


def _items_in(batches: Iterable[Sequence[QueuedItem]], pulled: PulledJob) -> dict[int, QueuedItem]:
    """The job's items in `batches`, by their indexes."""
    return {
        item.index: queued
        for batch in batches
        for queued in batch
        for job, item in queued.waiters
        if job is pulled
    }


class Preprocessor:
    """Prepares all items of a call together.

    Args:
        on_thread: True if to prepare on a thread, because it takes milliseconds.
    """

    def __init__(self, preparer: Preparer, objects: ObjectStore, *, on_thread: bool) -> None:
        self._preparer = preparer
        self._objects = objects
        self._on_thread = on_thread

    async def prepare(self, items: Sequence[Item]) -> list[_Ready]:
        """One outcome per item, in order: the prepared item, or an error."""
        loaded: Sequence[Item | PenstockError] = items
        if any(item.input.sources for item in items):
            loaded = await asyncio.gather(*(self._with_sources(item) for item in items))
        is_long = any(isinstance(item.input, TextToTokenize) for item in items)
        return (
            await asyncio.to_thread(self._prepare, loaded)
            if self._on_thread or is_long
            else self._prepare(loaded)
        )

    async def _with_sources(self, item: Item) -> Item | PenstockError:
        if not any(source.object_key for source in item.input.sources):
            return item
        try:
            inline = [await self._inline(source) for source in item.input.sources]
        except PenstockError as error:
            return error
        return msgspec.structs.replace(item, input=item.input.with_sources(inline))

    async def _inline(self, source: Blob) -> Blob:
        if source.object_key is None:
            return source
        data = await self._objects.get(source.object_key, SOURCE_LIMIT_BYTES)
        return Blob(source.media_type, data=data)

    def _prepare(self, items: Sequence[Item | PenstockError]) -> list[_Ready]:
        prepared = iter(
            self._prepare_inputs([item.input for item in items if isinstance(item, Item)])
        )
        return [next(prepared) if isinstance(item, Item) else item for item in items]

    def _prepare_inputs(self, inputs: Sequence[Input]) -> Sequence[_Ready]:
        try:
            return self._preparer.prepare(inputs)
        except Exception:
            # The boundary to tokenizers and templates. What one of them can't bear fails alone:
            # otherwise the worker would end, and so would the next ones that get the job.
            if len(inputs) > 1:
                return [one for value in inputs for one in self._prepare_inputs([value])]
            log.warning("input not prepared", exc_info=True)
            return [ModelFailed("the input could not be prepared")]


class Claims:
    """Claims the records of one model's jobs."""

    def __init__(
        self,
        records: Records,
        completion: Completion,
        cancellation: Cancellation,
        steps: StepJobs | None,
    ) -> None:
        self._records = records
        self._completion = completion
        self._cancellation = cancellation
        self._steps = steps

    async def claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        """Claims the records of jobs. Waits only for those that may have been delivered before.

        Nearly all jobs arrive for the first time, and are claimed in the background. If such a job
        turns out to be over, it is dropped wherever it is by then.
        """
        first, repeated = list[PulledJob](), list[PulledJob]()
        for pulled in pulled_jobs:
            # A line of a batch may be asked for again, under the id of a job that is over.
            envelope = pulled.envelope
            is_known = envelope.has_record or envelope.batch_id or envelope.flow
            is_first = pulled.is_fresh and not is_known
            (first if is_first else repeated).append(pulled)
        if first:
            self._completion.registry.spawn(self._claim(first))
        if repeated:
            await self._claim(repeated)

    @contextlib.asynccontextmanager
    async def noted_alone(self, pulled_jobs: Iterable[PulledJob]) -> AsyncIterator[None]:
        """Notes of those that workers died with that this one computes nothing else meanwhile.

        So if it dies as well, that counts against them. One that is over needs no note.
        """
        noted = []
        for pulled in pulled_jobs:
            if pulled.unfinished_claims and not self._completion.registry.is_leaving:
                pulled.is_alone = await self._records.note_alone(pulled.record, begins=True)
                noted.append(pulled)
        try:
            yield
        finally:
            for pulled in noted:
                if pulled.is_alone and len(pulled.outcomes) < len(pulled.items):
                    pulled.is_alone = False
                    self._completion.registry.spawn(self._is_not_alone(pulled))

    async def _is_not_alone(self, pulled: PulledJob) -> None:
        await self._records.note_alone(pulled.record, begins=False)

    async def _claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        if self._steps is not None and any(pulled.envelope.flow for pulled in pulled_jobs):
            pulled_jobs = await self._steps.still_open(pulled_jobs)
        claims = await self._records.claim([pulled.record for pulled in pulled_jobs])
        for pulled, claim in zip(pulled_jobs, claims, strict=True):
            if claim is None:  # no Redis; the broker's count includes jobs that were handed back
                pulled.unfinished_claims = max(0, pulled.message.delivery_attempt - 1)
            elif not pulled.is_over:
                pulled.is_claimed = claim.state == "processing"
                self._apply(pulled, claim)
        if self._completion.registry.is_leaving:
            await self._completion.registry.release_claims(pulled_jobs)

    def _apply(self, pulled: PulledJob, claim: Claim) -> None:
        pulled.envelope.attempt = max(pulled.envelope.attempt, claim.attempt)
        if claim.state != "processing":
            if claim.reply is None:
                self._cancellation.cancel(pulled.record)
            else:
                self._completion.repeat(pulled, claim.reply)
            self._cancellation.on_unwanted()  # the model may have begun before the claim was back
        elif claim.unfinished >= UNFINISHED_MAX and claim.alone >= ALONE_MAX:
            error = ModelFailed(
                f"{claim.unfinished} workers died while they held this job, "
                f"{claim.alone} of them while it ran alone"
            )
            pulled.dead_letter_reason = error.message
            for item in pulled.items:
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))
        else:
            pulled.unfinished_claims = claim.unfinished
            self._completion.notify_webhook(pulled, "start")


class JobConsumer:
    """Consumes the subscriptions of one model. The caller opens and closes the parts it is given.

    `queue` has the items that wait, `batches` takes the results, `tokens` takes what generations
    have so far, and `cancellation` drops jobs.
    """

    def __init__(
        self,
        model: Model,
        preparer: Preparer,
        cache: ResultCache,
        records: Records,
        objects: ObjectStore,
        completion: Completion,
        *,
        in_steps: bool = False,
        clock: Clock | None = None,
        withdrawals: LiveWithdrawals | None = None,
        flows: FlowEngine | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.model = model
        self._withdrawals = withdrawals or no_withdrawals()
        self._withdrawals.on_withdrawn(self._end_withdrawn)
        self.computes_steps = in_steps
        """True if the model batches continuously: items are admitted between steps."""
        self.queue = ModelQueue(model, completion)
        self.batches = BatchResults(model, self.queue, completion, records)
        self.cancellation = Cancellation(self.queue, completion, records)
        self.tokens = TokenOutput(completion, records)
        self._preprocessor = Preprocessor(
            preparer, objects, on_thread=WORKER_TASKS[model.task].prepares_on_thread(model)
        )
        self._cache = cache
        self._steps = None if flows is None else StepJobs(flows, completion, records)
        self._claims = Claims(records, completion, self.cancellation, self._steps)
        self._completion = completion
        self._forwarding = completion.forwarding
        self._deadlines = (
            Deadlines(self.cancellation.expire_start, self.cancellation.expire, clock)
            if self._forwarding is None
            else Deadlines(self._forward_unstarted, self._forward_late, clock, CANARY_PART)
        )
        self._registry = completion.registry
        self._arrived: asyncio.Queue[tuple[ReceivedMessage, Subscription]] = asyncio.Queue(
            ADMIT_MESSAGES_MAX
        )
        self._subscriptions: Sequence[Subscription] = ()
        self._pulling: list[asyncio.Task[None]] = []

    @property
    def registry(self) -> JobRegistry:
        return self._registry

    @property
    def canary(self) -> CanaryShare | None:
        """The part in the comparison of two revisions. None: the model has no canary."""
        return self._completion.canary

    @property
    def is_connected(self) -> bool:
        """True if jobs that are published now would arrive here."""
        return bool(self._subscriptions) and all(one.is_connected for one in self._subscriptions)

    def start(
        self,
        subscriptions: Sequence[Subscription],
        on_queued: Callable[[], None],
        on_unwanted: Callable[[], None],
    ) -> list[asyncio.Task[None]]:
        """Starts to pull and to admit.

        Returns the tasks, which end only with an error. The caller cancels them.

        Args:
            on_queued: called when there is more to take.
            on_unwanted: called when a running batch may have lost its last caller.
        """
        self._subscriptions = subscriptions
        self.queue.on_queued, self.cancellation.on_unwanted = on_queued, on_unwanted
        self._pulling = [asyncio.create_task(self._pull(one)) for one in subscriptions]
        return [*self._pulling, asyncio.create_task(self._admit_all())]

    def noted(self, batch: Sequence[QueuedItem]) -> AbstractAsyncContextManager[None]:
        """Notes that a suspect is computed by itself, until the end of the context."""
        is_alone = len(batch) == 1 and batch[0].is_suspect
        return self._claims.noted_alone(
            [pulled for pulled, _ in batch[0].open_waiters()] if is_alone else ()
        )

    async def drain(self) -> None:
        """Stops pulling, and returns when no job is left. The worker was told to go."""
        await self._registry.leave()
        for subscription in self._subscriptions:
            await subscription.stop()
        await asyncio.gather(*self._pulling)
        await self._arrived.join()
        await self._registry.wait_idle()

    async def hand_back_all(self) -> None:
        """Hands back the jobs that are left, at the end of the worker."""
        self._subscriptions = ()
        await self._registry.hand_back_all()

    async def _pull(self, subscription: Subscription) -> None:
        async for message in subscription:
            await self._arrived.put((message, subscription))

    async def _admit_all(self) -> None:
        """Admits together the messages that arrived during the last admission."""
        while True:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            await self._admit(arrived)
            for _ in arrived:
                self._arrived.task_done()

    async def _admit(self, arrived: Sequence[tuple[ReceivedMessage, Subscription]]) -> None:
        """Decodes, drops late and finished jobs, answers from the cache, and queues the rest."""
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
        # Nobody gets the hits of jobs that have ended meanwhile.
        unused = {key: hit.owed for key, hit in cached.items() if hit.owed is not None}
        self._cache.mark_unpaid(unused, self.model.cache.ttl_s)
        if missing:
            await self._enqueue(missing)

    async def _claim_and_look_up(self, pulled_jobs: Sequence[PulledJob]) -> dict[str, Hit]:
        """Claims jobs, and returns what the cache has of their items."""
        if all(pulled.is_fresh for pulled in pulled_jobs):  # the cache in Redis is not asked
            await self._claims.claim(pulled_jobs)
            return await self._look_up(pulled_jobs)
        _, hits = await asyncio.gather(self._claims.claim(pulled_jobs), self._look_up(pulled_jobs))
        return hits

    def _decode(self, message: ReceivedMessage, subscription: Subscription) -> PulledJob | None:
        """The job of `message`. None if it is for another model or late, which ends it here."""
        now_s = time.time()
        try:
            job = decode_job(message.data, message.attributes)
            if job.envelope.model != self.model.name:
                raise UndecodableMessage(
                    f"the job is for model {job.envelope.model!r}", field="model"
                )
            if job.envelope.flow and self._steps is None:
                raise UndecodableMessage("this worker carries no flows on", field="flow")
        except UndecodableMessage as error:
            self._registry.spawn(self._completion.replies.refuse(message, error, subscription))
            return None
        job.envelope.attempt = max(job.envelope.attempt, message.delivery_attempt)
        trace = job.envelope.trace
        runs = list[ItemRun]() if is_recorded(trace) else None
        pulled = PulledJob(job, message, subscription, now_s, trace=trace, runs=runs)
        self._registry.add(pulled)
        if pulled.start_by_s > now_s:
            self._deadlines.watch(pulled)
            if self._withdrawals.is_withdrawn(self.model):
                self.cancellation.fail([pulled], withdrawn_error(self.model))
            return None if pulled.is_over or self._is_forwarded(pulled) else pulled
        for item in pulled.items:
            self._completion.settle(pulled, pulled.expired(item.index))
        return None

    def _end_withdrawn(self) -> None:
        """Ends all jobs if the model is withdrawn, also those that run."""
        if self._withdrawals.is_withdrawn(self.model):
            self.cancellation.fail(self._registry.find(), withdrawn_error(self.model))
            self.queue.discard_unwanted()
            self.cancellation.on_unwanted()

    def _is_forwarded(self, pulled: PulledJob) -> bool:
        """Forwards a job that came to a canary after it was taken back."""
        part = self._completion.canary
        if self._forwarding is None or part is None or not part.is_taken_back:
            return False
        self._forwarding.begin(pulled, "taken_back")
        return True

    def _forward_unstarted(self, pulled: PulledJob) -> None:
        if not self.cancellation.has_started(pulled):
            self._forward_late(pulled)

    def _forward_late(self, pulled: PulledJob) -> None:
        """Leaves the other revision enough of the time."""
        if self._forwarding is None or pulled.is_over:
            return
        if self._completion.canary is not None:
            self._completion.canary.count_late(pulled)
        self._forwarding.begin(pulled, "late")
        self.queue.discard_unwanted()
        self.cancellation.on_unwanted()

    async def _look_up(self, pulled_jobs: Sequence[PulledJob]) -> dict[str, Hit]:
        """The results in the cache. Redis is not asked again right after the API asked it.

        It does not ask for first steps of flows.
        """
        in_memory, in_redis = list[str](), list[str]()
        for pulled in pulled_jobs:
            if pulled.reads_cache:
                keys = [item.cache_key for item in pulled.items if item.cache_key is not None]
                is_asked = pulled.is_fresh and not pulled.envelope.flow
                (in_memory if is_asked else in_redis).extend(keys)
        return await self._cache.get_many([*self._cache.kept_here(in_memory), *in_redis])

    async def _enqueue(self, missing: list[tuple[PulledJob, Item]]) -> None:
        """Prepares inputs and queues them. A job that two workers died with is by itself."""
        parts: dict[PulledJob | None, list[tuple[PulledJob, Item]]] = {}
        for pulled, item in missing:
            is_suspect = pulled.unfinished_claims > TOLERATED_CRASHES
            parts.setdefault(pulled if is_suspect else None, []).append((pulled, item))
        for suspect, part in parts.items():
            await self._enqueue_part(part, [suspect] if suspect is not None else [])
        self.queue.on_queued()

    def _work_of_refusal(self, item: Item, error: PenstockError) -> int:
        """Returns what an input counts that could not be prepared.

        Measuring the input of a class is little work, unless it ended at its time limit.
        """
        if isinstance(item.input, CustomInput) and isinstance(error, BadInput):
            return 1
        return item.input.estimate_work(self.model)

    async def _enqueue_part(
        self, missing: list[tuple[PulledJob, Item]], suspects: list[PulledJob]
    ) -> None:
        """Prepares all inputs in one call and queues them.

        An input that can't be prepared fails alone.
        """
        async with self._claims.noted_alone(suspects):
            prepared = await self._preprocessor.prepare([item for _, item in missing])
        written = await self.tokens.resume(missing, prepared)
        for (pulled, item), ready, before in zip(missing, prepared, written, strict=True):
            if isinstance(ready, PenstockError):
                receipt = pulled.receipt(spent_work=self._work_of_refusal(item, ready))
                self._completion.settle(pulled, failure(item.index, ready, receipt))
            elif isinstance(ready, WithoutModel):  # no model is needed
                self._completion.settle(pulled, pulled.without_model(item, ready))
            elif not self.queue.coalesce(
                pulled, item
            ):  # an identical item of this admission may be queued by now
                self.queue.add(ready, pulled, item, before)
