"""Between admission and the model: what waits, and which of it makes the next batch. Pure: no clock, no I/O.

A batch is what waits when a model process falls idle; nothing ever waits for company. Three rules:

- Only equal compatibility keys share a batch, and keys take turns, so one shape cannot starve another.
- The oldest of its key is always in the batch.
- Company is chosen among the `max_items` that arrived next after the oldest (some may be gone already). So nobody is
  ever overtaken by what arrived more than a batch later; counting only those who still wait would not promise that.

Lengths don't matter here: the model cuts a batch into calls of like length itself
(workers/models/embedding/length_bucketing.py), and the more texts it may choose from, the less padding is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """What the queue knows of an entry."""

    @property
    def key(self) -> str:
        """Only entries of equal key share a batch."""

    @property
    def length(self) -> int:
        """What it takes of the budget: tokens or pixel-steps."""


ItemT = TypeVar("ItemT", bound=Batchable)


class _KeyQueue(Generic[ItemT]):
    """The entries of one key by their arrival number, in that order."""

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting: OrderedDict[int, ItemT] = OrderedDict()

    def add(self, entry: ItemT) -> None:
        self.waiting[self.arrived] = entry
        self.arrived += 1

    def window(self, size: int) -> list[tuple[int, ItemT]]:
        """Who waits still of the `size` that arrived from the oldest on."""
        first = next(iter(self.waiting))
        return list(takewhile(lambda numbered: numbered[0] < first + size, self.waiting.items()))


class BatchQueue(Generic[ItemT]):
    """Entries that wait for a model process; `budget` bounds the work of a batch, `max_items` its entries."""

    def __init__(self, budget: int, max_items: int) -> None:
        self.budget = budget
        self._max_items = max_items
        # Insertion order of keys is their turn.
        self._by_key: OrderedDict[str, _KeyQueue[ItemT]] = OrderedDict()

    def __len__(self) -> int:
        """How many entries wait."""
        return sum(len(queue.waiting) for queue in self._by_key.values())

    def __iter__(self) -> Iterator[ItemT]:
        """All entries that wait; each queue's in order of arrival."""
        return (entry for queue in self._by_key.values() for entry in queue.waiting.values())

    def oldest_of_each_key(self) -> Iterator[ItemT]:
        """The oldest entry of each queue."""
        return (next(iter(queue.waiting.values())) for queue in self._by_key.values())

    def add(self, entry: ItemT) -> None:
        """Puts `entry` last in its queue; a new queue gets the last turn."""
        self._by_key.setdefault(entry.key, _KeyQueue()).add(entry)

    def take(self, at_most: int) -> list[ItemT]:
        """Removes and returns the next batch, at most so many entries in order of arrival; empty when nothing waits."""
        if not self._by_key:
            return []
        key, queue = self._by_key.popitem(last=False)
        window = queue.window(self._max_items)
        places = self._fill([entry.length for _, entry in window])[:at_most]
        batch = [queue.waiting.pop(window[place][0]) for place in places]
        if queue.waiting:
            self._by_key[key] = queue  # back in line, behind the other keys
        return batch

    def discard_unwanted(self, is_wanted: Callable[[ItemT], bool]) -> None:
        """Removes the entries that are not wanted."""
        for key, queue in list(self._by_key.items()):
            for number, entry in list(queue.waiting.items()):
                if not is_wanted(entry):
                    del queue.waiting[number]
            if not queue.waiting:
                del self._by_key[key]

    def _fill(self, lengths: list[int]) -> list[int]:
        """The places of the batch, in order: the oldest, and whatever else is within budget."""
        chosen, total = [0], lengths[0]
        for place, length in enumerate(lengths[1:], 1):
            if total + length <= self.budget:
                chosen.append(place)
                total += length
        return chosen
