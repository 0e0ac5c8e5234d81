"""A model's service: its subscriptions, and the jobs that workers in all regions pull from them.

A whole batch consists of the requests that are waiting when the model becomes idle on a worker. In
a batch of steps (continuous batching, decision 62), all steps between two changes take the same
time, so the only events are changes: an item is admitted, its prompt has been read, or it has
finished. Changes do not wait for a step to end. An item is admitted immediately, and a late item
leaves at the next change.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import simpy

from penstock_planning.item_load import batch_items
from penstock_planning.simulation.api_site import ApiSite, SimulatedJob
from penstock_planning.simulation.model_load import ModelLoad
from penstock_planning.simulation.recorder import ModelRecord, RequestEnd
from penstock_planning.simulation.scenario import ScenarioBroker
from penstock_planning.simulation.worker import (
    Inside,
    RunningBatch,
    SimulatedWorker,
    Steps,
)
from shared.models.catalog import Model
from shared.models.service_rate import StepTime, count_held_messages, refill_s

INTERACTIVE, BATCH = 0, 1
BATCH_PRIORITY_EVERY = 16
"""Every 16th batch starts with `batch` items (workers/scheduling/priority_queue.py)."""

OnEnded = Callable[[SimulatedWorker, list[SimulatedJob], float], None]
"""Called with jobs that a worker has finished, and the model time they took, in seconds."""

BATCH_SLOTS_SHARE = 1 / 4
"""Share of a batch for `batch` priority, as in workers/scheduling/priority_queue.py."""
SHARED_WEIGHTS_SHARE = 0.5
"""The value in workers/runtime/execution.py."""
NEARLY = 1e-9
"""Steps or seconds below this are treated as zero."""


class WholeBatches:
    """Batches for a model that computes whole batches.

    Args:
        load: seconds per batch.
        on_ended: called after each batch. It starts the next one.
    """

    def __init__(
        self,
        env: simpy.Environment,
        model: Model,
        load: ModelLoad,
        chance: random.Random,
        on_ended: OnEnded,
    ) -> None:
        self._env = env
        self._load = load
        self._chance = chance
        self._on_ended = on_ended
        self._most_items = batch_items(model, load)
        self._batches = 0

    def start(self, worker: SimulatedWorker) -> None:
        """Starts a batch in each idle process of a worker that holds jobs."""
        while len(worker.computing) < worker.processes:
            jobs = list(self._batch_of(worker))
            if not jobs:
                return
            self._begin(worker, jobs)

    def _begin(self, worker: SimulatedWorker, jobs: list[SimulatedJob]) -> None:
        items = sum(job.items for job in jobs)
        if not worker.running:
            worker.occupy(self._env.now)
        took_s = self._load.batch_s(items)
        if self._load.spread == "exponential":
            took_s = self._chance.expovariate(1 / took_s)
        # Running processes time-share the GPU. The number at the start of the batch is what counts.
        took_s *= worker.compute_slowdown(self._load.kept_when_sharing)
        in_batch_priority = 0
        for job in jobs:
            job.started_s = self._env.now
            in_batch_priority += job.items * job.is_batch_priority
        batch = RunningBatch(worker, jobs, took_s, in_batch_priority / items, self._env.now)
        worker.computing.append(batch)
        worker.running = [*worker.running, *jobs]
        worker.set_busy_of_batches(self._env.now)
        done = self._env.timeout(took_s, batch)
        assert done.callbacks is not None
        done.callbacks.append(self._finish)

    def _batch_of(self, worker: SimulatedWorker) -> Iterator[SimulatedJob]:
        """Yields waiting jobs, up to a full batch: interactive first, except every 16th time."""
        self._batches += 1
        priorities = (INTERACTIVE, BATCH)
        if worker.held[BATCH] and self._batches % BATCH_PRIORITY_EVERY == 0:
            priorities = (BATCH, INTERACTIVE)
        items = most_items = 0
        for priority in priorities:
            held = worker.held[priority]
            if not items:
                most_items = self._share(worker, priority)
            while _is_prepared(held, self._env.now) and (
                items == 0 or items + held[0].items <= most_items
            ):
                job = held.popleft()
                if job.has_ended:
                    worker.held_jobs[priority] -= 1
                    continue
                items += job.items
                yield job

    def _share(self, worker: SimulatedWorker, priority: int) -> int:
        """Returns the items per batch that starts with a priority.

        Same as `take` in workers/scheduling/priority_queue.py.

        A larger batch would delay items that another process could compute at the same time.
        """
        if worker.processes == 1:
            return self._most_items
        running = (
            job
            for batch in worker.computing
            if batch.jobs[0].is_batch_priority == (priority == BATCH)
            for job in batch.jobs
        )
        items = sum(job.items for job in itertools.chain(worker.held[priority], running))
        return min(self._most_items, -(-items // worker.processes))

    def _finish(self, event: simpy.Event) -> None:
        batch = cast(RunningBatch, event.value)
        worker = batch.worker
        if batch not in worker.computing:
            return  # it was interrupted
        worker.inference_s += batch.took_s
        worker.batches += 1
        self._end(batch)
        self._on_ended(worker, batch.jobs, batch.took_s)

    def _end(self, batch: RunningBatch) -> None:
        worker, now_s = batch.worker, self._env.now
        worker.count(batch, now_s)
        worker.computing.remove(batch)
        worker.running = [job for other in worker.computing for job in other.jobs]
        if worker.running:
            worker.set_busy_of_batches(now_s)
        else:
            worker.vacate(now_s)

    def stop(self, worker: SimulatedWorker) -> list[SimulatedJob]:
        """Stops a worker's batches, whether finished or not. Returns its jobs."""
        jobs = worker.running
        for batch in list(worker.computing):
            self._end(batch)
        return jobs


class SteppedBatches:
    """Batches for a model that computes in steps. Takes the same arguments as WholeBatches."""

    def __init__(
        self,
        env: simpy.Environment,
        model: Model,
        load: ModelLoad,
        chance: random.Random,
        on_ended: OnEnded,
    ) -> None:
        assert load.steps is not None, "the caller must check this; this is a bug"
        self._env = env
        self._steps = load.steps
        self._kept_when_sharing = load.kept_when_sharing
        self._chance = chance
        self._on_ended = on_ended
        self._slots = batch_items(model, load)
        self._fixed_share = SHARED_WEIGHTS_SHARE if model.definition.shares_weights else 0.0

    def start(self, worker: SimulatedWorker) -> None:
        """Admits items that a worker holds, up to its free slots."""
        self._advance(worker)
        admitted = list(self._admit(worker))
        if not admitted:
            return
        inside = worker.inside
        if inside is None:
            worker.occupy(self._env.now)
            if worker.step_time is None:
                worker.step_time = StepTime(self._fixed_share, self._slots)
            inside = worker.inside = Inside(worker.step_time)
            worker.started_s = self._env.now
        for job in admitted:
            job.started_s = self._env.now
            job.read_s, job.steps = self._steps.first_s * job.items, self._steps.count
            if self._steps.spread == "exponential":
                job.steps = self._chance.expovariate(1 / self._steps.count)
            job.share_s, job.spare_s = inside.share_s, inside.spare_s
        worker.running = [*worker.running, *admitted]
        self._schedule(worker, inside)

    def _admit(self, worker: SimulatedWorker) -> Iterator[SimulatedJob]:
        """Yields interactive jobs first. `batch` priority also gets 1/4 of the slots."""
        free = self._slots - sum(job.items for job in worker.running)
        has_callers = any(not job.is_batch_priority for job in worker.running)
        for priority in (INTERACTIVE, BATCH):
            if priority == BATCH and (has_callers or worker.held[INTERACTIVE]):
                batch_items = sum(job.items for job in worker.running if job.is_batch_priority)
                free = min(free, max(1, int(self._slots * BATCH_SLOTS_SHARE)) - batch_items)
            held = worker.held[priority]
            while _is_prepared(held, self._env.now) and held[0].items <= free:
                job = held.popleft()
                if job.has_ended:
                    worker.held_jobs[priority] -= 1
                    continue
                has_callers = has_callers or priority == INTERACTIVE
                free -= job.items
                yield job

    def _schedule(self, worker: SimulatedWorker, inside: Inside) -> None:
        """Schedules the next event in a worker, and sets its spare time until then."""
        items = sum(job.items for job in worker.running)
        fill = min(1.0, items / self._slots)
        slowed = worker.compute_slowdown(self._kept_when_sharing)
        reads = _reading(worker)
        if reads is not None:
            step_s, next_s, work = (
                self._steps.first_s,
                reads.read_s * slowed,
                self._steps.first_work,
            )
            inside.steps_per_s, inside.work_part = 0.0, 1 / slowed
        else:
            step_s, work = self._steps.step_s(items), items
            next_s = min(job.steps for job in worker.running) * step_s * slowed
            inside.steps_per_s = 1 / step_s / slowed
            full_s = self._steps.step_s(self._slots)
            inside.work_part = fill * full_s / step_s / slowed
        inside.time.observe(work, step_s * slowed)
        spare_s = inside.time.spare_s(fill, work, step_s * slowed)
        inside.spare_part = spare_s / (step_s * slowed)
        in_batch_priority = (
            sum(job.items for job in worker.running if job.is_batch_priority) / items
        )
        part = 1 - inside.spare_part
        parts = (part * (1 - in_batch_priority), part * in_batch_priority)
        worker.set_busy(parts, self._env.now)
        worker.batch_done = self._env.timeout(max(0.0, next_s), worker)
        assert worker.batch_done.callbacks is not None
        worker.batch_done.callbacks.append(self._change)

    def _advance(self, worker: SimulatedWorker) -> None:
        """Counts the worker's progress since its last change."""
        inside = worker.inside
        if inside is None:
            return
        passed_s = self._env.now - worker.started_s
        worker.started_s = self._env.now
        worker.busy_s += passed_s
        worker.work_s += passed_s * inside.work_part
        items = sum(job.items for job in worker.running)
        inside.share_s += passed_s / items
        inside.spare_s += passed_s * inside.spare_part / items
        if inside.steps_per_s:
            for job in worker.running:
                job.steps -= passed_s * inside.steps_per_s
        elif (reads := _reading(worker)) is not None:
            reads.read_s -= passed_s * inside.work_part

    def _change(self, event: simpy.Event) -> None:
        worker = cast(SimulatedWorker, event.value)
        inside = worker.inside
        if worker.batch_done is not event or inside is None:
            return  # a different event came first
        self._advance(worker)
        done = [job for job in worker.running if job.steps <= NEARLY or job.has_ended]
        if not done:
            self._schedule(worker, inside)
            return
        worker.running = [job for job in worker.running if job not in done]
        for job in done:
            worker.inference_s += (inside.share_s - job.share_s) * job.items
            worker.spare_s += (inside.spare_s - job.spare_s) * job.items
            worker.batches += job.items
        if worker.running:
            self._schedule(worker, inside)
        else:
            self._leave(worker)
        for job in done:
            self._on_ended(worker, [job], self._env.now - job.started_s)

    def _leave(self, worker: SimulatedWorker) -> None:
        worker.inside = worker.batch_done = None
        worker.vacate(self._env.now)

    def stop(self, worker: SimulatedWorker) -> list[SimulatedJob]:
        """Stops a worker's computation. Returns the worker's jobs, which start over elsewhere."""
        self._advance(worker)
        jobs, worker.running = worker.running, []
        self._leave(worker)
        return jobs


def _is_prepared(held: deque[SimulatedJob], now_s: float) -> bool:
    """Returns whether the first job is ready to be computed."""
    return bool(held) and held[0].prepared_s <= now_s + NEARLY


def _reading(worker: SimulatedWorker) -> SimulatedJob | None:
    """Returns the job whose prompt is being read: one at a time, while other texts wait."""
    return next((job for job in worker.running if job.read_s > NEARLY), None)


class Service:
    """A model's broker and workers.

    Args:
        load: seconds per batch.
        broker: how jobs are delivered to workers.
        record: records the outcome of each request in the run.
    """

    def __init__(
        self,
        env: simpy.Environment,
        model: Model,
        load: ModelLoad,
        broker: ScenarioBroker,
        record: ModelRecord,
        trip_s: float,
        chance: random.Random,
    ) -> None:
        self._env = env
        self.model = model
        self.name = model.name
        self.load = load
        self.record = record
        self._trip_s = trip_s
        self._chance = chance
        self._is_idle_first = broker.delivery == "idle_first"
        self._lease_s = broker.lease_s
        self._refill_s = refill_s(broker.round_trip_s) if broker.round_trip_s else 0.0
        self._batches_held = broker.batches_held
        # A model that computes in steps holds a fixed number of jobs (workers/worker.py).
        self._holds_more = broker.batches_held is None and load.steps is None
        self.queues: tuple[deque[SimulatedJob], deque[SimulatedJob]] = (deque(), deque())
        """Jobs that have been published but have not reached a worker."""
        self._open: list[SimulatedWorker] = []
        self._idle: dict[SimulatedWorker, None] = {}
        self._deadlines: list[tuple[float, int, SimulatedJob]] = []
        """A heap of the jobs, by deadline and order of arrival."""
        self._numbers = itertools.count()
        kind = WholeBatches if load.steps is None else SteppedBatches
        self._work = kind(env, model, load, chance, self._handle_end)
        self._has_earlier: simpy.Event | None = None
        """Triggered when a job has an earlier deadline than all others."""
        env.process(self._expire())

    # Requests

    def publish(self, job: SimulatedJob) -> None:
        heapq.heappush(self._deadlines, (job.deadline_s, next(self._numbers), job))
        if self._has_earlier is not None and self._deadlines[0][2] is job:
            self._has_earlier.succeed()
            self._has_earlier = None
        self._deliver(job)

    def _expire(self) -> Steps:
        """Expires jobs at their deadline, wherever they are."""
        while True:
            if not self._deadlines:
                self._has_earlier = self._env.event()
                yield self._has_earlier
            job = self._deadlines[0][2]
            if not job.has_ended and job.deadline_s > self._env.now:
                self._has_earlier = self._env.event()
                yield self._has_earlier | self._env.timeout(job.deadline_s - self._env.now)
                continue
            heapq.heappop(self._deadlines)
            if not job.has_ended:
                job.site.gave_up(job, self._env.now)
                self.end(job, RequestEnd.EXPIRED)

    def refuse(self) -> None:
        """Counts a request that was rejected immediately."""
        self.record.outcomes[RequestEnd.REFUSED] += 1
        self.record.ended_s.append(self._env.now)

    def end(self, job: SimulatedJob, outcome: RequestEnd) -> None:
        """Records the outcome of a job that was not served."""
        job.has_ended = True
        self.record.outcomes[outcome] += 1
        self.record.ended_s.append(self._env.now)

    def lose_requests(self, site: ApiSite) -> None:
        """Ends all requests in a region's API."""
        for _, _, job in sorted(self._deadlines):
            if job.site is site and not job.has_ended:
                site.record_lost(job)
                self.end(job, RequestEnd.LOST)

    def open_jobs(self) -> int:
        return sum(not job.has_ended for _, _, job in self._deadlines)

    # Delivery

    def _deliver(self, job: SimulatedJob) -> None:
        priority = BATCH if job.is_batch_priority else INTERACTIVE
        worker = self._worker_for(priority) if not self.queues[priority] else None
        if worker is None:
            self.queues[priority].append(job)
        else:
            self._hold(worker, job, priority)
            self._compute(worker)

    def _worker_for(self, priority: int) -> SimulatedWorker | None:
        if self._is_idle_first and self._idle:
            return next(iter(self._idle))
        count = len(self._open)
        first = int(self._chance.random() * count)
        for number in range(first, first + count):
            worker = self._open[number % count]
            # Workers are open if they have room for `interactive` priority.
            if worker.has_room(priority):
                return worker
        return None

    def _hold(self, worker: SimulatedWorker, job: SimulatedJob, priority: int) -> None:
        worker.held[priority].append(job)
        worker.held_jobs[priority] += 1
        if self.load.host_seconds_per_item:
            self._prepare(worker, job, self.load.host_seconds_per_item)
        if priority == INTERACTIVE and not worker.has_room(priority):
            self._close(worker)

    def _prepare(self, worker: SimulatedWorker, job: SimulatedJob, item_s: float) -> None:
        """Prepares a job in the I/O process, which a pod's models share, one job at a time."""
        free_s = max(self._env.now, *(part.prepared_s for part in (worker, *worker.others)))
        job.prepared_s = worker.prepared_s = free_s + item_s * job.items
        prepared = self._env.timeout(job.prepared_s - self._env.now, worker)
        assert prepared.callbacks is not None
        prepared.callbacks.append(self._compute_prepared)

    def _compute_prepared(self, event: simpy.Event) -> None:
        worker = cast(SimulatedWorker, event.value)
        if not worker.is_gone:
            self._compute(worker)

    def _refill(self, worker: SimulatedWorker) -> None:
        for priority, queue in enumerate(self.queues):
            while queue and worker.has_room(priority):
                job = queue.popleft()
                if not job.has_ended:
                    self._hold(worker, job, priority)

    def _open_up(self, worker: SimulatedWorker) -> None:
        if worker.open_at < 0 and worker.has_room(INTERACTIVE):
            worker.open_at = len(self._open)
            self._open.append(worker)

    def _close(self, worker: SimulatedWorker) -> None:
        if worker.open_at >= 0:
            last = self._open.pop()
            if last is not worker:
                self._open[worker.open_at] = last
                last.open_at = worker.open_at
            worker.open_at = -1

    def _count_held(self, worker: SimulatedWorker) -> int:
        """Returns how many jobs of each priority a worker near its broker holds."""
        most_items = self.model.batch.max_items
        if self._batches_held is not None:
            return self._batches_held * most_items
        in_steps = self.load.steps is not None
        return count_held_messages(most_items, worker.processes, in_steps=in_steps)

    # Computing

    def _without_work(self, worker: SimulatedWorker) -> None:
        """True if the worker holds no work that it could start."""
        if worker.drained is not None and not worker.drained.triggered:
            worker.drained.succeed()
        elif worker.is_serving:
            self._idle[worker] = None

    def _handle_end(self, worker: SimulatedWorker, jobs: list[SimulatedJob], took_s: float) -> None:
        """Handles jobs that a worker has finished, and the model time they took.

        The worker continues.
        """
        ended = [0, 0]
        for job in jobs:
            ended[BATCH if job.is_batch_priority else INTERACTIVE] += 1
            worker.items += job.items
            if not job.has_ended:
                self._serve(job, took_s)
        if self._holds_more:
            for priority, count in enumerate(ended):
                ahead = worker.ahead[priority].batch_ended(
                    worker.processes * count / max(took_s, 1e-3),
                    took_s,
                    self._refill_s,
                    self._env.now,
                )
                worker.most_held[priority] = self._count_held(worker) + ahead
        _pass_turn(worker)
        self._compute(worker)
        if self._refill_s:
            self._env.process(self._free_later(worker, ended))
        else:
            self._free(worker, ended)

    def _free_later(self, worker: SimulatedWorker, ended: list[int]) -> Steps:
        """Frees permits once replies and acks have arrived, along with the next jobs."""
        yield self._env.timeout(self._refill_s)
        if not worker.is_gone:
            self._free(worker, ended)

    def _free(self, worker: SimulatedWorker, ended: list[int]) -> None:
        """Takes the next jobs of each priority in place of the finished ones."""
        for priority, count in enumerate(ended):
            worker.held_jobs[priority] -= count
        if not worker.is_draining:
            self._refill(worker)
            self._compute(worker)
            self._open_up(worker)

    def _compute(self, worker: SimulatedWorker) -> None:
        """Lets a worker start as many of the jobs it holds as it can."""
        if not worker.has_gpu:
            self._idle.pop(worker, None)
            return
        if worker.waits_for_turn:
            self._idle.pop(worker, None)
            if not any(worker.held) and worker.drained is not None:
                self._without_work(worker)
            return
        self._work.start(worker)
        if not worker.running and not any(worker.held):
            self._without_work(worker)
        elif worker.has_free_process and worker.is_serving:
            self._idle[worker] = None
        else:
            self._idle.pop(worker, None)

    def _serve(self, job: SimulatedJob, took_s: float) -> None:
        now_s, record = self._env.now, self.record
        job.has_ended = True
        job.site.record_answered(job, now_s, took_s)
        record.outcomes[RequestEnd.SERVED] += 1
        record.arrived_s.append(job.arrived_s)
        record.answer_s.append(now_s - job.arrived_s + self._trip_s)
        record.queue_s.append(job.started_s - job.arrived_s)
        if job.then is not None:
            job.then(job)

    # Workers starting and ending

    def add_worker(self, worker: SimulatedWorker) -> None:
        """Adds a warm worker, which pulls jobs."""
        worker.take_turn = partial(self._compute, worker)
        worker.is_ready, worker.ready_s = True, self._env.now
        worker.most_held[:] = [self._count_held(worker)] * 2
        self._refill(worker)
        self._compute(worker)
        self._open_up(worker)

    def drain(self, worker: SimulatedWorker) -> simpy.Event:
        """Stops a worker from pulling.

        The event fires when the worker has finished the jobs that it holds.
        """
        worker.is_draining = True
        self._close(worker)
        self._idle.pop(worker, None)
        worker.drained = self._env.event()
        if not worker.running:
            worker.drained.succeed()
        return worker.drained

    def leave(self, worker: SimulatedWorker) -> None:
        """Removes a worker. Any jobs that the worker still holds go back to the broker."""
        self._hand_back(self._take_from(worker))

    def lose_gpu(self, worker: SimulatedWorker) -> None:
        """Handles a worker's failed GPU.

        The worker keeps its running jobs so that it can retry them, and continues to pull.
        """
        jobs = self._work.stop(worker) if worker.running else []
        for job in sorted(jobs, key=_age, reverse=True):
            worker.held[BATCH if job.is_batch_priority else INTERACTIVE].appendleft(job)
        self._compute(worker)

    def lose(self, worker: SimulatedWorker) -> None:
        """Handles a dead worker. The broker redelivers its jobs when their leases expire."""
        self._env.process(self._hand_back_later(self._take_from(worker)))

    def _hand_back_later(self, jobs: list[SimulatedJob]) -> Steps:
        yield self._env.timeout(self._lease_s * self._chance.uniform(2 / 3, 1))
        self._hand_back(job for job in jobs if not job.has_ended)

    def _take_from(self, worker: SimulatedWorker) -> list[SimulatedJob]:
        worker.is_draining = worker.is_gone = True
        self._close(worker)
        self._idle.pop(worker, None)
        back: list[SimulatedJob] = self._work.stop(worker) if worker.running else []
        for held in worker.held:
            back += held
            held.clear()
        worker.held_jobs[:] = [0, 0]
        return [job for job in back if not job.has_ended]

    def _hand_back(self, jobs: Iterable[SimulatedJob]) -> None:
        for job in sorted(jobs, key=_age, reverse=True):
            self.queues[BATCH if job.is_batch_priority else INTERACTIVE].appendleft(job)
        while self._open and any(self.queues):
            worker = self._open[int(self._chance.random() * len(self._open))]
            self._refill(worker)
            self._compute(worker)
            if not self.queues[INTERACTIVE]:
                break


def _age(job: SimulatedJob) -> Any:
    return job.arrived_s


def _pass_turn(worker: SimulatedWorker) -> None:
    """In a pod with several models, runs the model with the oldest waiting job next."""
    if not worker.others:
        return
    waiting = [member for member in (worker, *worker.others) if any(member.held)]
    waiting.sort(key=lambda member: min(held[0].arrived_s for held in member.held if held))
    for member in waiting:
        if member.take_turn is not None:
            member.take_turn()
