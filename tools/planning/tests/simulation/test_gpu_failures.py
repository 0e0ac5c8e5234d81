"""GPU failures in a simulation: jobs move, nodes drain, an alert fires, and quotas hold."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.world import simulate
from shared.errors import ConfigurationError
from tools.planning.tests.simulation.test_bounds import requested
from tools.planning.tests.simulation.worlds import scenario

pytestmark = pytest.mark.slow(about_s=15)

FAILURE = {"kind": "gpu_failure", "at_s": 600}


def run(
    *, events: list[dict[str, Any]], replicas: int = 10, max_gpus: int | None = None, **load: Any
) -> SimulationResult:
    base_load = {"arrivals": [{"kind": "constant", "per_s": 5.0}], "start_replicas": replicas}
    return simulate(
        scenario(
            entry={"replicas": {"min": replicas, "max": 50}},
            load=base_load | load,
            regions={"us-central1": {"share": 1.0, "max_gpus": max_gpus}},
            duration_s=3600,
            events=events,
        )
    )


def test_jobs_of_a_gpu_that_fails_are_answered_by_others() -> None:
    result = run(events=[FAILURE])
    (model,), (failure,) = result.summary.models, result.summary.gpu_failures
    assert (model.refused, model.expired, model.lost) == (0, 0, 0)
    assert model.served == model.arrived - model.open
    assert result.summary.workers_lost == {"GPU failed": 1}
    # A worker's running jobs wait until it exits, and its place becomes free once its node is
    # drained.
    assert max(result.recorder.models["model"].answer_s) > 20
    ready = {sample.at_s: sample.ready for sample in result.recorder.samples}
    assert {count for at_s, count in ready.items() if 625 <= at_s < 700} == {9}
    # The buffer has room for the next worker, which takes a minute to warm up.
    assert failure.emptied_s == 45
    assert failure.replaced_s == pytest.approx(45 + 60, abs=5)


def test_somebody_is_called_within_two_rounds_of_the_alert() -> None:
    (failure,) = run(events=[FAILURE]).summary.gpu_failures
    assert failure.alert_s is not None
    assert 0 < failure.alert_s <= 120
    # The metrics are also lost for ten minutes, so no alert can fire until they are back.
    away = {"kind": "metrics_outage", "at_s": 590, "for_s": 600, "what": "samples"}
    (blind,) = run(events=[FAILURE, away]).summary.gpu_failures
    assert blind.alert_s is not None
    assert blind.alert_s > 590
    spot = {"kind": "spot_loss", "at_s": 600, "share": 0.1}
    assert run(events=[spot]).recorder.alerted_s == []


def test_no_more_than_a_tenth_of_the_nodes_is_emptied_at_a_time() -> None:
    result = run(events=[FAILURE | {"count": 3}])
    first_s, second_s, third_s = result.emptied_s
    assert first_s == 645
    # A drained node is deleted once it has been idle for ten minutes.
    assert 600 <= second_s - first_s <= 620
    assert 600 <= third_s - second_s <= 620
    (failure,) = result.summary.gpu_failures
    assert failure.emptied_s == third_s - 600
    assert result.summary.models[0].lost == 0


def test_quota_of_the_plan_has_room_for_the_next_node() -> None:
    bound, quota = requested({}, 10.0, seconds_per_item=1.0)
    arrivals = [{"kind": "constant", "per_s": 10.0}]
    result = run(events=[FAILURE], replicas=14, max_gpus=int(quota), arrivals=arrivals)
    (model,), (failure,) = result.summary.models, result.summary.gpu_failures
    assert result.summary.gpus_to_request == quota <= bound
    assert result.summary.gpus_most <= quota
    assert failure.replaced_s is not None
    assert model.within_deadline > 0.999


def test_texts_that_are_written_start_over_elsewhere() -> None:
    steps = {"count": 20, "fixed_s": 0.02, "per_item_s": 0.03, "first_s": 0.1}
    result = run(events=[FAILURE], seconds_per_item=None, steps=steps)
    (model,) = result.summary.models
    assert model.served == model.arrived - model.open
    assert result.summary.workers_lost == {"GPU failed": 1}


def test_node_without_a_gpu_does_not_lose_one() -> None:
    on_cpus = scenario(entry={"gpu": {"type": "none"}}, events=[FAILURE | {"at_s": 60}])
    assert "GPU failed" not in simulate(on_cpus).summary.workers_lost


def test_failure_of_another_class_or_region_is_not_this_ones() -> None:
    assert run(events=[FAILURE | {"gpu": "a100"}]).summary.workers_lost == {}
    with pytest.raises(ConfigurationError, match="region 'europe-west9' does not exist"):
        run(events=[FAILURE | {"region": "europe-west9"}])
    with pytest.raises(ConfigurationError, match="count"):
        run(events=[FAILURE | {"count": 0}])
