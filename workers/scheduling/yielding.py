"""Which text gives its place in a model process to another tenant's. Pure: no clock, no I/O.

A text stays in its process until it ends, which can take minutes. So a tenant that took all places
while nobody else asked would keep the others out for as long. A text can go on later from the
tokens that it has, so it can give its place away. What is compared is the room that tenants have in
the process, by their weights. The owner of the place keeps at least as much as the newcomer gets.
So places never go back and forth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Placed(Protocol):
    """An item in a model process, or one that waits for a place."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def weight(self) -> float:
        """Of that tenant."""

    @property
    def can_go_on(self) -> bool:
        """Whether it can be interrupted, and go on later from where it was."""


ItemT = TypeVar("ItemT", bound=Placed)


def to_yield(
    first: ItemT,
    inside: Iterable[ItemT],
    part_of: Callable[[ItemT], float],
    fits: Callable[[list[ItemT]], bool],
) -> list[ItemT]:
    """The items that are to give their places to `first`, which waits.

    Args:
        first: of those that wait.
        inside: the items that have a place, in the order in which they came.
        part_of: the part of the process that an item takes.
        fits: whether `first` has room beside these items.

    Returns:
        Of the tenants with the most room the items that came last, as they have the least to read
        again. Empty: it has room, or nobody has too much, or all that is too much is not enough.
    """
    kept, chosen = list(inside), list[ItemT]()
    while not fits(kept):
        one = _next(first, kept, part_of)
        if one is None:
            return []
        kept.remove(one)
        chosen.append(one)
    return chosen


def _next(first: ItemT, inside: list[ItemT], part_of: Callable[[ItemT], float]) -> ItemT | None:
    held: defaultdict[str, float] = defaultdict(float)
    for one in inside:
        held[one.tenant] += part_of(one) / one.weight
    wanted = held[first.tenant] + part_of(first) / first.weight
    chosen: ItemT | None = None
    for one in inside:
        is_too_much = held[one.tenant] - part_of(one) / one.weight >= wanted
        if one.tenant == first.tenant or not one.can_go_on or not is_too_much:
            continue
        if chosen is None or held[one.tenant] >= held[chosen.tenant]:
            chosen = one
    return chosen
