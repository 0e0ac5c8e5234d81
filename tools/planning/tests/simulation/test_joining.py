"""The deployed rules keep decision 73's promises when items join between steps."""

from __future__ import annotations

import math

import pytest

from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.scenario import read_scenario
from penstock_planning.simulation.world import simulate

pytestmark = pytest.mark.slow(about_s=10)

START_S = 150.0 + 60.0 + 60.0 + 60.0 + 60.0
"""The startup times of a node and a pod, the time the autoscaler takes to notice the need and order
them, a step with more than four workers, and the deadline of the texts that arrived earlier.
"""


def run(name: str, *changes: str) -> SimulationResult:
    return simulate(read_scenario(name, changes))


def wanted(result: SimulationResult, model: str, per_s: float) -> float:
    """Returns the number of workers that can do the work with full steps at 0.7 utilization."""
    steps = result.scenario.models[model].steps
    assert steps is not None
    places = {"writer": 16, "sd-1-5": 8}[model]
    return per_s * steps.item_s(places) / 0.7


@pytest.mark.parametrize("per_s", [0.2, 2.0, 9.0])
@pytest.mark.parametrize("start", [1, 8])
def test_texts_have_the_workers_that_can_write_them_in_company(per_s: float, start: int) -> None:
    result = run(
        "text-constant",
        "duration_s=2400",
        "settle_s=1500",
        f"models.writer.arrivals=[{{kind: constant, per_s: {per_s}}}]",
        f"models.writer.start_replicas={start}",
    )
    (model,) = result.summary.models
    needed = math.ceil(wanted(result, "writer", per_s))
    assert needed <= model.replicas.least
    assert model.replicas.most <= max(needed + 1, 1.2 * needed)
    # One worker can't do the work of nine until others have started.
    late = [at_s for at_s in result.recorder.models["writer"].ended_s if at_s > START_S]
    assert len(late) < 0.001 * model.arrived


@pytest.mark.parametrize("places", [2, 4])
def test_long_contexts_that_fill_the_cache_get_as_many_workers_as_full_slots(
    places: int,
) -> None:
    """Their keys and values take up the whole budget long before all 16 slots are in use."""
    result = run(
        "text-constant",
        "duration_s=2400",
        "settle_s=1500",
        "models.writer.arrivals=[{kind: constant, per_s: 2}]",
        f"catalog.0.batch.max_tokens={2048 * places}",
        "models.writer.tokens_per_item=2048",
        "models.writer.start_replicas=4",
    )
    (model,) = result.summary.models
    steps = result.scenario.models["writer"].steps
    assert steps is not None
    needed = math.ceil(2 * steps.item_s(places) / 0.7)
    assert needed <= model.replicas.least
    assert model.replicas.most <= max(needed + 1, 1.25 * needed)
    late = [at_s for at_s in result.recorder.models["writer"].ended_s if at_s > START_S]
    assert len(late) < 0.001 * model.arrived


def test_four_times_the_texts_get_workers_within_minutes() -> None:
    at_s = 600.0
    step = f"{{kind: step, before_per_s: 3, after_per_s: 12, at_s: {at_s:g}}}"
    result = run(
        "text-step",
        "duration_s=2400",
        f"models.writer.arrivals=[{step}]",
        "models.writer.start_replicas=2",
    )
    (model,) = result.summary.models
    needed = math.ceil(wanted(result, "writer", 12))
    assert needed <= model.replicas.most <= 1.3 * needed
    last = max(result.recorder.models["writer"].ended_s, default=at_s)
    assert last < at_s + START_S


def test_images_that_join_count_as_those_that_do_not() -> None:
    """A single image takes up nearly all of its GPU, so most of its steps count as work."""
    result = run(
        "sd-joining",
        "duration_s=1800",
        "models.sd-1-5.arrivals=[{kind: constant, per_s: 3}]",
        "models.sd-1-5.start_replicas=8",
    )
    (model,) = result.summary.models
    needed = math.ceil(wanted(result, "sd-1-5", 3))
    assert needed <= model.replicas.least
    assert model.replicas.most <= needed + 2
    # Busy workers must have the same effect even without arrivals, as in a region whose callers use
    # other regions.
    assert result.summary.worker_busy_share == pytest.approx(
        result.summary.worker_work_share, rel=0.1
    )


def test_texts_stop_as_many_workers_as_are_too_many() -> None:
    result = run(
        "text-constant",
        "duration_s=2400",
        "models.writer.arrivals=[{kind: constant, per_s: 2}]",
        "models.writer.start_replicas=20",
    )
    # 20 workers with one text each are busy nearly all the time, although two could do the work.
    assert result.recorder.samples[-1].replicas <= 3
