"""Estimates of batch duration, based on earlier batches."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.priority_queue import MIN_SLOPE, BatchTime


def test_nothing_is_bounded_before_the_first_batch() -> None:
    time = BatchTime()
    assert (time.work_in(0.1), time.more_work_in(0.1), time.seconds_for(100)) == (inf, inf, 0)


@pytest.mark.parametrize("fixed_s", [0.0, 0.003])
def test_fixed_time_and_time_of_the_work_are_told_apart(fixed_s: float) -> None:
    time, chance = BatchTime(), random.Random(1)
    for _ in range(50):
        work = chance.randint(10, 2000)
        time.observe(work, fixed_s + work / 8000)
    assert time.work_in(0.02) == pytest.approx((0.02 - fixed_s) * 8000)
    assert time.more_work_in(0.005) == pytest.approx(40)
    assert time.seconds_for(2048) == pytest.approx(fixed_s + 0.256)


def test_batches_grow_where_work_costs_nothing() -> None:
    """The allowed size grows with each batch that proves it can, as on a GPU with room to spare."""
    time, work = BatchTime(), 12.0
    for _ in range(12):
        time.observe(int(work), 0.003)
        work += time.more_work_in(0.005)
    assert work > 2048


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 100)), min_size=1, max_size=30))
def test_estimates_are_sane_whatever_was_observed(batches: list[tuple[int, float]]) -> None:
    time = BatchTime()
    for work, seconds in batches:
        time.observe(work, seconds)
    assert time.work_in(0.02) >= 0
    assert time.more_work_in(0.005) >= 0
    assert time.seconds_for(1000) >= 0


def test_least_slope_bounds_what_noise_may_say() -> None:
    time = BatchTime()
    for work, seconds in ((100, 0.2), (1000, 0.1), (2000, 0.05)):
        time.observe(work, seconds)
    average = 0.9 * 0.9 * 0.2 + 0.9 * 0.1 + 0.05, 0.81 * 100 + 0.9 * 1000 + 2000
    assert time.more_work_in(1.0) == pytest.approx(average[1] / average[0] / MIN_SLOPE)
