"""The worker's I/O process: pulls jobs, answers from the cache what it can, and feeds batches to the model processes.

Guarantees used: Pub/Sub delivers a job at least once and keeps it until its ack; the transport keeps the lease of every
message in hand, and flow control bounds how many those are. The model runs in processes of its own
(workers/model_pool.py), so what it does to its interpreter takes no lease and no reply with it.

In call order: `run` opens the subscription → `_pull` → `_admit` decodes, drops the expired, asks the cache, prepares
and queues → `_serve`, one for each model process, takes a batch and runs it. Every outcome goes to workers/finisher.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.cache import Level, ResultCache
from shared.catalogue import Model
from shared.errors import PenstockError, UndecodableMessage
from shared.messages import Blob, ImageInput, Item, Result, decode_job, failure
from shared.names import workers_subscription_id
from shared.objects import ObjectStore
from shared.transport import Message, Subscriber, Subscription
from workers import metrics
from workers.batching import BatchQueue
from workers.finisher import Finisher
from workers.job import Entry, JobInHand
from workers.model_pool import ModelPool, ModelProcess, ModelProcessDied
from workers.models.base import Prepared, Preparer

log = logging.getLogger(__name__)

INTAKE_MESSAGES = 256
"""Messages admitted in one go: one cache look-up and one tokenizer call for all of them."""
ACK_LINGER_S = 0.02
"""Acks wait so long for company: they are on nobody's path, and alone each costs as much as a publish."""
LINGER_S = 1.0
"""How long a computed item may still be joined: until its result has surely reached the cache."""
SOURCE_LIMIT_BYTES = 32 * 1024 * 1024
"""The largest source image that is fetched from the object store."""
BATCH_TIMEOUT_S = 300.0
"""A batch that takes longer than this hangs; its process is killed and its jobs go back."""


class Worker:
    """Serves one model: `run` until told to stop. Its parts are opened and closed by the caller."""

    def __init__(
        self,
        model: Model,
        subscriber: Subscriber,
        pool: ModelPool,
        preparer: Preparer,
        cache: ResultCache,
        objects: ObjectStore,
        finisher: Finisher,
        *,
        ack_deadline_s: int = 20,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        drain_s: float = 20.0,
    ) -> None:
        self._model = model
        self._subscriber = subscriber
        self._pool = pool
        self._preparer = preparer
        self._cache = cache
        self._objects = objects
        self._finisher = finisher
        self._ack_deadline_s = ack_deadline_s
        self._max_outstanding_bytes = max_outstanding_bytes
        self._drain_s = drain_s
        self._queue: BatchQueue[Entry] = BatchQueue(model.budget, model.batch.max_items)
        self._queued = asyncio.Event()
        self._by_cache_key: dict[str, Entry] = {}
        self._subscription: Subscription | None = None

    @property
    def is_ready(self) -> bool:
        """Whether jobs that are published now would reach this worker."""
        return self._subscription is not None and self._subscription.is_connected

    async def run(self, stop: asyncio.Event) -> None:
        """Pulls and serves until `stop` is set, then finishes what is in hand within the drain limit.

        Raises:
            PenstockError: the subscription is lost for good.
        """
        subscribing = self._subscriber.subscribe(
            workers_subscription_id(self._model.name),
            # Two batches for each process: one that runs, and one to choose the next from.
            max_messages=2 * self._model.batch.max_items * len(self._pool.processes),
            max_bytes=self._max_outstanding_bytes,
            ack_deadline_s=self._ack_deadline_s,
            ack_linger_s=ACK_LINGER_S,
        )
        async with subscribing as subscription:
            self._subscription = subscription
            intake: asyncio.Queue[Message] = asyncio.Queue(INTAKE_MESSAGES)
            pulling = asyncio.create_task(self._pull(subscription, intake))
            admitting = asyncio.create_task(self._admit_all(intake, subscription))
            serving = [asyncio.create_task(self._serve(process)) for process in self._pool.processes]
            stopping = asyncio.create_task(stop.wait())
            tasks = [pulling, admitting, *serving, stopping]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()  # none of them ends by itself but by an error
                await self._drain(subscription, pulling, intake)
            finally:
                self._subscription = None
                await _cancel(tasks)
                self._finisher.hand_back_all()

    async def _drain(
        self, subscription: Subscription, pulling: asyncio.Task[None], intake: asyncio.Queue[Message]
    ) -> None:
        """Takes no more, and finishes what is in hand within the limit."""
        try:
            async with asyncio.timeout(self._drain_s):
                await subscription.stop()
                await pulling
                await intake.join()
                await self._finisher.wait_idle()
        except TimeoutError:
            log.warning("drain limit reached", extra={"limit_s": self._drain_s})

    async def _pull(self, subscription: Subscription, intake: asyncio.Queue[Message]) -> None:
        async for message in subscription:
            await intake.put(message)

    async def _admit_all(self, intake: asyncio.Queue[Message], subscription: Subscription) -> None:
        """Admits together what arrived while the last ones were admitted."""
        while True:
            messages = [await intake.get()]
            while not intake.empty():
                messages.append(intake.get_nowait())
            await self._admit(messages, subscription)
            for _ in messages:
                intake.task_done()

    async def _admit(self, messages: Sequence[Message], subscription: Subscription) -> None:
        """Decodes, drops what came too late, answers from the cache, and queues the rest."""
        taken = [self._take_in_hand(message, subscription) for message in messages]
        hands = [hand for hand in taken if hand is not None]
        found = await self._look_up(hands)
        missing = []
        for hand in hands:
            for item in hand.items:
                if hand.reads_cache and item.cache_key in found:
                    result, level = found[item.cache_key]
                    self._finisher.settle(hand, hand.hit(item, result, level))
                elif not self._join(hand, item):
                    missing.append((hand, item))
        if missing:
            await self._enqueue(missing)

    async def _look_up(self, hands: Sequence[JobInHand]) -> dict[str, tuple[Result, Level]]:
        """What the cache has. Redis is not asked again for what the API asked it for just before."""
        keys, doubtful = list[str](), list[str]()
        for hand in hands:
            if hand.reads_cache:
                wanted = [item.cache_key for item in hand.items if item.cache_key is not None]
                (keys if hand.is_fresh else doubtful).extend(wanted)
        found = self._cache.in_memory(keys)
        return found | await self._cache.get_many(doubtful) if doubtful else found

    def _take_in_hand(self, message: Message, subscription: Subscription) -> JobInHand | None:
        """The job of `message`, or None when its end is clear already: it is none of ours, or too late."""
        now_s = time.time()
        try:
            job = decode_job(message.data, message.attributes)
            if job.envelope.model != self._model.name:
                raise UndecodableMessage(f"the job is for model {job.envelope.model!r}", field="model")
        except UndecodableMessage as error:
            self._finisher.refuse(message, error, subscription)
            return None
        job.envelope.attempt = max(job.envelope.attempt, message.delivery_attempt)
        hand = JobInHand(job, message, subscription, now_s)
        self._finisher.take(hand)
        if job.envelope.deadline_s > now_s:
            return hand
        for item in hand.items:
            self._finisher.settle(hand, hand.expired(item))
        return None

    def _join(self, hand: JobInHand, item: Item) -> bool:
        """Lets `item` share the result of an identical one that is queued, runs, or ran just now."""
        entry = self._by_cache_key.get(item.cache_key) if item.cache_key and hand.reads_cache else None
        if entry is None:
            return False
        if entry.computed is None:
            entry.askers.append((hand, item))
        else:
            self._finisher.settle(hand, entry.joined(hand, item))
        return True

    async def _enqueue(self, missing: list[tuple[JobInHand, Item]]) -> None:
        """Prepares inputs, all in one call, and queues them; what the model can't take fails alone."""
        items: Sequence[Item | PenstockError] = [item for _, item in missing]
        if any(isinstance(item.input, ImageInput) for _, item in missing):
            items = await asyncio.gather(*(self._with_source(item) for _, item in missing))
        if self._model.task == "image":  # decoding takes milliseconds, so off the loop that keeps the leases
            prepared = await asyncio.to_thread(self._prepare, items)
        else:
            prepared = self._prepare(items)
        for (hand, item), ready in zip(missing, prepared, strict=True):
            if isinstance(ready, PenstockError):
                self._finisher.settle(hand, failure(item.index, ready, hand.receipt()))
            elif not self._join(hand, item):
                entry = Entry(ready, item.cache_key, time.time(), [(hand, item)])
                if item.cache_key:
                    self._by_cache_key.setdefault(item.cache_key, entry)
                self._queue.add(entry)
        self._queued.set()
        metrics.WAITING.set(len(self._queue))

    async def _with_source(self, item: Item) -> Item | PenstockError:
        """`item` with its source image inline."""
        given = item.input
        if not isinstance(given, ImageInput) or given.image is None or given.image.object_key is None:
            return item
        try:
            data = await self._objects.get(given.image.object_key, SOURCE_LIMIT_BYTES)
        except PenstockError as error:
            return error
        image = Blob(given.image.media_type, data=data)
        return msgspec.structs.replace(item, input=msgspec.structs.replace(given, image=image))

    def _prepare(self, items: Sequence[Item | PenstockError]) -> list[Prepared | PenstockError]:
        prepared = iter(self._preparer.prepare([item.input for item in items if isinstance(item, Item)]))
        return [next(prepared) if isinstance(item, Item) else item for item in items]

    async def _serve(self, process: ModelProcess) -> None:
        """Feeds one model process for as long as the worker lives."""
        while True:
            await process.ready()
            while not (batch := self._queue.take()):
                self._queued.clear()
                await self._queued.wait()
            metrics.WAITING.set(len(self._queue))
            if wanted := [entry for entry in batch if self._is_wanted(entry)]:
                await self._run_batch(process, wanted)

    def _is_wanted(self, entry: Entry) -> bool:
        """Whether somebody still waits for `entry`; those whose deadline passed are told so."""
        now_s = time.time()
        for hand, item in entry.waiting():
            if hand.envelope.deadline_s <= now_s:
                self._finisher.settle(hand, hand.expired(item))
        entry.askers = [(h, i) for h, i in entry.waiting() if h.envelope.deadline_s > now_s]
        if not entry.askers:
            self._forget(entry)
        return bool(entry.askers)

    async def _run_batch(self, process: ModelProcess, batch: list[Entry]) -> None:
        try:
            done = await process.run([entry.prepared for entry in batch], timeout_s=BATCH_TIMEOUT_S)
        except ModelProcessDied as error:
            log.error("model process died", extra={"reason": error.message, "batch_size": len(batch)})
            metrics.MODEL_PROCESS_DEATHS.inc()
            for entry in batch:
                self._forget(entry)
                for hand, _ in entry.waiting():
                    self._finisher.hand_back(hand)
            return
        metrics.observe_batch(done)
        for entry, result in zip(batch, done.results, strict=True):
            entry.computed = (result, done, len(batch))
            for hand, outcome in list(entry.outcomes(self._model)):
                self._finisher.settle(hand, outcome)
            if entry.is_kept:
                asyncio.get_running_loop().call_later(LINGER_S, self._forget, entry)
            else:
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Identical items are computed anew from now on, or found in the cache."""
        if entry.cache_key and self._by_cache_key.get(entry.cache_key) is entry:
            del self._by_cache_key[entry.cache_key]


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await task
