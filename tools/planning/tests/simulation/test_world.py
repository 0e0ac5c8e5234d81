"""Whole runs: agreement with theory, conservation, determinism, and effects of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_planning.deploy.prices import read_prices
from penstock_planning.deploy.sizing import erlang_c, mean_wait_s
from penstock_planning.simulation.result import SimulationResult
from penstock_planning.simulation.rules import read_deployed_rules
from penstock_planning.simulation.scenario import Scenario
from penstock_planning.simulation.world import World, simulate
from tests.tiers import examples
from tools.planning.tests.simulation.worlds import scenario

FIXED = {"replicas": {"min": 8, "max": 8}}
IDLE_FIRST = {"delivery": "idle_first", "batches_held": 1}


def waits(result: SimulationResult) -> list[float]:
    return list(result.recorder.models["model"].queue_s)


def queue_of(servers: int, load: float, spread: str) -> Scenario:
    """Returns servers that take one second per job, with jobs arriving at random."""
    return scenario(
        entry={"replicas": {"min": servers, "max": servers}},
        load={
            "arrivals": [{"kind": "constant", "per_s": load}],
            "start_replicas": servers,
            "spread": spread,
        },
        broker=IDLE_FIRST,
        api={"max_instances": 100},
        duration_s=20000,
        seed=7,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(1, 0.6), (4, 3.0), (10, 8.0)])
def test_waits_are_those_of_erlang(servers: int, load: float) -> None:
    waits_s = waits(simulate(queue_of(servers, load, "exponential")))
    assert sum(waits_s) / len(waits_s) == pytest.approx(mean_wait_s(servers, load, 1.0), rel=0.1)
    share = sum(wait_s > 1e-9 for wait_s in waits_s) / len(waits_s)
    assert share == pytest.approx(erlang_c(servers, load), rel=0.05)


def test_waits_of_constant_service_are_those_of_pollaczek_and_khinchin() -> None:
    # M/D/1: rho s / (2 (1 - rho)).
    waits_s = waits(simulate(queue_of(1, 0.7, "none")))
    assert sum(waits_s) / len(waits_s) == pytest.approx(0.7 / (2 * 0.3), rel=0.05)


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = simulate(scenario(seed=3)), simulate(scenario(seed=3))
    assert first.as_dict() == second.as_dict()
    assert first.as_dict() != simulate(scenario(seed=4)).as_dict()


JOINING = {
    "seconds_per_item": None,
    "steps": {"count": 20, "fixed_s": 0.02, "per_item_s": 0.03, "first_s": 0.1},
}

streams = st.one_of(
    st.builds(lambda rate: {"kind": "constant", "per_s": rate}, st.floats(0, 12)),
    st.builds(
        lambda before, after: {
            "kind": "step",
            "before_per_s": before,
            "after_per_s": after,
            "at_s": 200,
        },
        st.floats(0, 3),
        st.floats(0, 20),
    ),
)
troubles = st.lists(
    st.sampled_from(
        [
            {"kind": "spot_loss", "at_s": 150, "share": 0.5},
            {"kind": "stock_out", "at_s": 100, "for_s": 150},
            {"kind": "region_loss", "at_s": 120, "for_s": 200, "region": "us-central1"},
            {"kind": "metrics_outage", "at_s": 50, "for_s": 300},
            {"kind": "metrics_outage", "at_s": 50, "for_s": 300, "what": "samples"},
            {"kind": "rollout", "at_s": 130, "model": "model"},
        ]
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=examples(16))
@given(
    streams,
    troubles,
    st.sampled_from(["random", "idle_first"]),
    st.sampled_from([1, 4]),
    st.floats(0, 1),
    st.sampled_from([1, 3]),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_every_request_ends_once(
    stream: dict[str, object],
    events: list[dict[str, object]],
    delivery: str,
    share: int,
    priority_share: float,
    items: int,
    least: int,
    joins: bool,
) -> None:
    regions = {"us-central1": {"share": 0.5}, "europe-west4": {"share": 0.5, "max_gpus": 3}}
    result = simulate(
        scenario(
            entry={
                "batch": {"max_tokens": 64, "max_items": 4},
                "gpu": {"type": "l4", "share": share},
                "replicas": {"min": least, "max": 12},
                "deadline": {"default_s": 20, "longest_s": 20},
            },
            load={
                "arrivals": [stream],
                "batch_lane_share": priority_share,
                "items_per_request": items,
                "start_replicas": None,
            }
            | (JOINING if joins else {}),
            broker={"delivery": delivery},
            cluster={"node_start_s": 40, "pod_start_s": 20, "spot_losses_per_node_day": 200},
            regions=regions,
            events=events,
            duration_s=400,
        )
    )
    (model,) = result.summary.models
    assert model.arrived == model.served + model.refused + model.expired + model.lost + model.open
    record = result.recorder.models["model"]
    assert all(0 <= answer_s <= 20 + 1e-6 for answer_s in record.answer_s)
    assert all(fleet.gpu_busy_s <= fleet.node_s + 1e-6 for fleet in result.fleets)
    assert 0 <= result.summary.worker_work_share <= result.summary.worker_busy_share + 1e-9
    assert result.summary.worker_busy_share <= 1 + 1e-9


def test_without_workers_nothing_is_served() -> None:
    stopped = [{"kind": "stock_out", "at_s": 0, "for_s": 600}]
    result = simulate(
        scenario(
            load={"start_replicas": 0},
            entry={"replicas": {"min": 0, "max": 5}},
            events=stopped,
            cluster={"buffer": 0},
        )
    )
    (model,) = result.summary.models
    assert model.served == 0
    assert model.expired > 0


@pytest.mark.parametrize(("buffer", "start_s"), [(0, 150 + 60), (1, 60)])
def test_from_zero_the_first_request_is_served(buffer: int, start_s: float) -> None:
    stream = {"kind": "constant", "per_s": 0.05, "spacing": "even", "until_s": 21}
    result = simulate(
        scenario(
            load={"arrivals": [stream], "start_replicas": 0, "deadline_s": 300},
            entry={"replicas": {"min": 0, "max": 5}},
            cluster={"buffer": buffer},
        )
    )
    (model,) = result.summary.models
    assert (model.arrived, model.served) == (1, 1)
    # The time for a pod and a node without warm places, plus one scrape and one poll.
    assert model.p50_s is not None
    assert start_s < model.p50_s < start_s + 40


def test_a_rollout_replaces_every_worker() -> None:
    events = [{"kind": "rollout", "at_s": 100, "model": "model"}]
    fixed = {"replicas": {"min": 4, "max": 4}}
    result = simulate(scenario(entry=fixed, events=events, duration_s=3000))
    assert result.summary.workers_lost == {"rollout": 4}
    assert result.summary.models[0].served > 0.99 * result.summary.models[0].arrived


def test_metrics_that_fail_keep_the_workers_until_the_fallback() -> None:
    events = [{"kind": "metrics_outage", "at_s": 0, "for_s": 20}]
    short = simulate(
        scenario(entry={"replicas": {"min": 1, "max": 9}}, events=events, duration_s=20)
    )
    assert short.summary.models[0].replicas.least == 4


def test_jobs_of_a_killed_worker_are_answered_when_their_leases_end() -> None:
    def kill(is_kill: bool) -> SimulationResult:
        event = {"kind": "set_replicas", "at_s": 100, "model": "model", "count": 1}
        return simulate(
            scenario(
                entry={"replicas": {"min": 2, "max": 2}},
                load={"arrivals": [{"kind": "constant", "per_s": 0.8}], "start_replicas": 2},
                events=[event | {"is_kill": is_kill}],
                broker={"lease_s": 20},
                duration_s=300,
            )
        )

    drained, killed = kill(False), kill(True)
    assert killed.summary.models[0].served == drained.summary.models[0].served
    assert max(waits(drained)) < 13
    assert 13 < max(waits(killed)) < 40
    assert killed.summary.workers_lost == {"killed": 1}
    assert [sample.replicas for sample in killed.recorder.samples][-1] == 1


def test_deadlines_are_kept_in_any_order() -> None:
    flow = {"steps": ["model"], "arrivals": [{"kind": "constant", "per_s": 0.1}], "deadline_s": 3}
    result = simulate(
        scenario(
            entry={"replicas": {"min": 1, "max": 1}},
            load={
                "arrivals": [{"kind": "constant", "per_s": 0.1}],
                "seconds_per_item": 2.0,
                "spread": "exponential",
                "start_replicas": 1,
            },
            flows={"flow": flow},
            duration_s=2000,
        )
    )
    answers_s = result.recorder.runs["flow"].answer_s
    assert len(answers_s) > 50
    assert max(answers_s) <= 3 + 1e-9


@pytest.mark.parametrize("count", [0, 2])
def test_the_autoscaler_keeps_what_an_operator_sets(count: int) -> None:
    event = {"kind": "set_replicas", "at_s": 100, "model": "model", "count": count}
    result = simulate(
        scenario(
            entry={"replicas": {"min": 0, "max": 5}},
            load={
                "arrivals": [{"kind": "constant", "per_s": 0.0 if count else 1.0}],
                "start_replicas": 2,
            },
            events=[event],
            duration_s=3600,
        )
    )
    assert {sample.replicas for sample in result.recorder.samples if sample.at_s > 120} == {count}


def test_killing_down_to_more_than_there_are_kills_none() -> None:
    event = {"kind": "set_replicas", "at_s": 100, "model": "model", "count": 3, "is_kill": True}
    result = simulate(
        scenario(
            entry={"replicas": {"min": 4, "max": 4}},
            load={"start_replicas": 4},
            events=[event, event | {"at_s": 200, "count": 5}],
        )
    )
    assert result.summary.workers_lost == {"killed": 1}


def fast_and_far(round_trip_s: float, **broker: object) -> Scenario:
    """Returns a scenario with one overloaded worker, far from its broker."""
    return scenario(
        entry={
            "batch": {"max_tokens": 2048, "max_items": 16},
            "deadline": {"default_s": 2, "longest_s": 300},
            "replicas": {"min": 1, "max": 1},
        },
        load={
            "arrivals": [{"kind": "constant", "per_s": 640}],
            "seconds_per_item": 1 / 320,
            "start_replicas": 1,
        },
        broker={"round_trip_s": round_trip_s} | broker,
        duration_s=20,
    )


def served(given: Scenario) -> int:
    return simulate(given).summary.models[0].served


def test_a_worker_far_from_its_broker_does_as_much_as_one_near_it() -> None:
    near = served(fast_and_far(0.0))
    assert served(fast_and_far(0.1)) >= 0.95 * near
    least = served(fast_and_far(0.1, batches_held=2))
    assert least <= 0.6 * near, "else the distance would cost nothing here"


def test_at_most_a_second_of_work_is_held_beyond_two_batches() -> None:
    distant = fast_and_far(5.0)
    catalog, rules = read_deployed_rules(distant)
    world = World(distant, catalog, rules, read_prices())
    world.env.run(until=distant.duration_s)
    (replicas,) = world.parts.replicas.values()
    assert replicas.workers[0].most_held[0] == 2 * 16 + 320
