"""The autoscaler's queries over time series written by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.kubernetes.autoscaling import MAX_STEP, TriggerQueries
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.timeseries import TimeSeries
from shared.models.catalog_file import read_catalog

MODEL = read_catalog(Path("models.yaml")).find("stable-diffusion-tiny")
GUESS_S = MODEL.definition.first_guesses.item_s
QUERIES = TriggerQueries([MODEL], "images", "here", 1)
OF_TWO = TriggerQueries([MODEL], "images", "here", 2)
"""Queries for workers with two processes."""
NOW_S = 3000.0


class World:
    """Time series as produced by two API instances and some workers, with a sample every 10 s."""

    def __init__(self) -> None:
        self.series = TimeSeries()

    def api(
        self, *, per_s: float = 0.0, in_flight: float = 0.0, priority: str = "interactive"
    ) -> World:
        labels = (("lane", priority), ("location", "here"), ("model", MODEL.name))
        for at_s in range(0, int(NOW_S) + 1, 10):
            for name, value in (
                ("items_admitted_total", per_s * at_s),
                ("items_shed_total", 0.0),
                ("items_in_flight", in_flight),
            ):
                self.series.append(f"penstock_api_{name}", labels, float(at_s), value)
        return self

    def worker(
        self, pod: str, busy: float, *, until_s: float = NOW_S, region: str = "here"
    ) -> World:
        for at_s in range(0, int(until_s) + 1, 10):
            labels = (
                ("lane", "interactive"),
                ("location", region),
                ("pod", pod),
                ("worker", "images"),
            )
            self.series.append("penstock_worker_busy_ratio", labels, float(at_s), busy)
        return self

    def items(
        self, *, per_s: float, seconds: float, spare: float | None, region: str = "here"
    ) -> World:
        """Adds a worker's finished items, with the model seconds and spare seconds for each."""
        labels = (("location", region), ("pod", "a"), ("worker", "images"))
        counters = {"batch_items_sum": 1.0, "inference_seconds_sum": seconds}
        if spare is not None:
            counters["spare_seconds_total"] = spare
        for at_s in range(0, int(NOW_S) + 1, 10):
            for name, factor in counters.items():
                value = at_s * per_s * factor
                self.series.append(f"penstock_worker_{name}", labels, float(at_s), value)
        return self

    def ask(self, query: str) -> float | None:
        vector = PromQuery(query).value(self.series, NOW_S)
        assert isinstance(vector, dict)
        return vector.get(())


def test_workers_lost_from_sight_are_no_idle_workers() -> None:
    world = World().api(per_s=1.0).api(priority="batch")
    assert world.ask(QUERIES.work()) is None
    assert world.worker("a", 0.9).ask(QUERIES.work()) == 1.0


def test_no_workers_are_none_where_nobody_asks() -> None:
    assert World().api().api(priority="batch").ask(QUERIES.work()) == 0.0


def test_lost_metrics_of_the_api_are_not_silence() -> None:
    assert World().worker("a", 0.9).ask(QUERIES.work()) is None
    assert World().worker("a", 0.9).ask(QUERIES.arrivals()) is None


def test_worker_that_is_gone_is_not_counted() -> None:
    world = World().api(per_s=0.1).api(priority="batch")
    world.worker("a", 0.9).worker("b", 0.9, until_s=NOW_S - 90)
    assert world.ask(QUERIES.work()) == 1.0


def test_each_region_answers_for_its_own_workers() -> None:
    world = World().api(per_s=0.1).api(priority="batch")
    world.worker("a", 0.9).worker("b", 0.9, region="elsewhere")
    assert world.ask(QUERIES.work()) == 1.0


def test_what_waits_takes_workers_by_its_deadline() -> None:
    world = World().api(per_s=0.1, in_flight=90).worker("a", 0.9)
    work = world.api(priority="batch", in_flight=0).ask(QUERIES.work())
    assert work == 1.0 + 90 * GUESS_S / MODEL.deadline.default_s


def test_callers_who_hang_up_buy_no_gpus() -> None:
    # A thousand items per second arrive, and no worker ever finishes any of them.
    assert World().api(per_s=1000.0).ask(QUERIES.arrivals()) == MAX_STEP
    busy = World().api(per_s=1000.0).worker("a", 1.0)
    assert busy.ask(QUERIES.arrivals()) == 2 * MAX_STEP


def test_arrivals_are_seconds_of_work() -> None:
    work = World().api(per_s=0.5).ask(QUERIES.arrivals())
    assert work is not None
    assert abs(work - 0.5 * GUESS_S) < 1e-9


def test_worker_with_two_processes_does_twice_as_much() -> None:
    world = World().api(per_s=0.5, in_flight=90).api(priority="batch").worker("a", 0.9)
    world.items(per_s=0.5, seconds=3.0, spare=None)
    assert world.ask(OF_TWO.arrivals()) == pytest.approx(0.5 * 3.0 / 2)
    waiting = 90 * 3.0 / MODEL.deadline.default_s
    assert world.ask(QUERIES.work()) == pytest.approx(1.0 + waiting)
    # The busy fraction is per worker, no matter how many processes the worker has. Only the seconds
    # are counted per process.
    assert world.ask(OF_TWO.work()) == pytest.approx(1.0 + waiting / 2)
    of_one, of_two = QUERIES.messages(), OF_TWO.messages()
    assert of_one is not None
    assert of_two == f"{of_one.rpartition(' * (')[0]} * (({of_one.rpartition(' * (')[2][:-1]}) / 2)"
    guess = World().api(per_s=0.5).ask(OF_TWO.arrivals())
    assert guess == pytest.approx(0.5 * GUESS_S / 2)


@pytest.mark.parametrize(("spare", "seconds"), [(0.0, 3.0), (2.5, 0.5), (None, 3.0)])
def test_items_count_for_their_seconds_less_what_was_spare(
    spare: float | None, seconds: float
) -> None:
    # For workers that don't report the busy fraction, such as older versions, all of their time
    # counts as busy.
    world = World().api(per_s=0.5).api(priority="batch").worker("a", 0.9)
    world.items(per_s=0.1, seconds=3.0, spare=spare, region="elsewhere")
    assert world.ask(QUERIES.arrivals()) == pytest.approx(0.5 * seconds)


def test_batch_priority_adds_no_arrivals() -> None:
    assert World().api().api(priority="batch", per_s=100.0).ask(QUERIES.arrivals()) == 0.0
