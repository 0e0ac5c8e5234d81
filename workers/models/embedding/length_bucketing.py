"""Splits a batch by length, to reduce the cost of padding and calls."""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 2**63


def cut_by_length(
    lengths: Sequence[int], call_cost: int, budget: int = UNBOUNDED
) -> list[list[int]]:
    """Groups of places in `lengths`, shortest first, at the lowest cost of padding and calls.

    A group has at most `budget` padded tokens, unless it is a single longer text.

    In the best split every group is a run of the sorted lengths, so it is a shortest path. That
    takes O(n^2) steps, under a millisecond for a batch of 64.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ordered = [lengths[place] for place in order]
    cost, start = [0], [0]
    for end in range(1, len(order) + 1):
        longest = ordered[end - 1]
        first = max(0, end - max(1, budget // longest))
        best, at = min(
            (cost[begin] + (end - begin) * longest, begin) for begin in range(first, end)
        )
        cost.append(best + call_cost)
        start.append(at)
    groups = []
    end = len(order)
    while end:
        groups.append(order[start[end] : end])
        end = start[end]
    return groups[::-1]
