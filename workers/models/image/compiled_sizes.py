"""Cuts a batch of equal images into the sizes that are compiled, so that it costs least."""

from __future__ import annotations

from collections.abc import Mapping


def cheapest_cover(count: int, seconds: Mapping[int, float]) -> list[int]:
    """How many images to draw in each call: sizes of `seconds` that hold `count` together, for the least sum.

    The last call may be larger than what is left for it, where padding costs less than one more call.

    Args:
        count: at least 1.
        seconds: what a call of each size costs.

    Returns:
        The number of images in each call, largest first; they add up to `count`.
    """
    cost, choice = [0.0], [0]
    for left in range(1, count + 1):
        best, size = min((cost[max(0, left - size)] + taken, size) for size, taken in seconds.items())
        cost.append(best)
        choice.append(size)
    sizes = []
    while count > 0:
        sizes.append(min(choice[count], count))
        count -= choice[count]
    return sorted(sizes, reverse=True)
