"""A model's workers: the pods of a Deployment, and KEDA, which sets their number.

KEDA reads the triggers, scales to and from zero, and replaces metrics that fail.

Source: kedacore/keda, pkg/scalers/prometheus_scaler.go (ExecutePromQuery), pkg/fallback/fallback.go
(GetMetricsWithFallback, doFallback), pkg/scaling/scale_handler.go (getScalerState),
pkg/scaling/executor/scale_scaledobjects.go (RequestScale). This follows 2.19; older versions don't
apply the fallback in their own loop, so they stay at zero replicas.
"""

from __future__ import annotations

import math

import simpy

from penstock_planning.simulation.fleet import Fleet
from penstock_planning.simulation.hpa import HorizontalPodAutoscaler, Reading
from penstock_planning.simulation.metrics_table import KNOWN
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.recorder import Recorder
from penstock_planning.simulation.rules import AutoscalerRules, Trigger, WorkerRules
from penstock_planning.simulation.scenario import Cluster
from penstock_planning.simulation.service import Service
from penstock_planning.simulation.shared_service import SharedService
from penstock_planning.simulation.timeseries import TimeSeries
from penstock_planning.simulation.worker import SimulatedWorker, Steps
from shared.errors import ConfigurationError


class SimulatedDeployment:
    """Workers in a region, for one model or shared by several.

    Args:
        service: the service for the workers' models.
        fleet: the nodes that the workers run on.
        rules: rules for rollouts and drains.
        recorder: records the work of terminated workers.
    """

    def __init__(
        self,
        env: simpy.Environment,
        service: Service | SharedService,
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
        """Pods that count, ordered by age. Terminating pods don't."""
        self.leaving: list[SimulatedWorker] = []
        self._made = 0

    def set(self, wanted: int) -> None:
        """Sets `spec.replicas`, like the autoscaler does."""
        if wanted != self.wanted:
            self.wanted = wanted
            self._reconcile()

    def start_with(self, count: int) -> None:
        """Adds workers that are ready at the start. Assumes that the fleet has room for them."""
        self.wanted = count
        for _ in range(count):
            worker = self._create_worker()
            self.workers.append(worker)
            self.fleet.request(worker)
            if worker.node is not None:
                self.service.add_worker(worker)

    def roll_out(self) -> None:
        """Rolls out a new version of the pods."""
        for worker in self.workers:
            worker.is_new = False
        self._reconcile()

    @property
    def ready(self) -> int:
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
            # Pods that are not ready come first, then the newest ones, the order a ReplicaSet uses.
            ranked = sorted(self.workers, key=lambda pod: (pod.is_ready, -pod.ready_s))
            for worker in ranked[:surplus]:
                self._delete(worker, "scaled down")

    def _roll(self) -> None:
        """Takes one step in a rolling update.

        Each pod that becomes ready or terminates allows the next step.
        """
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
        worker = self._create_worker()
        self.workers.append(worker)
        self._env.process(self._start(worker))

    def _create_worker(self) -> SimulatedWorker:
        self._made += 1
        name = f"{self.rules.slug}-{self.region}-{self._made}"
        return SimulatedWorker(
            name,
            self.region,
            self.service.name,
            processes=self.rules.processes,
            placed=self._env.event(),
            is_spread=self.rules.spread_over_nodes,
            on_evict=self._evict,
            on_lost_gpu=self._lose_gpu,
        )

    def _start(self, worker: SimulatedWorker) -> Steps:
        self.fleet.request(worker)
        yield worker.placed
        yield self._env.timeout(self._cluster.pod_start_s)
        # On a failed GPU, the pod never becomes ready.
        if not worker.is_gone and not worker.is_draining and worker.has_gpu:
            self.service.add_worker(worker)
            self._reconcile()

    def _delete(self, worker: SimulatedWorker, reason: str) -> None:
        self.workers.remove(worker)
        self._recorder.lost_workers[reason] += 1
        if worker.is_ready:
            self.leaving.append(worker)
            self._env.process(self._drain(worker))
        else:
            self._let_go(worker)

    def _drain(self, worker: SimulatedWorker) -> Steps:
        yield self.service.drain(worker) | self._env.timeout(self.rules.drain_s)
        if not worker.is_gone:
            self.leaving.remove(worker)
            self._let_go(worker)

    def _let_go(self, worker: SimulatedWorker) -> None:
        self.service.leave(worker)
        self._count(worker)
        self.fleet.give_up(worker)

    def _count(self, worker: SimulatedWorker) -> None:
        if worker.is_ready:
            self._recorder.worker_ready_s += self._env.now - worker.ready_s
            self._recorder.worker_busy_s += worker.busy_s
            self._recorder.worker_work_s += worker.work_s

    def count_workers(self) -> None:
        """Counts the remaining workers' work at the end of a run."""
        for worker in (*self.workers, *self.leaving):
            worker.settle(self._env.now)
            self._count(worker)

    def kill_down_to(self, count: int) -> None:
        """Kills the oldest serving pods until `count` are left."""
        surplus = max(0, len(self.workers) - count)
        for worker in [serving for serving in self.workers if serving.is_serving][:surplus]:
            self.workers.remove(worker)
            self._recorder.lost_workers["killed"] += 1
            self.service.lose(worker)
            self._count(worker)
            self.fleet.give_up(worker)
        self.wanted = len(self.workers)

    def _evict(self, worker: SimulatedWorker, reason: str) -> None:
        """Evicts a pod from its node. Another pod is created immediately."""
        if reason != "region lost":
            if worker in self.workers:
                self._delete(worker, reason)
                self._reconcile()
            return
        (self.workers if worker in self.workers else self.leaving).remove(worker)
        self._recorder.lost_workers[reason] += 1
        self._let_go(worker)

    def _lose_gpu(self, worker: SimulatedWorker, leaves_s: float) -> None:
        if worker.is_ready:
            self._env.process(self._leave_gpu(worker, leaves_s))

    def _leave_gpu(self, worker: SimulatedWorker, leaves_s: float) -> Steps:
        """Makes a process lose its GPU, restart, and lose it again, so that its worker exits.

        The worker's pod restarts on the same GPU and is not ready until its node is drained.
        """
        worker.lost_gpus = 1
        self.service.lose_gpu(worker)
        yield self._env.timeout(leaves_s)
        if worker.is_gone:
            return
        worker.lost_gpus = 2
        if worker in self.leaving:
            self.leaving.remove(worker)
            self._let_go(worker)
            return
        self._count(worker)
        self.service.leave(worker)
        worker.is_ready = False

    def lose_all(self) -> None:
        """Handles the loss of the region. The region's nodes have already evicted their pods."""
        for worker in list(self.workers):
            self._evict(worker, "region lost")
        self.wanted = 0


def _share(share: str, replicas: int) -> float:
    """Returns a number of pods, given either a number or a percentage of the replicas."""
    return replicas * float(share[:-1]) / 100 if share.endswith("%") else float(share)


class QueryFailed(Exception):
    """A trigger could not be read."""


class Autoscaler:
    """KEDA and the HPA that it creates, for a model's workers in a region.

    Raises:
        ConfigurationError: a query can't be evaluated, or uses an unknown metric.
    """

    def __init__(self, rules: AutoscalerRules, series: TimeSeries) -> None:
        self.rules = rules
        self.series = series
        self._triggers = [(trigger, PromQuery(trigger.query)) for trigger in rules.triggers]
        for trigger, query in self._triggers:
            if unknown := query.metrics - KNOWN:
                raise ConfigurationError(
                    f"trigger {trigger.name}: the simulation has no metric "
                    f"{', '.join(sorted(unknown))}; add a row for it to "
                    "penstock_planning/simulation/metrics_table.py",
                    field=trigger.name,
                )
        self._failures = dict.fromkeys(range(len(self._triggers)), 0)
        # An HPA has at least one replica. KEDA scales to zero by itself.
        least = max(1, rules.minReplicaCount)
        self._hpa = HorizontalPodAutoscaler(least, rules.maxReplicaCount, rules.behavior)
        self._active_s = -math.inf
        self.is_endpoint_up = True
        """True if the queries return anything at all."""

    def restart(self, rules: AutoscalerRules) -> Autoscaler:
        """Returns an autoscaler for the same metrics that remembers no earlier readings."""
        restarted = Autoscaler(rules, self.series)
        restarted.is_endpoint_up = self.is_endpoint_up
        return restarted

    @property
    def looks_back_s(self) -> float:
        """Returns how far back its queries look, in seconds."""
        return max((query.looks_back_s for _, query in self._triggers), default=0.0)

    def poll(self, now_s: float, replicas: int) -> int:
        """Runs KEDA's own loop every `pollingInterval`: scales to and from zero."""
        if self.is_endpoint_up and 0 < self.rules.minReplicaCount <= replicas:
            return replicas  # the values do not matter here
        is_active = is_error = False
        for number, (trigger, _) in enumerate(self._triggers):
            value, is_fallback = self._read(number, now_s, replicas)
            is_error = is_error or value is None
            is_active = is_active or is_fallback
            if value is not None and value > trigger.activationThreshold:
                is_active = True
        least = self.rules.minReplicaCount
        if is_active:
            self._active_s = now_s
            # An operator may have set the maximum to 0.
            return min(max(1, least), self.rules.maxReplicaCount) if replicas == 0 else replicas
        fallback = self.rules.fallback
        if is_error and (fallback is None or fallback.replicas):
            return replicas
        if replicas > 0 and least == 0:
            is_over = now_s - self._active_s > self.rules.cooldownPeriod
            return 0 if is_over else replicas
        return max(replicas, least)

    def sync(self, now_s: float, replicas: int) -> int:
        """Runs the HPA's loop every 15 s.

        It requests the metrics from KEDA, which queries them at that time.
        """
        if replicas == 0:
            return 0
        readings: list[Reading] = []
        for number, (trigger, _) in enumerate(self._triggers):
            value, _ = self._read(number, now_s, replicas)
            readings.append((value, trigger.threshold))
        return self._hpa.compute_desired(now_s, replicas, readings)

    def _read(self, number: int, now_s: float, replicas: int) -> tuple[float | None, bool]:
        """Returns a trigger's value (None if it failed), and whether it comes from the fallback."""
        trigger, query = self._triggers[number]
        try:
            value = self._run_query(trigger, query, now_s)
        except QueryFailed:
            self._failures[number] += 1
            fallback = self.rules.fallback
            if fallback is None or self._failures[number] <= fallback.failureThreshold:
                return None, False
            fallback_replicas = {
                "static": fallback.replicas,
                "currentReplicas": replicas,
                "currentReplicasIfHigher": max(replicas, fallback.replicas),
                "currentReplicasIfLower": min(replicas, fallback.replicas),
            }[fallback.behavior]
            return fallback_replicas * trigger.threshold, True
        self._failures[number] = 0
        return value, False

    def _run_query(self, trigger: Trigger, query: PromQuery, now_s: float) -> float:
        if not self.is_endpoint_up:
            raise QueryFailed
        value = query.value(self.series, now_s)
        if isinstance(value, dict):
            if len(value) > 1:
                raise QueryFailed
            value = next(iter(value.values()), math.nan)
        if not math.isfinite(value):
            if trigger.ignoreNullValues:
                return 0.0
            raise QueryFailed
        return value
