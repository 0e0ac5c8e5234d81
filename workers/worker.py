"""The worker's I/O process: pulls the jobs of its models and feeds batches to the model processes.

Guarantees used: Pub/Sub delivers a job at least once and keeps it until its ack. The transport
extends the lease of every held message, and flow control bounds how many there are. The models
run in processes of their own (workers/runtime/pool.py), so a busy or broken model interpreter
delays no lease and no reply.

In call order: `run` opens the subscriptions of each model and starts its consumer
(workers/jobs/consumer.py). `_serve`, one task per model process, asks
ModelScheduler which model is next, takes its next batch and runs it. `_listen` drops jobs that are
canceled.

A worker holds so many jobs that its model never waits for the broker. Two batches for each process,
one that runs and one that waits, are enough for a broker that is near. The permit of a job that
ends is used again only after its reply and its ack have traveled to the broker, and the next job
from there. So the worker also holds what its model computes in that time: its rate times the round
trip, the bandwidth-delay product of a network path. It is bounded: when a worker dies, what it held
waits for its leases to end, and is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from shared.broker.transport import (
    SmoothedDuration,
    Subscriber,
    Subscription,
    batch_subscription_id,
    workers_subscription_id,
)
from shared.errors import ModelFailed, PenstockError
from shared.models.service_rate import ACK_LINGER_S, HeldAhead, held_messages
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
from workers.scheduling.job import QueuedItem

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

SWITCH_SHARE = 0.06
"""The share of the time of all model processes.

Leaves room below a tenth for other costs of a switch, such as cold caches.
"""
URGENT_SHARE = 0.5
MIN_WAIT_S = 2.0
"""A floor for models that load quickly.

Several batches of one model in a row are fuller than alternating ones.
"""
LOAD_GUESS_S = 1.0
"""The estimate for a model that was not loaded yet."""
BATCH_FADE = 0.8
"""Each batch reduces the remembered duration of a longer one to this share."""


class FlowControl:
    """The number of jobs that one subscription holds.

    Args:
        held: the number near the broker: two batches for each process.
        completion: from the end of a job's last item to its ack.
        ack_linger_s: how long acks wait to be sent together.
    """

    def __init__(
        self,
        model: str,
        priority: str,
        subscription: Subscription,
        held: int,
        processes: int,
        completion: SmoothedDuration,
        ack_linger_s: float,
    ) -> None:
        self._round_trips = metrics.ROUND_TRIP.labels(model)
        self._held_max = metrics.HELD_MAX.labels(model, priority)
        self._subscription = subscription
        self._held = held
        self._processes = processes
        self._completion = completion
        self._ack_linger_s = ack_linger_s
        self._ahead = HeldAhead()

    def batch_ended(self, batch: Sequence[QueuedItem], took_s: float, now_s: float) -> None:
        """Measures the rate, and sets what is to be held.

        Args:
            now_s: monotonic seconds.
        """
        jobs = sum(
            1 / len(pulled.items)
            for queued in batch
            for pulled, _ in queued.waiters
            if pulled.subscription is self._subscription
        )
        rate = self._processes * jobs / max(took_s, 1e-3)
        gap_s = self._completion.most_s + self._ack_linger_s + self._subscription.round_trip.most_s
        held = self._held + self._ahead.batch_ended(rate, took_s, gap_s, now_s)
        self._subscription.hold(held)
        self._held_max.set(held)
        self._round_trips.set(self._subscription.round_trip.mean_s)


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
        self._running: dict[PooledProcess, tuple[JobConsumer, list[QueuedItem]]] = {}
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
        self._running[process] = (consumer, batch)
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

        run = StepRun(process, number, consumer, processes, may_admit, on_item, self._busy)
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
                if record is None:
                    await consumer.cancellation.recheck()
                else:
                    consumer.cancellation.cancel(record)
            self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        for process, (consumer, batch) in self._running.items():
            if consumer.cancellation.is_unwanted(batch):
                process.cancel()
        for run in self._runs:
            run.drop_unwanted()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await task


class QueueState(Protocol):
    """The properties of one model's queue that the scheduler needs."""

    @property
    def waiting(self) -> int:
        """The number of items that wait."""

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was queued, in unix seconds. Read only if items wait."""

    def earliest_deadline_s(self, after_s: float) -> float:
        """The earliest deadline from `after_s` on, in unix seconds. Infinite if there is none."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run before `until_s` (unix seconds, None: no limit), unless an item is queued."""

    until_s: float | None


class ModelScheduler:
    """Schedules `models` queues on `processes` model processes.

    Pure: no clock, no I/O. Times are unix seconds of one clock.

    Loading a model takes time, so a process stays with the models that it holds (the resident
    ones). It switches to another in three cases. `switch_wait_s` is the sum of all load times,
    divided by SWITCH_SHARE and the number of processes, so switches of the first case take at most
    that share of the time:

    1. Due: the model's oldest job has waited for `switch_wait_s`, and the model was not served for
       as long.
    2. Urgent: a job's deadline would pass otherwise, and can still be met. This makes a model due
       early, at most once per wait at URGENT_SHARE. Otherwise urgent callers could make a worker do
       nothing but switch.
    3. Worth it: no resident model has jobs, and the waiting time of the other jobs since then,
       added up, has reached the load time. From then on, waiting costs more than the switch.

    The bound: due models run first, in the order in which they became due, resident or not. A model
    that was served is due again only after a wait, so it is behind all that are due now. So once a
    model is due, every other model runs at most one batch before it. With n models, the first batch
    with a model's oldest job starts, counted from when that job was queued, after at most
    `switch_wait_s`, the batch that runs then, n - 1 loads and batches of other models, and its own
    load.
    """

    def __init__(self, models: int, processes: int) -> None:
        self._processes = processes
        self._served_s = [float("-inf")] * models
        self._load_s = [LOAD_GUESS_S] * models
        self._batch_s = 0.0

    @property
    def switch_wait_s(self) -> float:
        """The maximum time that a job waits until its model is due, in seconds."""
        return max(MIN_WAIT_S, self._wait_s(SWITCH_SHARE))

    def choose(
        self,
        resident: Collection[int],
        free_since_s: float,
        queues: Sequence[QueueState],
        now_s: float,
    ) -> int | Idle:
        """The model that a free process runs now, or how long the process stays idle.

        Args:
            free_since_s: when the process ended its last batch.
        """
        waiting = [model for model, queue in enumerate(queues) if queue.waiting]
        if len(waiting) == 1 and waiting[0] in resident:
            return waiting[0]
        due_s = {model: self._due_s(model, queues[model], now_s) for model in waiting}
        first = min(waiting, key=due_s.__getitem__, default=None)
        if first is None:
            return Idle(None)
        if due_s[first] <= now_s:
            return first
        if here := [model for model in waiting if model in resident]:
            return min(here, key=self._served_s.__getitem__)
        worth_s = {model: self._worth_s(model, queues[model], free_since_s) for model in waiting}
        best = min(waiting, key=worth_s.__getitem__)
        return best if worth_s[best] <= now_s else Idle(min(worth_s[best], due_s[first]))

    def _due_s(self, model: int, queue: QueueState, now_s: float) -> float:
        usual_s = max(queue.oldest_s, self._served_s[model]) + self.switch_wait_s
        deadline_s = queue.earliest_deadline_s(now_s + self._load_s[model])
        # Time for the batch that runs then, and for the job's own.
        urgent_s = deadline_s - self._load_s[model] - 2 * self._batch_s
        allowed_s = self._served_s[model] + max(MIN_WAIT_S, self._wait_s(URGENT_SHARE))
        return min(usual_s, max(urgent_s, allowed_s))

    def _worth_s(self, model: int, queue: QueueState, free_since_s: float) -> float:
        """When it is worth loading the model in an idle process."""
        return max(queue.oldest_s, free_since_s) + self._load_s[model] / queue.waiting

    def _wait_s(self, share: float) -> float:
        """The wait between batches of a model at which all loads take `share` of the time."""
        return sum(self._load_s) / (share * self._processes)

    def batch_started(self, model: int, now_s: float) -> None:
        """Records that a process takes a batch of `model`."""
        self._served_s[model] = now_s

    def batch_finished(self, batch_s: float) -> None:
        self._batch_s = max(batch_s, BATCH_FADE * self._batch_s)

    def update_load_times(self, load_s: Mapping[int, float]) -> None:
        """Sets how long the last load of each of these models took."""
        for model, seconds in load_s.items():
            self._load_s[model] = seconds
