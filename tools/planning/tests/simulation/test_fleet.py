"""Nodes: ordered for pending pods, kept warm, shared, lost, deleted."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.world import simulate
from tools.planning.tests.simulation.worlds import scenario

STARTS = {"node_start_s": 100, "pod_start_s": 10}


def run(
    *,
    replicas: int = 1,
    share: int = 1,
    seconds: float = 1.0,
    per_s: float = 0.2,
    cluster: dict[str, Any] | None = None,
    **fields: Any,
) -> SimulationResult:
    """Runs a fixed number of workers, whose pods are requested at the start."""
    return simulate(
        scenario(
            entry={
                "replicas": {"min": replicas, "max": replicas},
                "gpu": {"type": "l4", "share": share},
            },
            load={
                "arrivals": [{"kind": "constant", "per_s": per_s, "spacing": "even"}],
                "seconds_per_item": seconds,
                "start_replicas": None,
            },
            cluster=STARTS | (cluster or {}),
            **fields,
        )
    )


def nodes(result: SimulationResult) -> dict[float, int]:
    return result.gpus_over_time


def test_a_node_for_each_worker_and_the_buffer() -> None:
    assert set(nodes(run(replicas=3, cluster={"buffer": 2})).values()) == {5}


def test_workers_share_a_gpu_and_its_time() -> None:
    # Two workers share one GPU, each taking one second per job, so two jobs take two seconds.
    alone = run(replicas=2, per_s=10, cluster={"buffer": 0})
    shared = run(replicas=2, share=2, per_s=10, cluster={"buffer": 0})
    assert set(nodes(alone).values()) == {2}
    assert set(nodes(shared).values()) == {1}
    (model_alone,), (model_shared,) = alone.summary.models, shared.summary.models
    assert model_shared.served == pytest.approx(model_alone.served / 2, rel=0.05)
    assert shared.fleets[0].gpu_busy_s <= shared.fleets[0].node_s


def test_a_worker_with_idle_neighbors_has_the_whole_gpu() -> None:
    shared = run(replicas=4, share=4, per_s=0.2, cluster={"buffer": 0})
    assert shared.summary.models[0].p95_s == pytest.approx(1.1)


def test_a_lost_worker_gives_its_jobs_back() -> None:
    # Jobs of 60 s take longer than the notice period. The replacement workers arrive with new
    # nodes.
    lost = [{"kind": "spot_loss", "at_s": 20, "share": 1.0}]
    stream = {"kind": "constant", "per_s": 0.5, "spacing": "even", "until_s": 5}
    result = simulate(
        scenario(
            entry={"replicas": {"min": 2, "max": 2}},
            load={
                "arrivals": [stream],
                "seconds_per_item": 60,
                "deadline_s": 400,
                "start_replicas": 2,
            },
            cluster=STARTS | {"buffer": 0},
            events=lost,
        )
    )
    (model,) = result.summary.models
    assert result.summary.workers_lost == {"spot": 2}
    assert (model.arrived, model.served) == (2, 2)


def test_a_quota_bounds_nodes() -> None:
    regions = {"us-central1": {"share": 1.0, "max_gpus": 2}}
    lost = [{"kind": "spot_loss", "at_s": 20, "share": 1.0}]
    result = run(replicas=5, regions=regions, events=lost, duration_s=400)
    assert list(nodes(result).values())[-1] == 2


def test_no_node_comes_while_they_are_out_of_stock() -> None:
    events = [
        {"kind": "spot_loss", "at_s": 20, "share": 1.0},
        {"kind": "stock_out", "at_s": 10, "for_s": 300, "gpu": "l4"},
    ]
    result = run(replicas=2, events=events, cluster={"buffer": 0}, duration_s=600)
    counts = nodes(result)
    assert {count for at_s, count in counts.items() if 60 < at_s < 300} == {0}
    assert list(counts.values())[-1] == 2


def test_an_idle_node_is_deleted() -> None:
    burst = {"kind": "burst", "burst_per_s": 20, "at_s": 100, "for_s": 200}
    result = simulate(
        scenario(
            entry={"replicas": {"min": 1, "max": 9}},
            load={"arrivals": [burst], "start_replicas": 1},
            cluster=STARTS | {"node_idle_s": 120},
            duration_s=3600,
        )
    )
    assert result.summary.gpus_most > 4
    assert list(nodes(result).values())[-1] == 2, "one worker and the buffer"
