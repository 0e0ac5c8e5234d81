import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.models.image.compilation import cheapest_cover

pytestmark = pytest.mark.slow

SECONDS = {1: 1.0, 2: 1.4, 4: 2.3, 8: 4.4}


@pytest.mark.parametrize(
    ("count", "calls"),
    [(1, [1]), (2, [2]), (3, [3]), (5, [4, 1]), (6, [4, 2]), (7, [7]), (8, [8]), (17, [8, 8, 1])],
)
def test_a_batch_is_cut_where_it_costs_least(count: int, calls: list[int]) -> None:
    """Three items are padded to four (2.3 s) rather than split into two and one (2.4 s)."""
    assert cheapest_cover(count, SECONDS) == calls


@given(
    st.integers(1, 12),
    st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(1, 20), min_size=1),
)
def test_nothing_costs_less(count: int, seconds: dict[int, int]) -> None:
    def price(calls: list[int]) -> int:
        return sum(min(seconds[size] for size in seconds if size >= call) for call in calls)

    calls = cheapest_cover(count, {size: float(cost) for size, cost in seconds.items()})
    assert sum(calls) == count
    assert calls == sorted(calls, reverse=True)
    largest = max(seconds)
    ways = (
        list(way)
        for length in range(1, count + 1)
        for way in itertools.combinations_with_replacement(range(1, largest + 1), length)
        if sum(way) == count
    )
    assert price(calls) == min(price(way) for way in ways)
