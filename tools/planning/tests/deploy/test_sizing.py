"""Workers, GPUs, and instances: worked examples, and properties that hold for any rate."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.item_load import batch_items
from shared.errors import ConfigurationError
from tools.planning.tests.deploy.planning import entry, plan_of, rate

rates = st.floats(0.001, 2000)


def test_workers_are_load_over_utilization() -> None:
    # 100 requests/s x 2 items x 60% misses x 10 ms = 1.2 Erlangs; 1.2 / 0.7 = 1.71.
    plan = plan_of(entry(), rates={"texts": rate(100, items_per_request=2, hit_share=0.4)})
    (workers,) = plan.sites[0].workers
    assert workers.computed_peak_per_s == pytest.approx(120)
    assert (workers.processes_peak, workers.pods_peak) == (2, 2)
    assert plan.sites[0].pools[0].nodes_peak == 2


def test_peak_and_mean_are_told_apart() -> None:
    plan = plan_of(entry(), rates={"texts": rate(10, peak_per_s=1000)})
    (pool,) = plan.sites[0].pools
    assert (pool.nodes_mean, pool.nodes_peak) == (1, 15)


def test_a_short_deadline_takes_more_workers() -> None:
    easy = plan_of(entry(), rates={"texts": rate(100)}).sites[0].workers[0]
    # A batch takes 0.16 s and the round trip 0.1 s, which leaves 40 ms to wait.
    hard = (
        plan_of(entry(deadline={"default_s": 0.3}), rates={"texts": rate(100)}).sites[0].workers[0]
    )
    assert (easy.processes_peak, hard.processes_peak) == (2, 6)


def test_distance_to_the_broker_is_held_and_counted() -> None:
    # 16 items take 16 x 3.125 ms = 50 ms; with 1 item per job, that is 320 jobs per second.
    demand = {"texts": rate(100, seconds_per_item=1 / 320)}
    near, usual, far, moon = (
        plan_of(entry(), rates=demand, broker_round_trip_s=trip_s).sites[0].workers[0]
        for trip_s in (0.0, 0.05, 1.0, 5.0)
    )
    assert near.held_jobs == 2 * 16
    # A permit is reused after two round trips and 20 ms. Half of the waiting batch covers 25 ms of
    # that.
    assert usual.held_jobs == 2 * 16 + math.ceil(320 * (0.1 + 0.02 - 0.025))
    assert far.held_jobs == moon.held_jobs == 2 * 16 + 320, "at most a second of work"
    assert usual.repeated_s == pytest.approx(usual.held_jobs / 320)
    assert (near.most_busy, usual.most_busy) == (1.0, 1.0)
    # By Little's law, 352 jobs are held, each for 10.02 s plus a batch time of 50 ms.
    assert moon.most_busy == pytest.approx(352 / (320 * 10.07))
    assert moon.processes_peak > usual.processes_peak
    assert far.answer_s - near.answer_s == pytest.approx(2.0, abs=0.1), (
        "one for the job, one for its reply"
    )


def test_a_broker_that_is_too_far_is_in_the_notes() -> None:
    demand = {"texts": rate(100, seconds_per_item=1 / 320)}
    notes = "\n".join(plan_of(entry(), rates=demand, broker_round_trip_s=5.0).notes)
    assert "texts: the broker is too far (broker_round_trip_s: 5): " in notes
    assert "too far" not in "\n".join(plan_of(entry(), rates=demand).notes)


def test_a_batch_beyond_the_deadline_is_refused_with_the_field() -> None:
    with pytest.raises(ConfigurationError, match="full batch of 16 takes 16 s") as refused:
        plan_of(entry(deadline={"default_s": 10}), rates={"texts": rate(seconds_per_item=1.0)})
    assert refused.value.field == "models.texts.seconds_per_item"


def test_models_of_one_class_share_its_gpus() -> None:
    shared = {"gpu": {"type": "l4", "share": 4}}
    models = [entry(name, **shared) for name in ("one", "two", "three")]
    plan = plan_of(*models, rates={model.name: rate(1) for model in models})
    (pool,) = plan.sites[0].pools
    assert (pool.name, pool.nodes_peak) == ("l4-x4", 1)


def test_places_kept_warm_take_gpus_too() -> None:
    plan = plan_of(entry(gpu={"type": "l4", "share": 2}), rates={"texts": rate(1)}, buffer=2)
    assert plan.sites[0].pools[0].nodes_peak == math.ceil((1 + 2) / 2)


def test_what_was_measured_while_sharing_is_not_shared_again() -> None:
    four = entry(gpu={"type": "l4", "share": 4})
    alone = plan_of(four, rates={"texts": rate(100, seconds_per_item=0.01)}).sites[0].workers[0]
    together = rate(100, seconds_per_item=0.04, measured_share=4, kept_when_sharing=0.5)
    assert (
        plan_of(four, rates={"texts": together}).sites[0].workers[0].processes_peak
        == alone.processes_peak
    )
    costly = plan_of(four, rates={"texts": rate(100, kept_when_sharing=0.5)}).sites[0].workers[0]
    assert costly.service_s == pytest.approx(2 * alone.service_s)


def test_workers_without_a_gpu_run_two_processes_on_general_nodes() -> None:
    plan = plan_of(entry(gpu={"type": "none"}), rates={"texts": rate(400)})
    (site,) = plan.sites
    assert (site.workers[0].processes_peak, site.workers[0].pods_peak) == (6, 3)
    assert (site.pools, site.general_peak) == ((), 1 + 3)


def test_a_model_without_a_rate_has_its_least_replicas() -> None:
    idle = entry("idle", replicas={"min": 2, "max": 4})
    plan = plan_of(entry(), idle, rates={"texts": rate(1)})
    assert [workers.pods_peak for workers in plan.sites[0].workers] == [1, 2]
    assert "no rate is given for idle: planned without load" in plan.notes


IMAGE: dict[str, Any] = {
    "task": "image",
    "batch": {"max_pixel_steps": 12_000_000, "max_items": 16},  # 512 x 512 x 20 steps: 5.2 million
    "dimensions": None,
}


@pytest.mark.parametrize(
    ("fields", "tokens", "items"), [({}, None, 16), ({}, 500.0, 4), (IMAGE, None, 2)]
)
def test_batch_is_what_the_budget_holds(
    fields: dict[str, Any], tokens: float | None, items: int
) -> None:
    assert batch_items(entry(**fields), rate(tokens_per_item=tokens)) == items


TEXT: dict[str, Any] = {
    "task": "text",
    "dimensions": None,
    "batch": {"max_tokens": 8192, "max_items": 16},
    "generation": {"context_tokens": 2048, "default_tokens": 256, "longest_tokens": 1024},
}


def test_texts_are_sized_by_their_tokens() -> None:
    # 8,192 tokens of keys and values have room for 16 texts of 300 tokens, or 8 of 1,000.
    for tokens, items in ((300, 16), (1000, 8)):
        demand = {"texts": rate(10, seconds_per_item=0.2, tokens_per_item=tokens)}
        plan = plan_of(entry(**TEXT), rates=demand)
        (workers,) = plan.sites[0].workers
        assert workers.batch == items
        assert workers.batch_s == pytest.approx(items * 0.2), "each takes a part of the steps"
        # 10 texts per second x 0.2 s = 2 Erlangs; 2 / 0.7 = 2.9.
        assert workers.processes_peak == 3


@given(st.floats(0.1, 100), st.floats(0.02, 0.5), st.sampled_from([4, 16, 64]))
def test_workers_for_texts_follow_from_tokens_of_full_workers(
    load: float, item_s: float, places: int
) -> None:
    tokens = 100
    text = TEXT | {"batch": {"max_tokens": 8192, "max_items": places}}
    text |= {"deadline": {"default_s": 200, "longest_s": 300}}
    demand = rate(load / item_s, seconds_per_item=item_s, tokens_per_item=tokens)
    (workers,) = plan_of(entry(**text), rates={"texts": demand}).sites[0].workers
    wanted = demand.peak * tokens / 0.7
    per_worker = tokens / item_s
    assert workers.processes_peak == max(1, math.ceil(wanted / per_worker * (1 - 1e-12)))


def test_texts_wait_for_a_place_and_not_for_a_batch() -> None:
    # A full worker generates 16 texts in 16 s, so it has room for a new one every second.
    demand = {"texts": rate(0.6, seconds_per_item=1.0)}
    text = plan_of(entry(**TEXT, deadline={"default_s": 30}), rates=demand).sites[0].workers[0]
    assert text.processes_peak == 1
    assert text.answer_s == pytest.approx(16.1, abs=0.2)
    whole = entry(deadline={"default_s": 30})
    assert plan_of(whole, rates=demand).sites[0].workers[0].processes_peak > 1


def test_short_deadlines_take_more_workers_for_texts_too() -> None:
    # 0.68 of a worker; all 16 of its places are occasionally taken, for 3.2 s each.
    demand = {"texts": rate(3.4, seconds_per_item=0.2)}
    easy, hard = (
        plan_of(entry(**TEXT, deadline={"default_s": limit_s}), rates=demand).sites[0].workers[0]
        for limit_s in (60, 3.31)
    )
    assert (easy.processes_peak, hard.processes_peak) == (1, 2)


def test_a_text_model_without_a_gpu_is_one_process_with_all_cores() -> None:
    demand = {"texts": rate(10, seconds_per_item=0.2)}
    (site,) = plan_of(entry(**TEXT, gpu={"type": "none"}), rates=demand).sites
    assert (site.workers[0].processes_peak, site.workers[0].pods_peak) == (3, 3)


def test_instances_of_the_api_hold_what_is_in_flight() -> None:
    # A response takes about 0.1 s of network time and 0.16 s of batch time, so at 1,000 requests
    # per second, about 270 are open.
    plan = plan_of(entry(), rates={"texts": rate(1000)})
    assert plan.sites[0].api_peak == 4
    assert plan_of(entry(), rates={"texts": rate(1000, hit_share=1)}).sites[0].api_peak == 1
    assert (
        plan_of(entry(), rates={"texts": rate(1000)}, api_requests_per_s=100).sites[0].api_peak
        == 10
    )


def test_regions_are_sized_for_their_share() -> None:
    platform = Platform().in_regions(["europe-west4", "us-central1"])
    plan = plan_of(
        entry(),
        rates={"texts": rate(1000)},
        platform=platform,
        regions={"europe-west4": 0.9, "us-central1": 0.1},
    )
    assert [site.pools[0].nodes_peak for site in plan.sites] == [13, 2]


def test_shares_of_other_regions_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="us-east1 differ from the plan's regions: europe-west4"
    ):
        plan_of(entry(), rates={"texts": rate()}, regions={"us-east1": 1.0})


@settings(deadline=None)
@given(rates, st.integers(1, 22), st.floats(0.0001, 0.02))
def test_sharing_never_takes_more_gpus_where_the_deadline_is_long(
    per_s: float, share: int, seconds: float
) -> None:
    demand = {"texts": rate(per_s, seconds_per_item=seconds)}
    long = {"default_s": 200}
    alone = plan_of(entry(deadline=long), rates=demand).sites[0].pools[0].nodes_peak
    shared = (
        plan_of(entry(deadline=long, gpu={"type": "l4", "share": share}), rates=demand)
        .sites[0]
        .pools[0]
        .nodes_peak
    )
    assert 1 <= shared <= alone


@settings(deadline=None)
@given(rates, st.floats(1, 5), st.floats(0, 1))
def test_more_requests_never_take_fewer_of_anything(
    per_s: float, times: float, hits: float
) -> None:
    few, many = (
        plan_of(entry(), rates={"texts": rate(requests_per_s, hit_share=hits)}).sites[0]
        for requests_per_s in (per_s, per_s * times)
    )
    assert few.workers[0].pods_peak <= many.workers[0].pods_peak
    assert few.pools[0].nodes_peak <= many.pools[0].nodes_peak
    assert hits == 1 or few.workers[0].pods_peak >= 1


@settings(deadline=None)
@given(rates, st.floats(0, 1), st.floats(0, 1))
def test_more_hits_never_take_more_workers(per_s: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    many, few = (
        plan_of(entry(), rates={"texts": rate(per_s, hit_share=hits)}).sites[0].workers[0]
        for hits in (low, high)
    )
    assert few.pods_peak <= many.pods_peak
