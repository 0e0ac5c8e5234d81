"""One model's part of a worker: from its subscription to the entries that wait, and from a batch to its outcomes.

In call order: `start` → `_pull` → `_admit` decodes, drops the expired, claims the record, asks the cache, prepares and
queues → `take` gives the next batch → `settle` what came of it, or `survive` it. Every outcome goes to
workers/jobs/completion.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from shared.catalog import Model
from shared.errors import Canceled, ModelFailed, PenstockError, Unavailable, UndecodableMessage
from shared.messages import Item, decode_job, failure
from shared.stores.cache import Level, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.records import Records
from shared.tasks import Result
from shared.transport import Message, Subscription
from workers import metrics
from workers.job import PulledJob, QueuedItem
from workers.jobs.claims import Claims
from workers.jobs.completion import Completion
from workers.jobs.deadlines import Deadlines
from workers.jobs.preprocessing import Preprocessor
from workers.models.base import Preparer
from workers.runtime.pool import BatchDone
from workers.scheduling.lanes import LaneQueue

ADMIT_MESSAGES_MAX = 256
"""Messages admitted in one go: one cache look-up and one tokenizer call for all of them."""
PROGRESS_EVERY_S = 0.5
LINGER_S = 1.0
"""How long a computed item may still be joined: until its result has surely reached the cache."""


class JobConsumer:
    """What a worker has in hand for one model. Its parts are opened and closed by the caller."""

    def __init__(
        self,
        model: Model,
        preparer: Preparer,
        cache: ResultCache,
        records: Records,
        objects: ObjectStore,
        completion: Completion,
    ) -> None:
        self.model = model
        self._preparation = Preprocessor(preparer, objects, on_thread=model.task == "image")
        self._cache = cache
        self._records = records
        self._claims = Claims(records, completion)
        self._deadlines = Deadlines(self._pass_start, self._expire)
        self._completion = completion
        self._queue = LaneQueue(model.budget, model.batch.max_items)
        self._arrived: asyncio.Queue[tuple[Message, Subscription]] = asyncio.Queue(ADMIT_MESSAGES_MAX)
        self._by_cache_key: dict[str, QueuedItem] = {}
        self._earliest_s = float("inf")
        self._progress_told_s = float("-inf")
        self._waits = metrics.WAIT_SECONDS.labels(model.name)
        self._subscriptions: Sequence[Subscription] = ()
        self._pulling: list[asyncio.Task[None]] = []

    @property
    def is_connected(self) -> bool:
        """Whether jobs that are published now would arrive here."""
        return bool(self._subscriptions) and all(one.is_connected for one in self._subscriptions)

    def start(
        self, subscriptions: Sequence[Subscription], on_queued: Callable[[], None], on_unwanted: Callable[[], None]
    ) -> list[asyncio.Task[None]]:
        """Begins to pull and to admit; the tasks are the caller's, and end by themselves by an error only.

        Args:
            subscriptions: where jobs come from.
            on_queued: called when there is more to take.
            on_unwanted: called when a batch that runs may have lost the last who wanted anything of it.
        """
        self._subscriptions = subscriptions
        self._on_queued, self._on_unwanted = on_queued, on_unwanted
        self._pulling = [asyncio.create_task(self._pull(one)) for one in subscriptions]
        return [*self._pulling, asyncio.create_task(self._admit_all())]

    async def finish(self) -> None:
        """Takes no more, and returns when nothing is in hand."""
        for subscription in self._subscriptions:
            await subscription.stop()
        await asyncio.gather(*self._pulling)
        await self._arrived.join()
        await self._completion.wait_idle()

    async def hand_back_all(self) -> None:
        """Gives back what is in hand; for the end, when nothing will finish it any more."""
        self._subscriptions = ()
        await self._completion.hand_back_all()

    async def _pull(self, subscription: Subscription) -> None:
        async for message in subscription:
            await self._arrived.put((message, subscription))

    async def _admit_all(self) -> None:
        """Admits together what arrived while the last ones were admitted."""
        while True:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            await self._admit(arrived)
            for _ in arrived:
                self._arrived.task_done()

    async def _admit(self, arrived: Sequence[tuple[Message, Subscription]]) -> None:
        """Decodes, drops what came too late or is over, answers from the cache, and queues the rest."""
        taken = [self._register(message, subscription) for message, subscription in arrived]
        pulled_jobs = [pulled for pulled in taken if pulled is not None]
        await self._claims.claim(pulled_jobs)
        found = await self._look_up(pulled_jobs)
        missing = []
        for pulled in pulled_jobs:
            for item in () if pulled.is_over else pulled.items:
                if pulled.reads_cache and item.cache_key in found:
                    result, level = found[item.cache_key]
                    self._completion.settle(pulled, pulled.hit(item, result, level))
                elif not self._join(pulled, item):
                    missing.append((pulled, item))
        if missing:
            await self._enqueue(missing)

    async def _look_up(self, pulled_jobs: Sequence[PulledJob]) -> dict[str, tuple[Result, Level]]:
        """What the cache has. Redis is not asked again for what the API asked it for just before."""
        keys, doubtful = list[str](), list[str]()
        for pulled in pulled_jobs:
            if pulled.reads_cache:
                wanted = [item.cache_key for item in pulled.items if item.cache_key is not None]
                (keys if pulled.is_fresh else doubtful).extend(wanted)
        found = self._cache.in_memory(keys)
        return found | await self._cache.get_many(doubtful) if doubtful else found

    def _register(self, message: Message, subscription: Subscription) -> PulledJob | None:
        """The job of `message`, or None when its end is clear already: it is none of ours, or too late."""
        now_s = time.time()
        try:
            job = decode_job(message.data, message.attributes)
            if job.envelope.model != self.model.name:
                raise UndecodableMessage(f"the job is for model {job.envelope.model!r}", field="model")
        except UndecodableMessage as error:
            self._completion.refuse(message, error, subscription)
            return None
        job.envelope.attempt = max(job.envelope.attempt, message.delivery_attempt)
        pulled = PulledJob(job, message, subscription, now_s)
        self._completion.take(pulled)
        if pulled.start_by_s > now_s:
            self._deadlines.watch(pulled)
            return pulled
        for item in pulled.items:
            self._completion.settle(pulled, pulled.expired(item.index))
        return None

    def _join(self, pulled: PulledJob, item: Item) -> bool:
        """Lets `item` share the result of an identical one that is queued, runs, or ran just now."""
        entry = self._by_cache_key.get(item.cache_key) if item.cache_key and pulled.reads_cache else None
        if entry is None:
            return False
        if entry.computed is None:
            entry.askers.append((pulled, item))
        else:
            self._completion.settle(pulled, entry.joined(pulled, item))
        return True

    async def _enqueue(self, missing: list[tuple[PulledJob, Item]]) -> None:
        """Prepares inputs, all in one call, and queues them; what the model can't take fails alone."""
        prepared = await self._preparation.prepare([item for _, item in missing])
        for (pulled, item), ready in zip(missing, prepared, strict=True):
            if isinstance(ready, PenstockError):
                self._completion.settle(pulled, failure(item.index, ready, pulled.receipt()))
            elif not self._join(pulled, item):
                entry = QueuedItem(ready, item.cache_key, time.time(), [(pulled, item)])
                if item.cache_key:
                    self._by_cache_key.setdefault(item.cache_key, entry)
                self._queue.add(entry)
        self._earliest_s = min(self._earliest_s, *(pulled.start_by_s for pulled, _ in missing))
        self._on_queued()

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was queued, unix seconds."""
        return self._queue.oldest_s

    def earliest_deadline_s(self, after_s: float) -> float:
        """The earliest deadline that is not before `after_s`, unix seconds; infinite where there is none."""
        if self._earliest_s < after_s:
            found = (pulled.start_by_s for entry in self._queue for pulled, _ in entry.waiting())
            self._earliest_s = min((one for one in found if one >= after_s), default=float("inf"))
        return self._earliest_s

    def drop_unwanted(self) -> None:
        """Takes out of the queue what nobody waits for any more."""
        self._queue.discard_unwanted(self._is_wanted)

    def take(self, processes: int) -> list[QueuedItem]:
        """The next batch for one of `processes`; empty where nothing waits, or nobody waits for what did."""
        self._earliest_s = float("-inf")  # may be in the batch: looked for when it is asked for
        return self._queue.take(processes, self._is_wanted)

    def _is_wanted(self, entry: QueuedItem) -> bool:
        """Whether somebody still waits for `entry`; those who do not are told so."""
        now_s = time.time()
        for pulled, item in entry.waiting():
            if pulled.is_unwanted:
                self._completion.settle(pulled, pulled.unwanted(item.index, begun=False))
            elif pulled.start_by_s <= now_s:
                self._completion.settle(pulled, pulled.expired(item.index))
        entry.askers = [(h, i) for h, i in entry.waiting() if not h.is_unwanted and h.start_by_s > now_s]
        if not entry.askers:
            self._forget(entry)
        return bool(entry.askers)

    def cancel(self, record: str) -> None:
        """Drops the job of `record`, wherever it is; items that run now end with their batch."""
        for pulled in self._completion.in_hand(record):
            pulled.is_canceled = True
            self._drop(pulled)

    def _expire(self, pulled: PulledJob) -> None:
        """Does the same at the job's deadline."""
        pulled.is_late = True
        self._drop(pulled)
        self._on_unwanted()

    def _drop(self, pulled: PulledJob) -> None:
        """Ends what need not be waited for: all but what runs in a batch that ends with the step it is at."""
        running = self._queue.running
        begun, stopping = _items_in(running, pulled), _items_in(filter(self.is_unwanted, running), pulled)
        for item in pulled.items:
            if item.index not in stopping:
                self._completion.settle(pulled, pulled.unwanted(item.index, begun=item.index in begun))
        # Ended jobs make room for others: what waited for them must not stay and grow in number.
        self.drop_unwanted()

    def _pass_start(self, pulled: PulledJob) -> None:
        """Ends what no model has begun, at the job's queue limit."""
        begun = _items_in(self._queue.running, pulled)
        for item in pulled.items:
            if item.index not in begun and item.index not in pulled.outcomes:
                self._completion.settle(pulled, pulled.expired(item.index))
        self.drop_unwanted()

    def is_unwanted(self, batch: Sequence[QueuedItem]) -> bool:
        """Whether nobody waits for anything of a batch."""
        return all(pulled.is_unwanted for entry in batch for pulled, _ in entry.askers)

    async def recheck(self) -> None:
        """Looks which of the jobs in hand were canceled while nobody could tell."""
        for pulled in self._completion.in_hand():
            with contextlib.suppress(Unavailable):
                found = await self._records.read(pulled.record)
                if found is not None and found.state == "canceled":
                    self.cancel(pulled.record)

    def tell_progress(self, batch: Sequence[QueuedItem], step: int, steps: int) -> None:
        """Notes in the records of predictions how far their batch is, not more often than anyone looks."""
        now_s = time.monotonic()
        if now_s - self._progress_told_s < PROGRESS_EVERY_S:
            return
        self._progress_told_s = now_s
        for pulled in {pulled for entry in batch for pulled, _ in entry.askers if pulled.envelope.prediction}:
            self._completion.spawn(self._records.progress(pulled.record, step, steps))
            self._completion.tell_webhook(pulled, "logs", step)

    def settle(self, batch: list[QueuedItem], done: BatchDone) -> None:
        """Puts what came of a batch on the items that asked for it."""
        self._queue.batch_ended(batch)
        self._queue.adjust_budget(was_short=done.out_of_memory)
        for entry, result in zip(batch, done.results, strict=True):
            self._waits.observe(max(0.0, done.started_at_s - entry.queued_at_s))
            if isinstance(result, Canceled) and (late := [one for one in entry.waiting() if not one[0].is_unwanted]):
                # They joined it when it was on its way out.
                entry.askers = [one for one in entry.askers if one[0].is_unwanted]
                self._queue.add(QueuedItem(entry.prepared, None, time.time(), late))
                self._on_queued()
            entry.computed = (result, done, len(batch))
            for pulled, outcome in list(entry.outcomes()):
                self._completion.settle(pulled, outcome)
            if entry.is_kept:
                asyncio.get_running_loop().call_later(LINGER_S, self._forget, entry)
            else:
                self._forget(entry)

    def survive(self, batch: list[QueuedItem], reason: str) -> None:
        """Takes back a batch over which its model process died: it is tried again, but not for ever."""
        for entry in self._queue.batch_died(batch):
            self._forget(entry)
            died = f"{entry.deaths} model processes died over this item, {entry.deaths_alone} of them with it alone"
            error = ModelFailed(f"{died}; the last: {reason}")
            for pulled, item in entry.waiting():
                pulled.dead_reason = error.message
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))
        self._on_queued()

    def _forget(self, entry: QueuedItem) -> None:
        """Identical items are computed anew from now on, or found in the cache."""
        if entry.cache_key and self._by_cache_key.get(entry.cache_key) is entry:
            del self._by_cache_key[entry.cache_key]


def _items_in(batches: Iterable[Sequence[QueuedItem]], pulled: PulledJob) -> set[int]:
    """The items of a job that `batches` compute, by index."""
    entries = (entry for batch in batches for entry in batch)
    return {item.index for entry in entries for asker, item in entry.askers if asker is pulled}
