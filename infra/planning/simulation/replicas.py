"""A Deployment: keeps the pods that the autoscaler requests, and rolls out new versions."""

from __future__ import annotations

import math

import simpy

from infra.planning.simulation.fleet import Fleet
from infra.planning.simulation.recorder import Recorder
from infra.planning.simulation.rules import WorkerRules
from infra.planning.simulation.scenario import Cluster
from infra.planning.simulation.service import Service
from infra.planning.simulation.worker import SimulatedWorker, Steps


class SimulatedDeployment:
    """The workers of one model in one region.

    Args:
        env: the clock.
        service: the service of the workers' model.
        fleet: the nodes that they run on.
        rules: rules of rollouts and drains.
        cluster: times.
        region: where.
        recorder: gets the work of ended workers.
    """

    def __init__(
        self,
        env: simpy.Environment,
        service: Service,
        fleet: Fleet,
        rules: WorkerRules,
        cluster: Cluster,
        region: str,
        recorder: Recorder,
    ) -> None:
        self._env = env
        self.service = service
        self.fleet = fleet
        self.rules = rules
        self._cluster = cluster
        self.region = region
        self._recorder = recorder
        self.wanted = 0
        self.workers: list[SimulatedWorker] = []
        """Pods that count, by age. Those that terminate don't."""
        self.leaving: list[SimulatedWorker] = []
        self._made = 0

    def set(self, wanted: int) -> None:
        """The autoscaler sets `spec.replicas`."""
        if wanted != self.wanted:
            self.wanted = wanted
            self._reconcile()

    def start_with(self, count: int) -> None:
        """Workers that are ready at the start. The fleet has places for them."""
        self.wanted = count
        for _ in range(count):
            worker = self._made_worker()
            self.workers.append(worker)
            self.fleet.request(worker)
            if worker.node is not None:
                self.service.add_worker(worker)

    def roll_out(self) -> None:
        """A new version of the pods."""
        for worker in self.workers:
            worker.is_new = False
        self._reconcile()

    @property
    def ready(self) -> int:
        """Pods that serve."""
        return sum(worker.is_serving for worker in self.workers)

    def _reconcile(self) -> None:
        if self.fleet.is_lost:
            return
        if any(not worker.is_new for worker in self.workers):
            self._roll()
            return
        for _ in range(self.wanted - len(self.workers)):
            self._create()
        surplus = len(self.workers) - self.wanted
        if surplus > 0:
            # First those that are not ready, then the youngest, as a ReplicaSet ranks them.
            ranked = sorted(self.workers, key=lambda one: (one.is_ready, -one.ready_s))
            for worker in ranked[:surplus]:
                self._delete(worker, "scaled down")

    def _roll(self) -> None:
        """One step of a rolling update. Each pod that gets ready or goes allows the next."""
        surge = math.ceil(_share(self.rules.max_surge, self.wanted))
        unavailable = math.floor(_share(self.rules.max_unavailable, self.wanted))
        if surge == unavailable == 0:
            unavailable = 1
        old = [worker for worker in self.workers if not worker.is_new]
        for worker in [worker for worker in old if not worker.is_ready]:
            self._delete(worker, "rollout")
            old.remove(worker)
        new = len(self.workers) - len(old)
        for _ in range(min(self.wanted - new, self.wanted + surge - len(self.workers))):
            self._create()
        spare = self.ready - (self.wanted - unavailable)
        for worker in old[: max(0, spare)]:
            self._delete(worker, "rollout")
        if spare > 0:
            new = sum(worker.is_new for worker in self.workers)
            for _ in range(min(self.wanted - new, self.wanted + surge - len(self.workers))):
                self._create()

    def _create(self) -> None:
        worker = self._made_worker()
        self.workers.append(worker)
        self._env.process(self._start(worker))

    def _made_worker(self) -> SimulatedWorker:
        self._made += 1
        name = f"{self.rules.slug}-{self.region}-{self._made}"
        return SimulatedWorker(
            name,
            self.region,
            self.service.model.name,
            placed=self._env.event(),
            is_spread=self.rules.spread_over_nodes,
            evict=self._evict,
        )

    def _start(self, worker: SimulatedWorker) -> Steps:
        self.fleet.request(worker)
        yield worker.placed
        yield self._env.timeout(self._cluster.pod_start_s)
        if not worker.is_gone and not worker.is_draining:
            self.service.add_worker(worker)
            self._reconcile()

    def _delete(self, worker: SimulatedWorker, reason: str) -> None:
        self.workers.remove(worker)
        self._recorder.lost_workers[reason] += 1
        if worker.is_ready:
            self.leaving.append(worker)
            self._env.process(self._drain(worker))
        else:
            self._gone(worker)

    def _drain(self, worker: SimulatedWorker) -> Steps:
        yield self.service.drain(worker) | self._env.timeout(self.rules.drain_s)
        if not worker.is_gone:
            self.leaving.remove(worker)
            self._gone(worker)

    def _gone(self, worker: SimulatedWorker) -> None:
        self.service.leave(worker)
        self._count(worker)
        self.fleet.give_up(worker)

    def _count(self, worker: SimulatedWorker) -> None:
        if worker.is_ready:
            self._recorder.worker_ready_s += self._env.now - worker.ready_s
            self._recorder.worker_busy_s += worker.busy_s
            self._recorder.worker_work_s += worker.work_s

    def count_workers(self) -> None:
        """Counts the work of the remaining workers, at the end of a run."""
        for worker in (*self.workers, *self.leaving):
            worker.settle(self._env.now)
            self._count(worker)

    def kill_down_to(self, count: int) -> None:
        """Kills the oldest pods that serve, until `count` are left."""
        for worker in [one for one in self.workers if one.is_serving][: len(self.workers) - count]:
            self.workers.remove(worker)
            self._recorder.lost_workers["killed"] += 1
            self.service.lose(worker)
            self._count(worker)
            self.fleet.give_up(worker)
        self.wanted = len(self.workers)

    def _evict(self, worker: SimulatedWorker, reason: str) -> None:
        """Its node goes. Another pod is made at once."""
        if reason != "region lost":
            if worker in self.workers:
                self._delete(worker, reason)
                self._reconcile()
            return
        (self.workers if worker in self.workers else self.leaving).remove(worker)
        self._recorder.lost_workers[reason] += 1
        self._gone(worker)

    def lose_all(self) -> None:
        """The region is gone. Its nodes have evicted their pods already."""
        for worker in list(self.workers):
            self._evict(worker, "region lost")
        self.wanted = 0


def _share(share: str, replicas: int) -> float:
    """Pods, of a number or a share of the replicas."""
    return replicas * float(share[:-1]) / 100 if share.endswith("%") else float(share)
