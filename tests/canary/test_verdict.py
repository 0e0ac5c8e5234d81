"""The verdict on its own: when a canary is rolled back, and how rarely that is wrong."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.canary.verdict import (
    STEP,
    CanaryCounts,
    RevisionCounts,
    bin_of,
    end_of_bin_s,
    judge,
    tail,
)
from shared.models.entry import Canary

RULES = Canary(revision="2")


def side(good: int, failed: int = 0, seconds: float = 0.1) -> RevisionCounts:
    counts = RevisionCounts()
    for _ in range(good):
        counts.add(seconds)
    counts.add_failed(failed)
    return counts


def is_good(counts: CanaryCounts, rules: Canary = RULES) -> bool:
    return judge(counts, rules).is_good


@given(st.integers(1, 400), st.floats(0.001, 0.999), st.data())
def test_tail_is_that_of_the_binomial_distribution(
    of: int, ratio: float, data: st.DataObject
) -> None:
    from scipy.stats import binom  # takes 0.7 s of CPU time in every process of a run

    seen = data.draw(st.integers(1, of))
    assert tail(seen, of, ratio) == pytest.approx(
        binom.sf(seen - 1, of, ratio), rel=1e-6, abs=1e-12
    )


def test_tail_of_very_many_items_takes_no_longer() -> None:
    mean, seen = 10_000.0, 10_400
    poisson = sum(
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(seen, 2 * seen)
    )
    assert tail(seen, 10**12, mean / 10**12) == pytest.approx(poisson, rel=1e-2)
    assert tail(10**12, 10**12, 0.5) == 0.0


@given(st.floats(0.001, 1e5))
def test_bins_hold_their_times(seconds: float) -> None:
    end_s = end_of_bin_s(bin_of(seconds))
    assert end_s / STEP * 0.999 < seconds <= end_s * 1.001


def test_nothing_is_judged_without_items() -> None:
    assert is_good(CanaryCounts())


@pytest.mark.parametrize(("failed", "good", "stays"), [(2, 0, True), (3, 0, False), (3, 300, True)])
def test_a_few_items_suffice_where_all_fail(failed: int, good: int, stays: bool) -> None:
    counts = CanaryCounts(side(1000), side(good, failed))
    assert is_good(counts) is stays


def test_failures_of_both_revisions_are_no_fault_of_the_canary() -> None:
    assert is_good(CanaryCounts(side(50, 50), side(50, 50)))
    assert not is_good(CanaryCounts(side(100), side(50, 50)))


def test_slow_canary_is_taken_back() -> None:
    assert is_good(CanaryCounts(side(100, seconds=1.0), side(20, seconds=1.4)))
    verdict = judge(CanaryCounts(side(100, seconds=1.0), side(20, seconds=2.0)), RULES)
    assert not verdict.is_good
    assert "20 of 20 items took more than" in verdict.reason


def test_milliseconds_are_no_reason() -> None:
    assert is_good(CanaryCounts(side(100, seconds=0.002), side(100, seconds=0.02)))


def test_times_need_enough_of_the_other_revision() -> None:
    assert is_good(CanaryCounts(side(49, seconds=0.1), side(100, seconds=9.0)))


def test_results_outside_the_tolerance_take_it_back() -> None:
    assert is_good(CanaryCounts(compared=2, outside=2))
    assert not is_good(CanaryCounts(compared=3, outside=3))
    assert is_good(CanaryCounts(compared=1000, outside=10))


@given(st.integers(1, 400), st.integers(1, 2000), st.floats(0.001, 0.999))
def test_a_good_item_more_only_speaks_for_a_revision(seen: int, more: int, ratio: float) -> None:
    of = seen + more
    assert tail(seen, of - 1, ratio) <= tail(seen, of, ratio) * (1 + 1e-6) + 1e-12


def test_equal_revisions_are_rarely_told_apart() -> None:
    """A canary that fails as often as is allowed, over 2,000 items.

    The verdict is checked only after each failed item, because successes only count in the canary's
    favor.
    """
    drawn, taken_back = random.Random(1), 0
    for _ in range(100):
        counts = CanaryCounts(stable=side(2000))
        for _ in range(2000):
            if drawn.random() < RULES.error_ratio:
                counts.canary.add_failed()
                if not is_good(counts):
                    taken_back += 1
                    break
            else:
                counts.canary.items += 1
    assert taken_back <= 2
