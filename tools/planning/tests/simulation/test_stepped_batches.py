"""Workers whose items join and leave between steps, with results calculated by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.world import simulate
from shared.errors import ConfigurationError
from tools.planning.tests.simulation.worlds import scenario

PLACES, STEPS = 4, 100
FIXED_S, EACH_S, FIRST_S = 0.02, 0.005, 0.1
FULL_S = FIRST_S + STEPS * (FIXED_S + PLACES * EACH_S) / PLACES
"""Seconds of a full worker's time that an item takes."""
TRIP_S = 0.1


def run(
    workers: int, arrivals: dict[str, Any], *, places: int = PLACES, **fields: Any
) -> SimulationResult:
    entry = {
        "batch": {"max_tokens": 4096, "max_items": places},
        "replicas": {"min": workers, "max": workers},
        "gpu": {"type": "l4", "share": fields.pop("share", 1)},
    }
    steps = {"count": STEPS, "fixed_s": FIXED_S, "per_item_s": EACH_S, "first_s": FIRST_S}
    load = {
        "arrivals": [arrivals],
        "seconds_per_item": None,
        "steps": steps | {"spread": "none"},
        "start_replicas": workers,
    } | fields.pop("load", {})
    return simulate(scenario(entry=entry, load=load, **fields))


def test_lone_items_take_all_of_their_steps() -> None:
    result = run(1, {"kind": "constant", "per_s": 0.1, "spacing": "even"})
    (model,) = result.summary.models
    assert model.p50_s == pytest.approx(TRIP_S + FIRST_S + STEPS * (FIXED_S + EACH_S))
    # Each item is worth a tenth of a full worker's second per second.
    assert result.summary.worker_work_share == pytest.approx(0.1 * FULL_S, rel=0.03)


def test_a_full_worker_ends_items_as_fast_as_its_steps_say() -> None:
    result = run(
        1,
        {"kind": "constant", "per_s": 3 / FULL_S},
        duration_s=2000,
        api={"max_instances": 1, "concurrency": 30},
    )
    (model,) = result.summary.models
    assert model.served / 2000 == pytest.approx(1 / FULL_S, rel=0.03)
    assert result.summary.worker_work_share == pytest.approx(1.0, abs=0.02)


def test_one_place_is_a_worker_of_whole_batches() -> None:
    arrivals = {"kind": "constant", "per_s": 0.3}
    item_s = FIRST_S + STEPS * (FIXED_S + EACH_S)
    joining = run(1, arrivals, places=1, duration_s=3000).as_dict()
    load = {"seconds_per_item": item_s, "steps": None}
    whole = run(1, arrivals, places=1, duration_s=3000, load=load).as_dict()
    assert joining["models"][0]["served"] == whole["models"][0]["served"]
    for figure in ("p50_s", "p95_s", "queue_p95_s"):
        assert joining["models"][0][figure] == pytest.approx(whole["models"][0][figure])


def test_workers_on_one_gpu_slow_each_other() -> None:
    arrivals = {"kind": "constant", "per_s": 0.8 / FULL_S}
    alone, shared = run(2, arrivals), run(2, arrivals, share=2)
    (apart,), (together,) = alone.summary.models, shared.summary.models
    assert apart.p50_s is not None
    assert together.p50_s is not None
    assert together.p50_s > 1.2 * apart.p50_s


def test_batch_priority_leaves_places_to_callers() -> None:
    result = run(1, {"kind": "constant", "per_s": 2 / FULL_S}, load={"batch_lane_share": 0.75})
    waits = result.recorder.models["model"].queue_s
    (model,) = result.summary.models
    assert model.served > 0
    assert sorted(waits)[len(waits) // 10] < 1.0


def test_a_model_takes_time_in_one_way() -> None:
    with pytest.raises(
        ConfigurationError, match="exactly one of seconds_per_item, seconds_per_work and"
    ):
        scenario(load={"seconds_per_item": None})
