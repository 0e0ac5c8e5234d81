"""Quotas and limits from `penstock deploy plan` cover what the simulated autoscaler requests."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.simulation.result import RunSummary
from penstock_planning.simulation.scenario import read_scenario
from penstock_planning.simulation.streams import Burst, Constant, Trace, peak_per_s
from penstock_planning.simulation.world import simulate
from shared.models.catalog import Model
from tools.planning.tests.deploy.planning import plan_of, rate
from tools.planning.tests.simulation.worlds import ENTRY, scenario

pytestmark = pytest.mark.slow(about_s=37)

REGION = "us-central1"
SHARED = {"gpu": {"type": "l4", "share": 4}}


def requested(entry: dict[str, Any], per_s: float, **given: Any) -> tuple[int, float]:
    """Returns the GPUs that the plan requests at a given rate: the pool's limit and the quota."""
    model = Model.model_validate(ENTRY | entry)
    plan = plan_of(
        model,
        rates={model.name: rate(per_s, **given)},
        platform=Platform.model_validate({"regions": {REGION: {}}}),
        buffer=1,
    )
    needed = {quota.name: quota.needed for quota in plan.quotas}
    return plan.platform.nodes.max_gpus, needed["PREEMPTIBLE_NVIDIA_L4_GPUS"]


@pytest.mark.parametrize(
    ("entry", "load"),
    [
        ({}, {"arrivals": [{"kind": "constant", "per_s": 10}], "seconds_per_item": 1.0}),
        ({}, {"arrivals": [{"kind": "constant", "per_s": 1}], "seconds_per_item": 8.0}),
        (
            {"batch": {"max_tokens": 2048, "max_items": 16}} | SHARED,
            {
                "arrivals": [{"kind": "constant", "per_s": 8}],
                "seconds_per_item": 0.1,
                "items_per_request": 4,
            },
        ),
    ],
    ids=["many", "few that take long", "shared GPUs"],
)
def test_plan_and_simulation_ask_for_the_same_gpus(
    entry: dict[str, Any], load: dict[str, Any]
) -> None:
    (stream,) = load["arrivals"]
    summary = simulate(
        scenario(entry=entry, load=load | {"start_replicas": 12}, duration_s=2400)
    ).summary
    options = {name: value for name, value in load.items() if name != "arrivals"}
    bound, quota = requested(entry, stream["per_s"], **options)
    assert summary.gpus_to_request == quota <= bound
    assert summary.gpus_most <= quota <= 1.5 * summary.gpus_most + 2


def test_worker_without_a_gpu_counts_once_for_both_processes() -> None:
    # Work for 12 processes, on pods with two processes each. The autoscaler used to request 18
    # pods.
    load = {"arrivals": [{"kind": "constant", "per_s": 12}], "start_replicas": 6}
    entry = {"gpu": {"type": "none"}, "replicas": {"min": 2, "max": 50}}
    (summary,) = simulate(
        scenario(entry=entry, load=load, duration_s=3600, settle_s=900)
    ).summary.models
    assert summary.within_deadline == 1.0
    assert 6 / 0.9 <= summary.replicas.mean <= 6 / 0.7 * 1.15
    model = Model.model_validate(ENTRY | entry)
    plan = plan_of(
        model,
        rates={model.name: rate(12, seconds_per_item=1.0)},
        platform=Platform.model_validate({"regions": {REGION: {}}}),
    )
    (workers,) = plan.sites[0].workers
    assert summary.replicas.mean <= workers.pods_peak * 1.15
    assert summary.replicas.most <= workers.pods_most <= 1.5 * summary.replicas.most + 2


@pytest.mark.parametrize("share", [1, 4])
def test_plan_and_simulation_allow_for_the_io_process(share: int) -> None:
    """Each worker's GPU computes 20 items/s, or its part 5/s, but its I/O process prepares 2/s."""
    seconds = {"seconds_per_item": 0.05, "host_seconds_per_item": 0.5}
    entry = {"gpu": {"type": "l4", "share": share}, "replicas": {"min": 4, "max": 4}}

    def run(per_s: float) -> RunSummary:
        load = seconds | {"arrivals": [{"kind": "constant", "per_s": per_s}]}
        return simulate(scenario(entry=entry, load=load, duration_s=1200)).summary

    enough, too_little = run(6.0), run(12.0)
    assert enough.models[0].within_deadline == 1.0
    assert 0.6 < too_little.models[0].within_deadline < 8 / 12 * 1.05
    assert enough.gpus_to_request == requested(entry, 6.0, **seconds)[1]


def test_a_step_fits_too() -> None:
    arrivals = [{"kind": "step", "before_per_s": 4, "after_per_s": 12, "at_s": 300}]
    load = {"arrivals": arrivals, "start_replicas": 6}
    summary = simulate(scenario(entry={"replicas": {"max": 500}}, load=load)).summary
    quota = requested({}, 12.0, seconds_per_item=1.0)[1]
    assert summary.gpus_to_request == quota
    assert 12 / 0.7 < summary.gpus_most <= quota


# 144,000 and 162,000 requests.
@pytest.mark.parametrize(("name", "per_s"), [("sd-constant", 20.0), ("sd-step", 40.0)])
def test_shipped_loads_fit(name: str, per_s: float) -> None:
    summary = simulate(read_scenario(name)).summary
    entry = {"replicas": {"min": 2, "max": 150}}
    quota = requested(entry, per_s, seconds_per_item=2.0)[1]
    assert summary.gpus_to_request == quota
    # The plan used to request 59 nodes for sd-constant, but the simulation reached 62.
    assert summary.gpus_most <= quota <= 1.2 * summary.gpus_most


def test_highest_rate_is_that_of_all_streams_together(tmp_path: Any) -> None:
    streams = (
        Constant(per_s=5),
        Constant(per_s=3, from_s=0, until_s=50),
        Burst(kind="burst", base_per_s=1, burst_per_s=7, at_s=100, for_s=20),
    )
    assert peak_per_s(streams, 600.0) == pytest.approx(5 + 7)
    assert peak_per_s(streams[:2], 600.0) == pytest.approx(8)
    trace = tmp_path / "trace.jsonl"
    times = [*range(0, 360, 9), *range(180, 270)]
    trace.write_text("".join(f'{{"at_s": {at_s}}}\n' for at_s in sorted(times)))
    recorded = Trace(kind="trace", file=trace)
    assert peak_per_s((recorded,), 360.0) == pytest.approx(1 + 1 / 9, rel=0.01)
    assert peak_per_s((recorded, Constant(per_s=2)), 360.0) == pytest.approx(3 + 1 / 9, rel=0.01)
