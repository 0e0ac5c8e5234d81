from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.models.embedding.model import cut_by_length

pytestmark = pytest.mark.slow

CALL_COST = 20


def cost(lengths: list[int], groups: list[list[int]]) -> int:
    return sum(CALL_COST + max(lengths[index] for index in group) * len(group) for group in groups)


def test_like_lengths_go_together_shortest_first() -> None:
    assert cut_by_length([230, 12, 64, 11, 12, 60], CALL_COST) == [[3, 1, 4], [5, 2], [0]]


def test_a_costly_call_keeps_a_batch_whole() -> None:
    assert cut_by_length([230, 12, 64], 4096) == [[1, 2, 0]]


@given(st.lists(st.integers(1, 256), min_size=1, max_size=40), st.integers(1, 600))
def test_no_call_is_above_the_budget(lengths: list[int], budget: int) -> None:
    """This holds even if calls are so expensive that all texts should share one, because the device
    only has memory for the budget, including padding.
    """
    groups = cut_by_length(lengths, 4096, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(
        len(group) == 1 or max(lengths[p] for p in group) * len(group) <= budget for group in groups
    )


@given(st.lists(st.integers(1, 256), min_size=1, max_size=7))
def test_no_cut_is_cheaper(lengths: list[int]) -> None:
    groups = cut_by_length(lengths, CALL_COST)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for count in range(len(lengths)):
        for cuts in combinations(range(1, len(lengths)), count):
            bounds = [0, *cuts, len(lengths)]
            other = [order[start:end] for start, end in pairwise(bounds)]
            assert cost(lengths, groups) <= cost(lengths, other)
