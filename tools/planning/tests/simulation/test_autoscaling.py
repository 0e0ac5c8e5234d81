"""The deployed rules keep decision 43's promises under load."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_planning.simulation.recorder import RequestEnd
from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.scenario import read_scenario
from penstock_planning.simulation.world import simulate

pytestmark = pytest.mark.slow(about_s=12)

NODE_S, POD_S, SEEN_S = 150.0, 60.0, 60.0
"""Startup times of a node and a pod in the shipped scenarios, plus the autoscaler's reaction time.
"""
SMALL = (
    "models.sd-1-5.arrivals=[{kind: constant, per_s: 5}]",
    "models.sd-1-5.start_replicas=10",
)
"""A quarter of the shipped load, which takes a quarter of the time to simulate."""


def run(name: str, *changes: str, events: list[dict[str, Any]] | None = None) -> SimulationResult:
    all_changes = changes if events is None else (*changes, f"events={events}")
    return simulate(read_scenario(name, tuple(all_changes)))


@pytest.mark.parametrize(
    ("name", "changes", "most_p95_s"),
    [
        ("sd-constant", SMALL, 6.0),
        ("sd-nodes-at-once", SMALL, 6.0),
        (
            "embeddings-constant",
            (
                "models.embedder.arrivals=[{kind: constant, per_s: 45}]",
                "models.embedder.seconds_per_item=0.1",
            ),
            3.0,
        ),
    ],
)
def test_constant_load_has_constant_workers(
    name: str, changes: tuple[str, ...], most_p95_s: float
) -> None:
    summary = run(name, "duration_s=1500", *changes).summary
    (model,) = summary.models
    assert model.replicas.least >= 0.9 * model.replicas.mean
    assert model.replicas.most <= 1.1 * model.replicas.mean
    assert model.p95_s is not None
    assert model.p95_s < most_p95_s
    # With so few GPUs, the ones kept warm for one more worker make up a tenth of the total.
    assert summary.worker_busy_share >= 0.6
    assert model.served == model.arrived - model.open


@pytest.mark.parametrize(
    "outage",
    [
        {"what": "endpoint"},
        {"what": "samples"},
        {"what": "samples", "metrics": ["penstock_worker_"]},
        {"what": "samples", "metrics": ["penstock_api_"]},
        {"what": "samples", "metrics": ["pubsub_"]},
    ],
)
def test_lost_metrics_take_no_worker(outage: dict[str, Any]) -> None:
    away = {"kind": "metrics_outage", "at_s": 300, "for_s": 1200} | outage
    result = run("sd-constant", "duration_s=1800", *SMALL, events=[away])
    assert result.summary.workers_lost == {}
    # Nor are any GPUs paid for without being used.
    (model,) = result.summary.models
    assert model.replicas.most <= 1.2 * model.replicas.mean


def test_step_of_four_is_refused_only_while_nodes_start() -> None:
    at_s = 900.0
    step = f"{{kind: step, before_per_s: 5, after_per_s: 20, at_s: {at_s:g}}}"
    result = run(
        "sd-step",
        "duration_s=2400",
        f"models.sd-1-5.arrivals=[{step}]",
        "models.sd-1-5.start_replicas=15",
    )
    record = result.recorder.models["sd-1-5"]
    assert record.outcomes[RequestEnd.EXPIRED] == 0
    assert record.outcomes[RequestEnd.REFUSED] > 0
    assert at_s < min(record.ended_s)
    assert max(record.ended_s) < at_s + NODE_S + POD_S + SEEN_S
    (model,) = result.summary.models
    # Work for 40 workers at the target utilization, plus the backlog.
    assert model.replicas.most < 1.3 * 40 / 0.7


def test_wave_takes_what_its_work_takes() -> None:
    # The shipped wave is ten times as large and five times as slow.
    wave = "{kind: wave, least_per_s: 0.4, most_per_s: 4, period_s: 5400}"
    summary = run(
        "sd-wave",
        "duration_s=5400",
        f"models.sd-1-5.arrivals=[{wave}]",
        "models.sd-1-5.start_replicas=2",
    ).summary
    (model,) = summary.models
    assert model.refused + model.expired < 0.001 * model.arrived
    assert summary.worker_busy_share > 0.55


def test_batch_priority_does_not_buy_what_callers_need() -> None:
    def most(share: float) -> int:
        changes = ("duration_s=1500", *SMALL, f"models.sd-1-5.batch_lane_share={share}")
        return run("sd-constant", *changes).summary.models[0].replicas.most

    assert most(0.5) <= 0.6 * most(0.0)


def test_batch_priority_keeps_no_workers_that_callers_left() -> None:
    step = "{kind: step, before_per_s: 10, after_per_s: 2, at_s: 600}"
    result = run(
        "sd-constant",
        "duration_s=2400",
        f"models.sd-1-5.arrivals=[{step}]",
        "models.sd-1-5.batch_lane_share=0.5",
        "models.sd-1-5.start_replicas=20",
    )
    last = result.recorder.samples[-1]
    # Callers send enough work for two workers at 0.7. The same amount of work at `batch` priority
    # waits for idle workers.
    assert last.replicas <= 4


def test_callers_in_a_hurry_start_a_worker_too() -> None:
    # None of them waits until the next scrape.
    result = run(
        "sd-constant",
        "duration_s=900",
        "catalog.0.replicas.min=0",
        "models.sd-1-5.arrivals=[{kind: constant, per_s: 0.02, spacing: even}]",
        "models.sd-1-5.start_replicas=0",
        "models.sd-1-5.deadline_s=3",
    )
    assert result.summary.models[0].served > 0


def test_nobody_asking_leaves_no_worker() -> None:
    result = run(
        "sd-constant",
        "duration_s=1800",
        "catalog.0.replicas.min=0",
        "models.sd-1-5.arrivals=[{kind: constant, per_s: 1, until_s: 300}]",
        "models.sd-1-5.start_replicas=3",
    )
    assert result.recorder.samples[-1].replicas == 0


def test_region_without_gpus_gets_the_workers_of_the_other() -> None:
    # The first region gets work for eight workers, but only two GPUs. Arrivals cause the other
    # region to request three workers, but it ends up doing the rest of the work for ten workers.
    result = run(
        "sd-constant",
        "duration_s=3000",
        *SMALL,
        "models.sd-1-5.start_replicas=1",
        "regions={us-central1: {share: 0.8, max_gpus: 1}, europe-west4: {share: 0.2}}",
    )
    last = {sample.region: sample.ready for sample in result.recorder.samples[-2:]}
    assert last["us-central1"] <= 2
    assert last["europe-west4"] >= 8
    record = result.recorder.models["sd-1-5"]
    assert max(record.ended_s) < 2400
    assert record.outcomes[RequestEnd.EXPIRED] == 0
