"""The items of one tenant that wait, and how much of its share the tenant has used.

Pure: no clock, no I/O. Used by batch_queue.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeAlias, TypeVar

STALE_MAX = 16
"""Places of removed items that a tenant may keep besides those of waiting items."""


class Batchable(Protocol):
    """What the queue needs to know about an item."""

    @property
    def tenant(self) -> str:
        """Who is charged for it."""

    @property
    def weight(self) -> float:
        """The tenant's share of the work, relative to the other tenants that wait."""

    @property
    def deadline_s(self) -> float:
        """When it must have started, in unix seconds."""

    @property
    def key(self) -> str:
        """Only items with equal keys share a batch."""

    @property
    def length(self) -> int:
        """Its work, in tokens or pixel-steps."""


ItemT = TypeVar("ItemT", bound=Batchable)
Place: TypeAlias = "tuple[float, int, ItemT, TenantQueue[ItemT]]"
"""Deadline, arrival number, item, tenant. It is stale once the item was taken or filed again."""
Filed: TypeAlias = "Mapping[ItemT, Place[ItemT]]"
"""The place of each item that waits."""


class TenantQueue(Generic[ItemT]):
    """A tenant's items: earliest deadline first, within a key and over all keys.

    Args:
        name: of the tenant.
        filed: the places of all items of the queue, which says which places are stale.
    """

    __slots__ = ("_by_deadline", "_filed", "_stale", "by_key", "name", "quantum", "spent",
                 "waiting", "work")  # fmt: skip

    def __init__(self, name: str, filed: Filed[ItemT]) -> None:
        self.name = name
        self.quantum = 1.0
        """Work per round."""
        self.spent = 0.0
        """Work taken so far, in rounds of its quantum. It has a deficit in rounds above this."""
        self.waiting = 0
        """How many items wait."""
        self.work = 0
        """Their work."""
        self.by_key: dict[str, list[Place[ItemT]]] = {}
        self._by_deadline: list[Place[ItemT]] = []  # only while there are several keys
        self._filed = filed
        self._stale = 0

    @property
    def next_round(self) -> int:
        """The first round in which its deficit is above 0."""
        return int(self.spent) + 1

    def add(self, place: Place[ItemT]) -> bool:
        """Adds the place of an item. Returns whether its key is new here."""
        item = place[2]
        self.waiting += 1
        self.work += item.length
        is_new = item.key not in self.by_key
        if is_new:
            self._by_deadline = self._by_deadline or self._live()
            self.by_key[item.key] = []
        heappush(self.by_key[item.key], place)
        if len(self.by_key) > 1:
            heappush(self._by_deadline, place)
        return is_new

    def first(self, key: str) -> Place[ItemT] | None:
        """The place of its first item of `key`."""
        places = self.by_key.get(key)
        return self._top(places) if places else None

    def earliest(self) -> Place[ItemT] | None:
        """The place of its first item of all keys."""
        if len(self.by_key) == 1:
            (places,) = self.by_key.values()
            return self._top(places)
        if len(self._by_deadline) > 2 * self.waiting + STALE_MAX:
            self._by_deadline = self._live()
        return self._top(self._by_deadline)

    def removed(self, place: Place[ItemT]) -> None:
        """Takes note that `place` is stale now."""
        item = place[2]
        self.waiting -= 1
        self.work -= item.length
        places = self.by_key[item.key]
        if places[0] is place:
            heappop(places)
            return
        self._stale += 1
        if self._stale > self.waiting + STALE_MAX:
            self._stale = 0
            for places in self.by_key.values():
                places[:] = [one for one in places if self._filed.get(one[2]) is one]
                heapify(places)
            self._by_deadline = self._live() if len(self.by_key) > 1 else []

    def forget_key(self, key: str) -> None:
        """Forgets a key without items."""
        del self.by_key[key]
        if len(self.by_key) < 2:
            self._by_deadline = []

    def _top(self, places: list[Place[ItemT]]) -> Place[ItemT] | None:
        while places:
            first = places[0]
            if self._filed.get(first[2]) is first:
                return first
            heappop(places)
        return None

    def _live(self) -> list[Place[ItemT]]:
        """A heap of the places of all items."""
        live = [
            one
            for places in self.by_key.values()
            for one in places
            if self._filed.get(one[2]) is one
        ]
        heapify(live)
        return live
