"""A queue that takes items in order of arrival, regardless of the tenant, to compare with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from workers.job import QueuedItem
from workers.scheduling.batch_queue import always


class FifoQueue:
    """Has the interface of BatchQueue for models whose items all have one key.

    An item that has no room is passed over, by no more than the `max_items` that arrived next.
    """

    def __init__(self, budget: int, max_items: int) -> None:
        self.budget = budget
        self._max_items = max_items
        self._waiting: OrderedDict[QueuedItem, None] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedItem]:
        """All items that wait, in order of arrival."""
        return iter(self._waiting)

    def __contains__(self, item: QueuedItem) -> bool:
        """Returns whether `item` waits here."""
        return item in self._waiting

    def add(self, item: QueuedItem) -> None:
        """Appends `item`."""
        self._waiting[item] = None

    def update(self, item: QueuedItem) -> None:
        """Nothing about an item changes its place."""

    def remove(self, item: QueuedItem) -> None:
        """Removes `item`."""
        del self._waiting[item]

    def discard_unwanted(self, is_wanted: Callable[[QueuedItem], bool]) -> None:
        """Removes the items that are not wanted."""
        for item in list(self._waiting):
            if not is_wanted(item):
                del self._waiting[item]

    def take(
        self,
        at_most: int,
        *,
        room: float = inf,
        spare: float = inf,
        is_wanted: Callable[[QueuedItem], bool] = always,
        first: QueuedItem | None = None,
    ) -> list[QueuedItem]:
        """Removes and returns the next batch."""
        batch, total = list[QueuedItem](), 0
        for item in list(islice(self._waiting, self._max_items)):
            if batch and (len(batch) == at_most or total + item.length > self.budget):
                continue
            del self._waiting[item]
            if is_wanted(item):
                batch.append(item)
                total += item.length
        return batch
