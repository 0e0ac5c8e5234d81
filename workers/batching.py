"""Between admission and the model: what waits, and which of it makes the next batch. Pure: no clock, no I/O.

A batch is what waits when a model process falls idle; nothing ever waits for company. Three rules:

- Only equal compatibility keys share a batch, and keys take turns, so one shape cannot starve another.
- The oldest of its key is always in the batch.
- Company is chosen among the `max_items` oldest of the key, nearest in length to the oldest first, as long as at least
  PADDING_EFFICIENCY of the padded batch is real. So nobody is overtaken by what arrived more than a batch later.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Generic, Protocol, TypeVar

PADDING_EFFICIENCY = 0.9


class Waiting(Protocol):
    """What the queue knows of an entry."""

    @property
    def key(self) -> str:
        """Only entries of equal key share a batch."""

    @property
    def length(self) -> int:
        """What padding counts: every entry of a batch is computed at the length of its longest."""


Entry = TypeVar("Entry", bound=Waiting)


class BatchQueue(Generic[Entry]):
    """Entries that wait for a model process; `budget` bounds the padded work of a batch, `max_items` its entries."""

    def __init__(self, budget: int, max_items: int) -> None:
        self._budget = budget
        self._max_items = max_items
        # Insertion order of keys is their turn; insertion order of entries is their arrival.
        self._lanes: OrderedDict[str, OrderedDict[int, Entry]] = OrderedDict()

    def __len__(self) -> int:
        """How many entries wait."""
        return sum(len(lane) for lane in self._lanes.values())

    def add(self, entry: Entry) -> None:
        """Puts `entry` last in its lane; a new lane gets the last turn."""
        self._lanes.setdefault(entry.key, OrderedDict())[id(entry)] = entry

    def remove(self, entry: Entry) -> None:
        """Takes `entry` out if it still waits."""
        lane = self._lanes.get(entry.key)
        if lane is not None and lane.pop(id(entry), None) is not None and not lane:
            del self._lanes[entry.key]

    def take(self) -> list[Entry]:
        """Removes and returns the next batch, in order of arrival; empty when nothing waits."""
        if not self._lanes:
            return []
        key, lane = self._lanes.popitem(last=False)
        window = list(islice(lane.values(), self._max_items))
        batch = self._choose(window)
        for entry in batch:
            del lane[id(entry)]
        if lane:
            self._lanes[key] = lane  # back in line, behind the other keys
        return batch

    def _choose(self, window: list[Entry]) -> list[Entry]:
        """The oldest of `window` and its nearest in length, within the budget and the padding bound."""
        oldest = window[0]
        nearest = sorted(window[1:], key=lambda entry: abs(entry.length - oldest.length))
        chosen, longest, total = {id(oldest)}, oldest.length, oldest.length
        for entry in nearest:
            length = max(longest, entry.length)
            padded = length * (len(chosen) + 1)
            if padded > self._budget or total + entry.length < PADDING_EFFICIENCY * padded:
                continue
            chosen.add(id(entry))
            longest, total = length, total + entry.length
        return [entry for entry in window if id(entry) in chosen]
