"""Splits a batch of equal images into compiled batch sizes, at the lowest cost."""

from __future__ import annotations

from collections.abc import Mapping


def cheapest_cover(count: int, seconds: Mapping[int, float]) -> list[int]:
    """How many images to draw in each call, so that `count` images cost least.

    The last call may be larger than needed, if padding costs less than another call.

    Args:
        count: at least 1.
        seconds: the cost of a call of each size.

    Returns:
        The number of images in each call, largest first. They add up to `count`.
    """
    cost, choice = [0.0], [0]
    for left in range(1, count + 1):
        best, size = min(
            (cost[max(0, left - size)] + taken, size) for size, taken in seconds.items()
        )
        cost.append(best)
        choice.append(size)
    sizes = []
    while count > 0:
        sizes.append(min(choice[count], count))
        count -= choice[count]
    return sorted(sizes, reverse=True)
