"""One model: its subscriptions, and what its workers of all regions get from them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import simpy

from infra.planning.simulation.api_site import ApiSite, SimulatedJob
from infra.planning.simulation.batches import BATCH, INTERACTIVE, SteppedBatches, WholeBatches
from infra.planning.simulation.model_load import ModelLoad
from infra.planning.simulation.recorder import ModelRecord, RequestEnd
from infra.planning.simulation.scenario import ScenarioBroker
from infra.planning.simulation.worker import SimulatedWorker, Steps
from shared.catalog import Model


class Service:
    """The broker's and the workers' side of one model.

    Args:
        env: the clock.
        model: the model's catalog entry.
        load: seconds of batches.
        broker: rules of job delivery to workers.
        record: gets the ending of each request.
        trip_s: both ways over Pub/Sub.
        chance: the source of chance.
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
        self.load = load
        self.record = record
        self._trip_s = trip_s
        self._chance = chance
        self._is_idle_first = broker.delivery == "idle_first"
        self._lease_s = broker.lease_s
        self._most_held = broker.batches_held * model.batch.max_items
        """Maximum held items in each lane, including the running batch."""
        self.queues: tuple[deque[SimulatedJob], deque[SimulatedJob]] = (deque(), deque())
        """Published, and with no worker."""
        self._open: list[SimulatedWorker] = []
        self._idle: dict[SimulatedWorker, None] = {}
        self._deadlines: deque[SimulatedJob] = deque()
        kind = WholeBatches if load.steps is None else SteppedBatches
        self._work = kind(env, model, load, chance, self._ended)
        self._has_jobs: simpy.Event | None = None
        env.process(self._expire())

    # Requests

    def publish(self, job: SimulatedJob) -> None:
        """Takes an admitted job."""
        self._deadlines.append(job)
        if self._has_jobs is not None:
            self._has_jobs.succeed()
            self._has_jobs = None
        self._deliver(job)

    def _expire(self) -> Steps:
        """Ends jobs at their deadline, wherever they are. Deadlines come in order of arrival."""
        while True:
            if not self._deadlines:
                self._has_jobs = self._env.event()
                yield self._has_jobs
            job = self._deadlines[0]
            if not job.has_ended and job.deadline_s > self._env.now:
                yield self._env.timeout(job.deadline_s - self._env.now)
            self._deadlines.popleft()
            if not job.has_ended:
                job.site.gave_up(job, self._env.now)
                self.end(job, RequestEnd.EXPIRED)

    def refuse(self) -> None:
        """Counts a request that was refused at once."""
        self.record.outcomes[RequestEnd.REFUSED] += 1
        self.record.ended_s.append(self._env.now)

    def end(self, job: SimulatedJob, outcome: RequestEnd) -> None:
        """Counts how a job ended that was not served."""
        job.has_ended = True
        self.record.outcomes[outcome] += 1
        self.record.ended_s.append(self._env.now)

    def lose_requests(self, site: ApiSite) -> None:
        """Ends all requests of a region's API."""
        for job in self._deadlines:
            if job.site is site and not job.has_ended:
                site.lost(job)
                self.end(job, RequestEnd.LOST)

    def open_jobs(self) -> int:
        """Jobs that have not ended."""
        return sum(not job.has_ended for job in self._deadlines)

    # Delivery

    def _deliver(self, job: SimulatedJob) -> None:
        lane = BATCH if job.is_batch_lane else INTERACTIVE
        worker = self._worker_for(lane) if not self.queues[lane] else None
        if worker is None:
            self.queues[lane].append(job)
        else:
            self._hold(worker, job, lane)
            self._compute(worker)

    def _worker_for(self, lane: int) -> SimulatedWorker | None:
        if self._is_idle_first and self._idle:
            return next(iter(self._idle))
        count = len(self._open)
        first = int(self._chance.random() * count)
        for number in range(first, first + count):
            worker = self._open[number % count]
            # Workers are open by their room for the interactive lane.
            if worker.held_items[lane] < self._most_held:
                return worker
        return None

    def _hold(self, worker: SimulatedWorker, job: SimulatedJob, lane: int) -> None:
        worker.held[lane].append(job)
        worker.held_items[lane] += job.items
        if lane == INTERACTIVE and worker.held_items[lane] >= self._most_held:
            self._close(worker)

    def _refill(self, worker: SimulatedWorker) -> None:
        for lane, queue in enumerate(self.queues):
            while queue and worker.held_items[lane] < self._most_held:
                job = queue.popleft()
                if not job.has_ended:
                    self._hold(worker, job, lane)

    def _open_up(self, worker: SimulatedWorker) -> None:
        if worker.open_at < 0 and worker.held_items[INTERACTIVE] < self._most_held:
            worker.open_at = len(self._open)
            self._open.append(worker)

    def _close(self, worker: SimulatedWorker) -> None:
        if worker.open_at >= 0:
            last = self._open.pop()
            if last is not worker:
                self._open[worker.open_at] = last
                last.open_at = worker.open_at
            worker.open_at = -1

    # What workers compute

    def _without_work(self, worker: SimulatedWorker) -> None:
        """A worker has nothing that it could compute."""
        if worker.drained is not None and not worker.drained.triggered:
            worker.drained.succeed()
        elif worker.is_serving:
            self._idle[worker] = None

    def _ended(self, worker: SimulatedWorker, jobs: list[SimulatedJob], took_s: float) -> None:
        """A worker is done with jobs, for which the model took this time. It continues."""
        for job in jobs:
            lane = BATCH if job.is_batch_lane else INTERACTIVE
            worker.held_items[lane] -= job.items
            worker.items += job.items
            if not job.has_ended:
                self._serve(job, took_s)
        self._compute(worker)
        if not worker.is_draining:
            self._refill(worker)
            self._compute(worker)
            self._open_up(worker)

    def _compute(self, worker: SimulatedWorker) -> None:
        """A worker takes on what it holds, as far as it can now."""
        self._work.start(worker)
        if worker.running:
            self._idle.pop(worker, None)
        else:
            self._without_work(worker)

    def _serve(self, job: SimulatedJob, took_s: float) -> None:
        now_s, record = self._env.now, self.record
        job.has_ended = True
        job.site.answered(job, now_s, took_s)
        record.outcomes[RequestEnd.SERVED] += 1
        record.arrived_s.append(job.arrived_s)
        record.answer_s.append(now_s - job.arrived_s + self._trip_s)
        record.queue_s.append(job.started_s - job.arrived_s)

    # Workers that come and go

    def join(self, worker: SimulatedWorker) -> None:
        """A worker is warm: it pulls."""
        worker.is_ready, worker.ready_s = True, self._env.now
        self._refill(worker)
        self._compute(worker)
        self._open_up(worker)

    def drain(self, worker: SimulatedWorker) -> simpy.Event:
        """A worker stops pulling. The event comes when it has done what it holds."""
        worker.is_draining = True
        self._close(worker)
        self._idle.pop(worker, None)
        worker.drained = self._env.event()
        if not worker.running:
            worker.drained.succeed()
        return worker.drained

    def leave(self, worker: SimulatedWorker) -> None:
        """A worker is gone. The broker gets what it still held."""
        self._hand_back(self._taken_from(worker))

    def lose(self, worker: SimulatedWorker) -> None:
        """A worker died. The broker gives what it held to others when the leases end."""
        self._env.process(self._hand_back_later(self._taken_from(worker)))

    def _hand_back_later(self, jobs: list[SimulatedJob]) -> Steps:
        yield self._env.timeout(self._lease_s * self._chance.uniform(2 / 3, 1))
        self._hand_back(job for job in jobs if not job.has_ended)

    def _taken_from(self, worker: SimulatedWorker) -> list[SimulatedJob]:
        worker.is_draining = worker.is_gone = True
        self._close(worker)
        self._idle.pop(worker, None)
        back: list[SimulatedJob] = self._work.stop(worker) if worker.running else []
        for held in worker.held:
            back += held
            held.clear()
        worker.held_items[:] = [0, 0]
        return [job for job in back if not job.has_ended]

    def _hand_back(self, jobs: Iterable[SimulatedJob]) -> None:
        for job in sorted(jobs, key=_age, reverse=True):
            self.queues[BATCH if job.is_batch_lane else INTERACTIVE].appendleft(job)
        while self._open and any(self.queues):
            worker = self._open[int(self._chance.random() * len(self._open))]
            self._refill(worker)
            self._compute(worker)
            if not self.queues[INTERACTIVE]:
                break


def _age(job: SimulatedJob) -> Any:
    return job.arrived_s
