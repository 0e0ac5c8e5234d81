"""The worker's I/O process: pulls its models' jobs and feeds batches to the model processes.

Guarantees it relies on: Pub/Sub delivers a job at least once and keeps it until it is acked. The
transport extends the lease of every message held, and flow control limits how many messages are
held. The models run in separate processes (workers/runtime/pool.py), so a busy or broken model
interpreter doesn't delay leases or replies.

In call order: `run` opens each model's subscriptions and starts its consumer
(workers/jobs/consumer.py). `_serve`, which runs as one task per model process, asks ModelScheduler
which model is next and takes that model's next batch. A device that computes asynchronously gets
the next full batch before the current one has finished, and before the previous batch's results are
distributed (decision 143). `_listen` drops canceled jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

from shared.broker.transport import (
    Subscriber,
    Subscription,
    batch_subscription_id,
    workers_subscription_id,
)
from shared.errors import ModelFailed
from shared.models.service_rate import ACK_LINGER_S, count_held_messages
from shared.stores.records import Records
from shared.tenants.plan import PRIORITIES
from workers import metrics
from workers.jobs.batch_run import BatchRun
from workers.jobs.consumer import JobConsumer
from workers.jobs.step_run import StepRun
from workers.metrics import BusyRatio, ProcessTimes
from workers.models.client import has_lost_gpu
from workers.models.reports import BatchResult, ResidencyReport
from workers.runtime.pool import ProcessPool
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.protocol import IN_FLIGHT
from workers.scheduling.flow_control import FlowControl
from workers.scheduling.model_scheduler import Idle, ModelScheduler
from workers.start_report import StartReport

log = logging.getLogger(__name__)

FAILED_BATCHES_MAX = 20
"""After this many consecutive failed batches, the worker is considered broken and exits."""
LOST_GPUS_MAX = 2
"""The worker exits after this many model processes in a row have lost their GPU.

This happens before any item is given up on (workers/scheduling/priority_queue.py), so another
worker computes everything held by this one. The first crash may have been caused by whichever item
was being computed.
"""


class Worker:
    """Serves one or more models until stopped. The caller opens and closes its parts.

    Args:
        consumers: one for each model, in the pool's order.
        subscriber: the transport from which jobs are pulled.
        ack_deadline_s: duration, in seconds, of each lease and each extension.
        max_outstanding_bytes: maximum total size of the messages held at each priority, divided
            evenly among the models.
        drain_s: how long the jobs held may take to finish after `stop` is set.
        times: adds up how the model processes spend their time.
        start: reports how long the worker took to start, including its first batch.
    """

    def __init__(
        self,
        consumers: Sequence[JobConsumer],
        subscriber: Subscriber,
        records: Records,
        pool: ProcessPool,
        *,
        ack_deadline_s: int = 10,
        max_outstanding_bytes: int = 64 * 1024 * 1024,
        drain_s: float = 20.0,
        times: ProcessTimes | None = None,
        start: StartReport | None = None,
    ) -> None:
        self._consumers = consumers
        self._queues = [consumer.queue for consumer in consumers]
        self._subscriber = subscriber
        self._records = records
        self._pool = pool
        self._ack_deadline_s = ack_deadline_s
        self._max_outstanding_bytes = max_outstanding_bytes
        self._drain_s = drain_s
        self._scheduler = ModelScheduler(len(consumers), len(pool.processes))
        self._busy = BusyRatio(len(pool.processes))
        self._times = times or ProcessTimes()
        self._start_report = start
        self._flow_controls: dict[JobConsumer, list[FlowControl]] = {}
        self._wake_event = asyncio.Event()
        """Set when an item is queued or an overlapping batch finishes."""
        self._in_flight: list[deque[BatchRun]] = [deque() for _ in pool.processes]
        """Each process's batches, oldest first."""
        self._idle: set[int] = set()
        """Processes that are waiting for an item."""
        self._runs: set[StepRun] = set()
        self._failed_batches = 0
        self._lost_gpus = 0

    @property
    def is_ready(self) -> bool:
        """True if this worker would receive jobs published now for each of its models."""
        return all(consumer.is_connected for consumer in self._consumers)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then finishes the jobs it holds within the drain limit.

        Raises:
            PenstockError: a subscription is lost permanently, or too many batches fail in a row.
        """
        self._busy.publish()
        self._times.start(len(self._pool.processes))
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            try:
                for consumer in self._consumers:
                    tasks += await self._start(stack, consumer)
                tasks += [
                    asyncio.create_task(self._serve(process_index, process))
                    for process_index, process in enumerate(self._pool.processes)
                ]
                tasks.append(asyncio.create_task(self._listen()))
                stopping = asyncio.create_task(stop.wait())
                tasks.append(stopping)
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()  # these end only because of an error
                await self._drain()
            finally:
                for task in tasks:
                    task.cancel()
                try:
                    await asyncio.gather(*tasks, return_exceptions=True)
                finally:
                    for consumer in self._consumers:
                        await consumer.hand_back_all()

    async def _start(
        self, stack: AsyncExitStack, consumer: JobConsumer
    ) -> list[asyncio.Task[None]]:
        processes = len(self._pool.processes)
        number = self._consumers.index(consumer)
        overlaps = any(process.overlaps(number) for process in self._pool.processes)
        held = count_held_messages(
            consumer.model.batch.max_items,
            processes,
            in_steps=consumer.computes_steps,
            in_flight=IN_FLIGHT if overlaps else 1,
        )
        subscriptions = await self._subscribe(stack, consumer.model.name, held)
        completion = consumer.registry.completion
        self._flow_controls[consumer] = [
            FlowControl(
                consumer.model.name,
                priority,
                subscription,
                held,
                processes,
                completion,
                ACK_LINGER_S,
            )
            for priority, subscription in zip(PRIORITIES, subscriptions, strict=True)
        ]
        tasks = consumer.start(subscriptions, self._has_queued, self._stop_unwanted)
        if consumer.canary is not None:
            running = consumer.canary.run(self._subscriber, lambda: consumer.is_connected)
            tasks.append(asyncio.create_task(running))
        return tasks

    async def _subscribe(
        self, stack: AsyncExitStack, model: str, max_messages: int
    ) -> list[Subscription]:
        """Opens a model's subscriptions, in the order of PRIORITIES."""
        subscriptions = []
        for subscription_id in (workers_subscription_id(model), batch_subscription_id(model)):
            subscribing = self._subscriber.subscribe(
                subscription_id,
                max_messages=max_messages,
                # Half is for messages held near the broker, and the other half is for those in
                # transit.
                max_bytes=max(1, self._max_outstanding_bytes // len(self._consumers) // 2),
                ack_deadline_s=self._ack_deadline_s,
                ack_linger_s=ACK_LINGER_S,
            )
            subscriptions.append(await stack.enter_async_context(subscribing))
        return subscriptions

    def _has_queued(self) -> None:
        self._wake_event.set()
        for run in self._runs:
            run.admit_waiting()
        self._count_waiting()

    async def _drain(self) -> None:
        """Stops pulling, and finishes the jobs held within the limit."""
        try:
            async with asyncio.timeout(self._drain_s):
                await asyncio.gather(*(consumer.drain() for consumer in self._consumers))
        except TimeoutError:
            log.warning("drain limit reached", extra={"limit_s": self._drain_s})

    async def _serve(self, process_index: int, process: PooledProcess) -> None:
        """Feeds batches to the model process with this index in the pool."""
        try:
            await self._serve_until_canceled(process_index, process)
        finally:
            for run in self._in_flight[process_index]:
                await run.abandon()

    async def _serve_until_canceled(self, process_index: int, process: PooledProcess) -> None:
        free_since_s, seen = time.time(), None
        in_flight = self._in_flight[process_index]
        while True:
            if in_flight:
                await self._advance(process_index, process)
                free_since_s = time.time()
                continue
            self._times.enter(process_index, "loading")
            await process.ready()
            self._times.enter(process_index, "idle")
            if process.residency is not seen:
                seen = process.residency
                self._update_residency(seen)
            choice = self._choose(process, free_since_s)
            if isinstance(choice, Idle):
                self._idle.add(process_index)
                await self._wait(choice)
                self._idle.discard(process_index)
            elif self._consumers[choice].computes_steps:
                await self._run_steps(process_index, process, choice)
                free_since_s = time.time()
            else:
                await self._send(process_index, process, choice)

    async def _advance(self, process_index: int, process: PooledProcess) -> None:
        """Waits until the oldest batch has finished, then distributes its results.

        If the device computes asynchronously, the next batch is sent first.
        """
        in_flight = self._in_flight[process_index]
        oldest = in_flight[0]
        if process.overlaps(oldest.number) and not any(run.has_died for run in in_flight):
            behind = len(in_flight) - oldest.is_over
            if behind < IN_FLIGHT and self._may_send(process, oldest.number, is_free=not behind):
                await self._send(process_index, process, oldest.number)
            elif not oldest.is_over:
                self._wake_event.clear()
                await self._wake_event.wait()
                return
            if not oldest.is_over:
                return
        result = await oldest.finish()
        in_flight.popleft()
        if in_flight:
            in_flight[0].count_busy()
        if isinstance(result, BatchResult):
            self._end(oldest, result)
        else:
            self._end_died(oldest, result, in_flight)

    def _may_send(self, process: PooledProcess, number: int, *, is_free: bool) -> bool:
        """Returns whether a model's next batch may be sent before the previous one has finished.

        A batch that is queued behind another one must be full, because otherwise it could be formed
        later, when more items might have arrived. Idle processes have precedence.
        """
        queue = self._queues[number]
        if not queue.waiting or (not is_free and (self._idle or not queue.has_full_batch)):
            return False
        return self._choose(process, time.time()) == number

    async def _send(self, process_index: int, process: PooledProcess, number: int) -> None:
        """Takes a model's next batch and sends it."""
        batch = self._queues[number].take(len(self._pool.processes))
        if not batch:
            return
        self._scheduler.batch_started(number, time.time())
        self._count_waiting()
        self._times.enter(process_index, "busy")
        run = BatchRun(process, number, self._consumers[number], batch, self._busy)
        in_flight = self._in_flight[process_index]
        in_flight.append(run)
        if len(in_flight) == 1:
            run.count_busy()
        reason = await run.start(self._wake_event.set)
        if reason:
            in_flight.remove(run)
            self._end_died(run, reason, in_flight)

    def _update_residency(self, residency: ResidencyReport) -> None:
        self._times.count_loads(residency)
        self._scheduler.update_load_times(residency.load_s)
        for number, consumer in enumerate(self._consumers):
            holders = sum(number in process.resident for process in self._pool.processes)
            metrics.RESIDENT.labels(consumer.model.name).set(holders)

    def _choose(self, process: PooledProcess, free_since_s: float) -> int | Idle:
        """Returns the model to run next.

        Before switching, checks that the model's items are still wanted.
        """
        while True:
            resident = process.resident
            choice = self._scheduler.choose(resident, free_since_s, self._queues, time.time())
            if isinstance(choice, Idle) or choice in resident:
                return choice
            self._queues[choice].discard_unwanted()
            if self._queues[choice].waiting:
                return choice

    async def _wait(self, idle: Idle) -> None:
        """Waits until an item is queued, or until the given time."""
        self._wake_event.clear()
        left_s = None if idle.until_s is None else max(0.0, idle.until_s - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake_event.wait()

    def _count_waiting(self) -> None:
        metrics.WAITING.set(sum(queue.waiting for queue in self._queues))

    def _end(self, run: BatchRun, done: BatchResult) -> None:
        """Distributes a batch's results to its jobs."""
        took_s, now_s = done.finished_at_s - done.started_at_s, time.monotonic()
        self._scheduler.batch_finished(took_s)
        self._batch_ended(done)
        for flow_control in self._flow_controls[run.consumer]:
            flow_control.batch_ended(run.batch, took_s, now_s)
        run.consumer.batches.distribute(run.batch, done)
        self._count_failed(has_failed=done.has_failed)

    def _batch_ended(self, done: BatchResult) -> None:
        self._times.batch_ended(done)
        if self._start_report is not None:
            self._start_report.batch_ended(done)

    def _end_died(self, run: BatchRun, reason: str, others: Iterable[BatchRun]) -> None:
        """Requeues a batch whose process died. A process with several batches counts only once.

        Args:
            others: the other batches on the same process.
        """
        is_counted = run.died_with_others
        for other in others:
            run.died_with_others = other.died_with_others = True
        run.consumer.batches.retry(run.batch, reason, was_shared=run.died_with_others)
        if not is_counted:
            self._count_death(run.consumer, len(run.batch), reason)

    async def _run_steps(self, process_index: int, process: PooledProcess, number: int) -> None:
        """Runs a continuous batch until no items remain, or another model is due."""
        consumer, processes = self._consumers[number], len(self._pool.processes)
        batch = consumer.queue.admit((), processes)
        if not batch:
            return
        began_s = time.time()
        self._scheduler.batch_started(number, began_s)
        self._count_waiting()
        self._times.enter(process_index, "busy")

        def on_item(done: BatchResult) -> None:
            self._batch_ended(done)
            self._count_failed(has_failed=done.has_failed)

        def may_admit() -> bool:
            return self._choose(process, began_s) == number

        parts = consumer.queue, consumer.batches, consumer.tokens, consumer.model.work.max_s
        run = StepRun(process, number, *parts, processes, may_admit, on_item, self._busy)
        self._runs.add(run)
        try:
            async with consumer.note_suspects(batch):
                death = await run.run(batch)
        finally:
            self._runs.discard(run)
        if death:
            self._count_death(consumer, len(batch), death)
            return
        self._scheduler.batch_finished(time.time() - began_s)

    def _count_death(self, consumer: JobConsumer, size: int, reason: str) -> None:
        facts = {"reason": reason, "model": consumer.model.name, "batch_size": size}
        log.error("model process died", extra=facts)
        metrics.MODEL_PROCESS_DEATHS.inc()
        self._count_failed(has_failed=True)
        if has_lost_gpu(reason):
            metrics.LOST_GPUS.inc()
            self._lost_gpus += 1
            if self._lost_gpus >= LOST_GPUS_MAX:
                raise ModelFailed("its GPU is failing; another worker may succeed")

    def _count_failed(self, *, has_failed: bool) -> None:
        self._failed_batches = self._failed_batches + 1 if has_failed else 0
        self._lost_gpus = self._lost_gpus if has_failed else 0
        if self._failed_batches >= FAILED_BATCHES_MAX:
            raise ModelFailed(
                f"{self._failed_batches} batches in a row failed; another worker may succeed"
            )

    async def _listen(self) -> None:
        """Drops canceled jobs, and stops batches whose callers have all disconnected."""
        async for record in self._records.watch_cancellations():
            for consumer in self._consumers:
                await consumer.cancel(record)
            self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        for batch_run in chain.from_iterable(self._in_flight):
            batch_run.stop_unwanted()
        for run in self._runs:
            run.drop_unwanted()
