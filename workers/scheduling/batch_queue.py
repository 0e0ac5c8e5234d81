"""Chooses the items of the next batch from those that wait. Pure: no clock, no I/O.

A batch has the items that wait when a model process becomes idle. It never waits for more items.
Three rules:

- Only items with equal compatibility keys share a batch. Keys take turns, so no key starves
  another.
- The oldest item of its key is always in the batch.
- The rest come from the `max_items` items that arrived next after the oldest, even if some of
  those are gone. So no item is overtaken by one that arrived more than a batch later.

The mix of lengths does not matter here. The model groups the items of a batch by length itself
(workers/models/embedding/length_bucketing.py), and a larger choice leaves less padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """What the queue needs to know about an item."""

    @property
    def key(self) -> str:
        """Only items with equal keys share a batch."""

    @property
    def length(self) -> int:
        """What it takes of the budget, in tokens or pixel-steps."""


ItemT = TypeVar("ItemT", bound=Batchable)


class _KeyQueue(Generic[ItemT]):
    """The items of one key by arrival number, in that order."""

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting: OrderedDict[int, ItemT] = OrderedDict()

    def add(self, item: ItemT) -> None:
        self.waiting[self.arrived] = item
        self.arrived += 1

    def window(self, size: int) -> list[tuple[int, ItemT]]:
        """The items that still wait among the `size` that arrived from the oldest on."""
        first = next(iter(self.waiting))
        return list(takewhile(lambda numbered: numbered[0] < first + size, self.waiting.items()))


class BatchQueue(Generic[ItemT]):
    """Items that wait for a model process.

    A batch has at most `max_items` items of `budget` total length.
    """

    def __init__(self, budget: int, max_items: int) -> None:
        self.budget = budget
        self._max_items = max_items
        # Keys take turns in insertion order.
        self._by_key: OrderedDict[str, _KeyQueue[ItemT]] = OrderedDict()

    def __len__(self) -> int:
        """How many items wait."""
        return sum(len(queue.waiting) for queue in self._by_key.values())

    def __iter__(self) -> Iterator[ItemT]:
        """All items that wait, by key and then in order of arrival."""
        return (item for queue in self._by_key.values() for item in queue.waiting.values())

    def oldest_of_each_key(self) -> Iterator[ItemT]:
        """The oldest item of each key."""
        return (next(iter(queue.waiting.values())) for queue in self._by_key.values())

    def add(self, item: ItemT) -> None:
        """Appends `item` to its key. A new key gets the last turn."""
        self._by_key.setdefault(item.key, _KeyQueue()).add(item)

    def take(self, at_most: int) -> list[ItemT]:
        """Removes and returns the next batch: at most `at_most` items, in order of arrival.

        Empty if none wait.
        """
        if not self._by_key:
            return []
        key, queue = self._by_key.popitem(last=False)
        window = queue.window(self._max_items)
        places = self._fill([item.length for _, item in window])[:at_most]
        batch = [queue.waiting.pop(window[place][0]) for place in places]
        if queue.waiting:
            self._by_key[key] = queue  # back in line, behind the other keys
        return batch

    def discard_unwanted(self, is_wanted: Callable[[ItemT], bool]) -> None:
        """Removes the items that are not wanted."""
        for key, queue in list(self._by_key.items()):
            for number, item in list(queue.waiting.items()):
                if not is_wanted(item):
                    del queue.waiting[number]
            if not queue.waiting:
                del self._by_key[key]

    def _fill(self, lengths: list[int]) -> list[int]:
        """The places of the batch in order: the oldest, and the next ones that fit the budget."""
        chosen, total = [0], lengths[0]
        for place, length in enumerate(lengths[1:], 1):
            if total + length <= self.budget:
                chosen.append(place)
                total += length
        return chosen
