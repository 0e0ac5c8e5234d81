"""The worker's I/O process: pulls the jobs of its models and feeds batches to the model processes.

Guarantees used: Pub/Sub delivers a job at least once and keeps it until its ack. The transport
extends the lease of every held message, and flow control bounds how many there are. The models
run in processes of their own (workers/runtime/pool.py), so a busy or broken model interpreter
delays no lease and no reply.

In call order: `run` opens the subscriptions of each model and starts its consumer
(workers/jobs/consumer.py). `_serve`, one task per model process, asks
ModelScheduler which model is next, takes its next batch and runs it. `_listen` drops jobs that are
canceled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from shared.broker.transport import (
    Subscriber,
    batch_subscription_id,
    workers_subscription_id,
)
from shared.errors import ModelFailed, PenstockError
from shared.models.service_rate import ACK_LINGER_S, held_messages
from shared.stores.records import Records
from shared.tenants.plan import PRIORITIES
from workers import metrics
from workers.jobs.consumer import JobConsumer
from workers.jobs.step_run import StepRun
from workers.metrics import BusyRatio, ProcessTimes
from workers.models.client import ModelProcessDied, has_lost_gpu
from workers.models.reports import BatchResult, ResidencyReport
from workers.runtime.pool import ProcessPool
from workers.runtime.pooled_process import PooledProcess
from workers.scheduling.flow_control import FlowControl
from workers.scheduling.job import QueuedItem
from workers.scheduling.model_scheduler import Idle, ModelScheduler

log = logging.getLogger(__name__)

BATCH_TIMEOUT_S = 300.0
"""A batch that takes longer is stuck. Its process is killed, and its jobs are retried."""
FAILED_BATCHES_MAX = 20
"""After this many failed batches in a row the worker itself is broken, and exits."""
LOST_GPUS_MAX = 2
"""After so many model processes in a row that lost their GPU the worker exits.

That is before an item is given up (workers/scheduling/priority_queue.py), so another worker
computes all that this one held. The first one may have been the fault of what it computed.
"""


class Worker:
    """Serves one or several models until it must stop. The caller opens and closes its parts.

    Args:
        consumers: one for each model, in the order of the pool.
        subscriber: where jobs are pulled from.
        ack_deadline_s: the length of leases, and of their extensions.
        max_outstanding_bytes: of the held messages in each priority, divided evenly among the
            models.
        drain_s: how long held jobs may take to finish after the stop.
        times: adds up what the model processes do.
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
        self._flow_controls: dict[JobConsumer, list[FlowControl]] = {}
        self._queued = asyncio.Event()
        self._running: dict[PooledProcess, list[QueuedItem]] = {}
        self._runs: set[StepRun] = set()
        self._failed_batches = 0
        self._lost_gpus = 0

    @property
    def is_ready(self) -> bool:
        """True if this worker would get jobs that are published now, for each of its models."""
        return all(consumer.is_connected for consumer in self._consumers)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then finishes the held jobs within the drain limit.

        Raises:
            PenstockError: a subscription is lost for good, or batch after batch fails.
        """
        self._busy.publish()
        self._times.opened(len(self._pool.processes))
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
                    task.result()  # they end only with an error
                await self._drain()
            finally:
                await _cancel(tasks)
                for consumer in self._consumers:
                    await consumer.hand_back_all()

    async def _start(
        self, stack: AsyncExitStack, consumer: JobConsumer
    ) -> list[asyncio.Task[None]]:
        subscriptions = []
        processes = len(self._pool.processes)
        held = held_messages(
            consumer.model.batch.max_items, processes, in_steps=consumer.computes_steps
        )
        for subscription_id in (
            workers_subscription_id(consumer.model.name),
            batch_subscription_id(consumer.model.name),
        ):
            subscribing = self._subscriber.subscribe(
                subscription_id,
                max_messages=held,
                # Half for what is held near the broker, and half for the distance.
                max_bytes=max(1, self._max_outstanding_bytes // len(self._consumers) // 2),
                ack_deadline_s=self._ack_deadline_s,
                ack_linger_s=ACK_LINGER_S,
            )
            subscriptions.append(await stack.enter_async_context(subscribing))
        completion = consumer.registry.completion
        self._flow_controls[consumer] = [
            FlowControl(
                consumer.model.name, priority, one, held, processes, completion, ACK_LINGER_S
            )
            for priority, one in zip(PRIORITIES, subscriptions, strict=True)
        ]
        tasks = consumer.start(subscriptions, self._has_queued, self._stop_unwanted)
        if consumer.canary is not None:
            running = consumer.canary.run(self._subscriber, lambda: consumer.is_connected)
            tasks.append(asyncio.create_task(running))
        return tasks

    def _has_queued(self) -> None:
        self._queued.set()
        for run in self._runs:
            run.admit_waiting()
        self._count_waiting()

    async def _drain(self) -> None:
        """Stops pulling, and finishes the held jobs within the limit."""
        try:
            async with asyncio.timeout(self._drain_s):
                await asyncio.gather(*(consumer.drain() for consumer in self._consumers))
        except TimeoutError:
            log.warning("drain limit reached", extra={"limit_s": self._drain_s})

    async def _serve(self, process_index: int, process: PooledProcess) -> None:
        """Feeds batches to one model process, which has this index in the pool."""
        free_since_s, seen = time.time(), None
        while True:
            self._times.enter(process_index, "loading")
            await process.ready()
            self._times.enter(process_index, "idle")
            if process.residency is not seen:
                seen = process.residency
                self._update_residency(seen)
            choice = self._choose(process, free_since_s)
            if isinstance(choice, Idle):
                await self._wait(choice)
            elif self._consumers[choice].computes_steps:
                await self._run_steps(process_index, process, choice)
                free_since_s = time.time()
            elif batch := self._queues[choice].take(len(self._pool.processes)):
                self._scheduler.batch_started(choice, time.time())
                self._count_waiting()
                self._times.enter(process_index, "busy")
                await self._run_batch(process, choice, batch)
                free_since_s = time.time()

    def _update_residency(self, residency: ResidencyReport) -> None:
        self._times.loaded(residency)
        self._scheduler.update_load_times(residency.load_s)
        for number, consumer in enumerate(self._consumers):
            holders = sum(number in process.residency.resident for process in self._pool.processes)
            metrics.RESIDENT.labels(consumer.model.name).set(holders)

    def _choose(self, process: PooledProcess, free_since_s: float) -> int | Idle:
        """The model to run next. Checks before a switch that its items are still wanted."""
        while True:
            resident = process.residency.resident
            choice = self._scheduler.choose(resident, free_since_s, self._queues, time.time())
            if isinstance(choice, Idle) or choice in resident:
                return choice
            self._queues[choice].discard_unwanted()
            if self._queues[choice].waiting:
                return choice

    async def _wait(self, idle: Idle) -> None:
        """Waits until an item is queued, or until the given time."""
        self._queued.clear()
        left_s = None if idle.until_s is None else max(0.0, idle.until_s - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._queued.wait()

    def _count_waiting(self) -> None:
        metrics.WAITING.set(sum(queue.waiting for queue in self._queues))

    async def _run_batch(
        self, process: PooledProcess, number: int, batch: list[QueuedItem]
    ) -> None:
        consumer = self._consumers[number]
        self._running[process] = batch
        busy = self._busy.start(
            "batch" if queued.may_wait_for_hours else "interactive" for queued in batch
        )
        try:
            prepared = [entry.prepared for entry in batch]
            async with consumer.noted(batch):
                done = await process.run(
                    prepared,
                    timeout_s=BATCH_TIMEOUT_S,
                    model=number,
                    on_step=partial(consumer.batches.report_progress, batch, process.watch),
                    on_previews=partial(consumer.batches.pass_on_previews, batch),
                )
        except ModelProcessDied as error:
            consumer.batches.retry(batch, error.message)
            self._count_death(consumer, len(batch), error.message)
            return
        finally:
            del self._running[process]
            self._busy.end(busy)
        self._scheduler.batch_finished(done.finished_at_s - done.started_at_s)
        self._times.batch_ended(done)
        took_s, now_s = done.finished_at_s - done.started_at_s, time.monotonic()
        for flow_control in self._flow_controls[consumer]:
            flow_control.batch_ended(batch, took_s, now_s)
        consumer.batches.distribute(batch, done)
        self._count_failed(has_failed=done.has_failed)

    async def _run_steps(self, process_index: int, process: PooledProcess, number: int) -> None:
        """Runs a continuous batch until no item is left, or another model is due."""
        consumer, processes = self._consumers[number], len(self._pool.processes)
        batch = consumer.queue.admit((), processes)
        if not batch:
            return
        began_s = time.time()
        self._scheduler.batch_started(number, began_s)
        self._count_waiting()
        self._times.enter(process_index, "busy")

        def on_item(done: BatchResult) -> None:
            self._times.batch_ended(done)
            self._count_failed(has_failed=done.has_failed)

        def may_admit() -> bool:
            return self._choose(process, began_s) == number

        parts = consumer.queue, consumer.batches, consumer.tokens, consumer.model.work.max_s
        run = StepRun(process, number, *parts, processes, may_admit, on_item, self._busy)
        self._runs.add(run)
        try:
            async with consumer.noted(batch):
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
                raise ModelFailed("its GPU fails; another worker may do better")

    def _count_failed(self, *, has_failed: bool) -> None:
        self._failed_batches = self._failed_batches + 1 if has_failed else 0
        self._lost_gpus = self._lost_gpus if has_failed else 0
        if self._failed_batches >= FAILED_BATCHES_MAX:
            raise ModelFailed(
                f"{self._failed_batches} batches in a row failed; another worker may do better"
            )

    async def _listen(self) -> None:
        """Drops canceled jobs, and stops batches whose callers are all gone."""
        async for record in self._records.canceled():
            for consumer in self._consumers:
                await consumer.cancel(record)
            self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        for process, batch in self._running.items():
            if all(queued.is_unwanted for queued in batch):
                process.cancel()
        for run in self._runs:
            run.drop_unwanted()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await task
