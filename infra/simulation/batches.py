"""Whole batches: what waits when the model of a worker falls idle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import cast

import simpy

from infra.simulation.api_site import SimulatedJob
from infra.simulation.model_load import ModelLoad
from infra.simulation.worker import SimulatedWorker
from shared.catalog import Model

INTERACTIVE, BATCH = 0, 1
BATCH_LANE_EVERY = 16
"""One batch in so many begins with the batch lane (workers/scheduling/batch_lane.py)."""

OnEnded = Callable[[SimulatedWorker, list[SimulatedJob], float], None]
"""Called with jobs that a worker is done with, and the seconds that the model took for them."""


class WholeBatches:
    """The batches of one model.

    Args:
        env: the clock.
        model: of the catalog.
        load: seconds of batches.
        chance: the source of chance.
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
        self._most_items = model.batch.max_items
        self._batches = 0

    def start(self, worker: SimulatedWorker) -> None:
        """A worker begins a batch, if it runs none and holds jobs."""
        if worker.running:
            return
        batch = list(self._batch_of(worker))
        if not batch:
            return
        items = sum(job.items for job in batch)
        worker.occupy(self._env.now)
        took_s = self._load.batch_s(items)
        if self._load.spread == "exponential":
            took_s = self._chance.expovariate(1 / took_s)
        # Those that compute share the GPU in time. It counts as of the start of the batch.
        took_s *= worker.slowed(self._load.kept_when_sharing)
        worker.running, worker.running_s, worker.started_s = batch, took_s, self._env.now
        in_batch_lane = 0
        for job in batch:
            job.started_s = self._env.now
            in_batch_lane += job.items * job.is_batch_lane
        share = in_batch_lane / items
        worker.set_busy((1 - share, share), self._env.now)
        done = worker.batch_done = self._env.timeout(took_s, worker)
        assert done.callbacks is not None
        done.callbacks.append(self._finish)

    def _batch_of(self, worker: SimulatedWorker) -> Iterator[SimulatedJob]:
        """What waits, up to a full batch: interactive jobs first, but for one batch in 16."""
        self._batches += 1
        lanes = (INTERACTIVE, BATCH)
        if worker.held[BATCH] and self._batches % BATCH_LANE_EVERY == 0:
            lanes = (BATCH, INTERACTIVE)
        items = 0
        for lane in lanes:
            held = worker.held[lane]
            while held and (items == 0 or items + held[0].items <= self._most_items):
                job = held.popleft()
                if job.has_ended:
                    worker.held_items[lane] -= job.items
                    continue
                items += job.items
                yield job

    def _finish(self, event: simpy.Event) -> None:
        worker = cast(SimulatedWorker, event.value)
        if worker.batch_done is not event:
            return  # the batch was cut off
        took_s = worker.running_s
        worker.inference_s += took_s
        worker.batches += 1
        self._on_ended(worker, self.stop(worker), took_s)

    def stop(self, worker: SimulatedWorker) -> list[SimulatedJob]:
        """Ends the batch of a worker, done or not. Returns its jobs."""
        batch, worker.running, worker.batch_done = worker.running, [], None
        now_s = self._env.now
        worker.busy_s += now_s - worker.started_s
        worker.work_s += now_s - worker.started_s
        worker.vacate(now_s)
        return batch
