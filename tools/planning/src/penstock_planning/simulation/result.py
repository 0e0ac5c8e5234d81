"""A run's results, and the figures that summarize them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock_planning.simulation.recorder import Recorder, RequestEnd
from penstock_planning.simulation.scenario import GpuFailure, Scenario

HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class FleetCost:
    """A GPU class's nodes in one region."""

    gpu_class: str
    region: str
    node_s: float
    gpu_busy_s: float
    dollars_per_h: float | None
    """Price per node. None if the price is unknown."""
    most_nodes: int
    """Nodes that quotas and limits must allow for (penstock_planning/autoscaled.py)."""


@dataclass(frozen=True)
class ReplicaRange:
    """Replicas over time across all regions, once the scenario has settled."""

    least: int
    most: int
    mean: float


@dataclass(frozen=True)
class ModelSummary:
    """One model's figures."""

    model: str
    arrived: int
    served: int
    refused: int
    expired: int
    lost: int
    open: int
    deadline_s: float
    p50_s: float | None
    """Seconds until the response, for served requests. None if none were served."""
    p95_s: float | None
    p99_s: float | None
    queue_p95_s: float | None
    replicas: ReplicaRange

    @property
    def within_deadline(self) -> float:
        """Share of all requests that got a response in time."""
        return self.served / max(1, self.arrived - self.open)


@dataclass(frozen=True)
class FlowSummary:
    """Figures for a flow's runs."""

    flow: str
    arrived: int
    served: int
    p50_s: float | None
    """Seconds until the response, for served runs. None if there were none."""
    p95_s: float | None
    gpu_idle_s_per_run: float | None
    """Idle seconds of all paid GPUs, per served run."""


@dataclass(frozen=True)
class GpuFailureSummary:
    """Consequences of a `gpu_failure`, in seconds after the failure.

    None if the event did not occur before the end of the run.
    """

    at_s: float
    alert_s: float | None
    """When the failed GPU alert started firing. Also None if it was already firing."""
    emptied_s: float | None
    """When the last node with a failed GPU had been cordoned and drained."""
    replaced_s: float | None
    """When all of the workers that the autoscaler wanted were ready again on other nodes."""


@dataclass(frozen=True)
class RunSummary:
    """A run's figures."""

    models: tuple[ModelSummary, ...]
    flows: tuple[FlowSummary, ...]
    gpus_most: int
    gpus_to_request: int
    """GPUs for which `penstock deploy plan` requests quota at this load's highest rate."""
    gpus_mean: float
    gpu_hours: float
    gpu_busy_share: float
    """Share of paid GPU time during which the GPU was busy."""
    worker_busy_share: float
    """Share of ready workers' time during which they were busy."""
    worker_work_share: float
    """Share of ready workers' capacity that was used. Lower if some steps were not full."""
    dollars: float | None
    """Cost of GPU nodes. None if a price is unknown."""
    dollars_per_day: float | None
    workers_lost: dict[str, int]
    gpu_failures: tuple[GpuFailureSummary, ...]


@dataclass(frozen=True)
class SimulationResult:
    """A finished run."""

    scenario: Scenario
    deadlines_s: dict[str, float]
    recorder: Recorder
    fleets: tuple[FleetCost, ...]
    emptied_s: tuple[float, ...] = ()
    """Times by which nodes with a failed GPU had been drained."""

    @cached_property
    def summary(self) -> RunSummary:
        """Returns the figures that summarize the run."""
        gpus = self.gpus_over_time
        hours = sum(fleet.node_s for fleet in self.fleets) / HOUR_S
        busy_s = sum(fleet.gpu_busy_s for fleet in self.fleets)
        dollars = self._dollars()
        days = self.scenario.duration_s / DAY_S
        recorder = self.recorder
        return RunSummary(
            models=tuple(self._of_model(model) for model in self.scenario.models),
            flows=tuple(self._of_flow(name, hours * HOUR_S - busy_s) for name in recorder.runs),
            gpus_most=max(gpus.values(), default=0),
            gpus_to_request=sum(fleet.most_nodes for fleet in self.fleets),
            gpus_mean=hours * HOUR_S / self.scenario.duration_s,
            gpu_hours=hours,
            gpu_busy_share=busy_s / (hours * HOUR_S) if hours else 0.0,
            worker_busy_share=recorder.worker_busy_s / max(1e-9, recorder.worker_ready_s),
            worker_work_share=recorder.worker_work_s / max(1e-9, recorder.worker_ready_s),
            dollars=dollars,
            dollars_per_day=None if dollars is None else dollars / days,
            workers_lost=dict(recorder.lost_workers),
            gpu_failures=tuple(self._gpu_failures()),
        )

    @cached_property
    def gpus_over_time(self) -> dict[float, int]:
        """Returns the number of paid nodes, keyed by sample time in seconds."""
        counts: dict[float, int] = {}
        for sample in self.recorder.gpu_samples:
            counts[sample.at_s] = counts.get(sample.at_s, 0) + sample.nodes
        return counts

    def replicas_over_time(self, model: str) -> dict[float, int]:
        """Returns the replicas in all regions, keyed by sample time in seconds."""
        counts: dict[float, int] = {}
        for sample in self.recorder.samples:
            if sample.model == model:
                counts[sample.at_s] = counts.get(sample.at_s, 0) + sample.replicas
        return counts

    def _gpu_failures(self) -> Iterator[GpuFailureSummary]:
        failures = [event for event in self.scenario.events if isinstance(event, GpuFailure)]
        emptied = iter(self.emptied_s)
        for failure in sorted(failures, key=lambda event: event.at_s):
            at_s = failure.at_s
            its_nodes = [
                node_emptied_s
                for _, node_emptied_s in zip(range(failure.count), emptied, strict=False)
            ]
            emptied_s = its_nodes[-1] - at_s if len(its_nodes) == failure.count else None
            alert_s = next(
                (fired_s - at_s for fired_s in self.recorder.alerted_s if fired_s >= at_s), None
            )
            replaced_s = None if emptied_s is None else self._find_all_ready_s(at_s + emptied_s)
            yield GpuFailureSummary(
                at_s, alert_s, emptied_s, None if replaced_s is None else replaced_s - at_s
            )

    def _find_all_ready_s(self, after_s: float) -> float | None:
        """Returns the first sample after a given time in which no workers are missing."""
        missing: dict[float, int] = {}
        for sample in self.recorder.samples:
            if sample.at_s > after_s:
                short = max(0, sample.replicas - sample.ready)
                missing[sample.at_s] = missing.get(sample.at_s, 0) + short
        return next((at_s for at_s, count in missing.items() if count == 0), None)

    def _dollars(self) -> float | None:
        total = 0.0
        for fleet in self.fleets:
            if fleet.dollars_per_h is None:
                return None
            total += fleet.node_s / HOUR_S * fleet.dollars_per_h
        return total

    def _of_model(self, model: str) -> ModelSummary:
        record = self.recorder.models[model]
        ends = record.outcomes
        settled = [
            count
            for at_s, count in self.replicas_over_time(model).items()
            if at_s >= min(self.scenario.settle_s, self.scenario.duration_s)
        ]
        p50_s, p95_s, p99_s = _percentiles(record.answer_s, (50, 95, 99))
        (queue_p95_s,) = _percentiles(record.queue_s, (95,))
        return ModelSummary(
            model=model,
            arrived=record.arrived,
            served=ends[RequestEnd.SERVED],
            refused=ends[RequestEnd.REFUSED],
            expired=ends[RequestEnd.EXPIRED],
            lost=ends[RequestEnd.LOST],
            open=ends[RequestEnd.OPEN],
            deadline_s=self.deadlines_s[model],
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            queue_p95_s=queue_p95_s,
            replicas=ReplicaRange(min(settled), max(settled), sum(settled) / len(settled)),
        )

    def _of_flow(self, flow: str, idle_s: float) -> FlowSummary:
        record = self.recorder.runs[flow]
        served = record.outcomes[RequestEnd.SERVED]
        p50_s, p95_s = _percentiles(record.answer_s, (50, 95))
        per_run = idle_s / served if served else None
        return FlowSummary(flow, record.arrived, served, p50_s, p95_s, per_run)

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self.summary)
        for fields_of_model, summary in zip(fields["models"], self.summary.models, strict=True):
            fields_of_model["within_deadline"] = summary.within_deadline
        return fields


def _percentiles(values: Any, which: tuple[int, ...]) -> tuple[float | None, ...]:
    if not len(values):
        return (None,) * len(which)
    return tuple(float(value) for value in np.percentile(np.asarray(values), which))
