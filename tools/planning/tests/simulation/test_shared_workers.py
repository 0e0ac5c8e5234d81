"""Models that share workers, and flows that use them, compared with measurements and plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from infra.kubernetes.deployment import read_gpu_types
from penstock_planning.deploy.plan import make_plan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import Prices
from penstock_planning.deploy.rates import DemandRates, ModelRate
from penstock_planning.simulation.result import FlowSummary, RunSummary
from penstock_planning.simulation.rules import read_deployed_rules
from penstock_planning.simulation.scenario import read_scenario, scenario_of
from penstock_planning.simulation.show import text
from penstock_planning.simulation.world import simulate
from shared.errors import ConfigurationError
from tools.planning.tests.simulation.worlds import ENTRY

pytestmark = pytest.mark.slow(about_s=60)

MEASURED = Path("docs/measurements/recovery.md")
NAMES = ("a-model", "b-model", "c-model")


def measured(figure: str) -> tuple[float, float]:
    """Returns a row of the table in docs/measurements/recovery.md: on one worker, and on three."""
    part = MEASURED.read_text().partition("### A flow of three models on one worker")[2]
    row = re.search(rf"^\| {re.escape(figure)} \| ([\d.]+)[^|]*\| ([\d.]+)", part, re.MULTILINE)
    assert row is not None, figure
    return float(row[1]), float(row[2])


def summary(name: str) -> tuple[RunSummary, FlowSummary]:
    run_summary = simulate(read_scenario(name)).summary
    (flow,) = run_summary.flows
    assert flow.served >= flow.arrived - 3 > 1000
    return run_summary, flow


def test_idle_gpus_are_those_that_were_measured() -> None:
    """Within 10%: 50 runs were measured, at a rate with a random variation of 14%."""
    (shared, on_one), (apart, on_three) = summary("flow-shared"), summary("flow-apart")
    idle = (on_one.gpu_idle_s_per_run or 0.0, on_three.gpu_idle_s_per_run or 0.0)
    assert idle == pytest.approx(measured("GPU-seconds idle per run"), rel=0.1)
    idle_on_one, idle_on_three = measured("GPU-seconds idle per run")
    assert idle[1] / idle[0] == pytest.approx(idle_on_three / idle_on_one, rel=0.1)
    busy = (1 - shared.gpu_busy_share, 1 - apart.gpu_busy_share)
    shares = measured("share of GPU time that is idle")
    assert busy == pytest.approx([share / 100 for share in shares], abs=0.03)
    # With three workers, half of the runs don't wait at all, but with one, they wait for other
    # runs.
    assert 0.6 < (on_three.p50_s or 0.0) < 0.7 < (on_one.p50_s or 0.0) < 1.0


def test_a_flow_is_shown() -> None:
    report = text(simulate(read_scenario("flow-shared", ("duration_s=300",))))
    assert re.search(r"flow +three-steps", report)
    assert "GPU-seconds idle per run" in report


def shared(per_s: float, item_s: float, start: int = 1, **fields: Any) -> dict[str, Any]:
    entry = {name: value for name, value in ENTRY.items() if name != "replicas"}
    resources = {"gpu_memory_bytes": 2**30}
    load = {
        "arrivals": [{"kind": "constant", "per_s": per_s}],
        "seconds_per_item": item_s,
        "measured": "made up",
        "start_replicas": start,
    }
    return {
        "duration_s": 7200,
        "settle_s": 1800,
        "catalog": [entry | {"name": name, "resources": resources} for name in NAMES],
        "workers": [{"name": "all", "models": NAMES, "replicas": {"min": 1, "max": 50}}],
        "models": dict.fromkeys(NAMES, load),
    } | fields


def test_the_autoscaler_follows_the_load_of_all_models_as_planned() -> None:
    """Nine workers are busy, three for each model."""
    scenario = scenario_of(shared(6.0, 0.5, start=14))
    run_summary = simulate(scenario).summary
    catalog, rules = read_deployed_rules(scenario)
    assert [autoscaler.models for autoscaler in rules["us-central1"].values()] == [NAMES]
    rate = ModelRate(mean_per_s=6.0, seconds_per_item=0.5, measured="made up")
    rates = DemandRates(models=dict.fromkeys(NAMES, rate))
    plan = make_plan(catalog, rates, Platform(), Prices(sources={}, prices={}), read_gpu_types(), 1)
    planned = plan.sites[0].workers[0]
    for model in run_summary.models:
        assert model.within_deadline > 0.999
        assert model.replicas == run_summary.models[0].replicas, "they are the same pods"
    assert 9 / 0.9 < run_summary.models[0].replicas.mean <= planned.pods_peak * 1.15
    assert run_summary.models[0].replicas.most <= planned.pods_most
    assert run_summary.gpus_to_request == plan.sites[0].pools[0].nodes_most


def test_drained_and_killed_pods_lose_no_request() -> None:
    events = [
        {"kind": "rollout", "at_s": 600, "model": NAMES[1]},
        {"kind": "set_replicas", "at_s": 1200, "model": NAMES[0], "count": 4, "is_kill": True},
        {"kind": "spot_loss", "at_s": 1500, "share": 0.5},
        {"kind": "gpu_failure", "at_s": 1800},
        {"kind": "set_replicas", "at_s": 2100, "model": NAMES[2], "count": 8},
    ]
    run_summary = simulate(
        scenario_of(shared(2.0, 0.5, start=6, events=events, duration_s=3600))
    ).summary
    for model in run_summary.models:
        assert (model.refused, model.lost) == (0, 0)
        assert model.served + model.open + model.expired == model.arrived
        assert model.within_deadline > 0.98
    assert run_summary.workers_lost["killed"] > 0


def test_continuous_batches_of_shared_workers_are_not_simulated() -> None:
    document = shared(1.0, 0.1)
    steps = {"count": 4, "fixed_s": 0.1, "per_item_s": 0.0}
    load = {"arrivals": [{"kind": "constant", "per_s": 1}], "steps": steps, "measured": "made up"}
    document["models"] = document["models"] | {NAMES[1]: load}
    with pytest.raises(ConfigurationError, match=r"b-model\.steps: models that share workers"):
        simulate(scenario_of(document))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"flows": {"f": {"steps": ["none"], "arrivals": []}}}, "flows.f.arrivals"),
        (
            {"flows": {"f": {"steps": ["no"], "arrivals": [{"kind": "constant", "per_s": 1}]}}},
            "flows.f.steps: model 'no' does not exist",
        ),
        (
            {"models": {NAMES[0]: {"seconds_per_item": 1, "measured": "made up"}}},
            "a-model.arrivals: is required because no flow uses the model",
        ),
    ],
)
def test_wrong_scenarios_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        scenario_of(shared(1.0, 0.1, **fields))
