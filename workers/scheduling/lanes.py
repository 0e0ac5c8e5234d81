"""The items of one model that wait in a worker: two lanes, and the suspects.

Pure: no clock, no I/O.

- If both lanes have items, one batch in BATCH_TURN comes from the lane `batch`, so that lane is
  never starved.
- A suspect is an item whose model process or worker died. The suspects of one death are retried in
  halves until the item that kills is alone. One group runs at a time, so the other processes stay
  up for the other items. Groups and other items take turns.
- An item is given up after DEATHS_MAX deaths, if it was alone for DEATHS_ALONE_MAX of them. A death
  with another cause (a manual kill, too little memory) costs innocent items only time, even in the
  middle of a retry.
- If a device runs out of memory, the budget is halved. It grows by a tenth with each batch that
  fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from workers.job import QueuedItem
from workers.scheduling.batch_queue import BatchQueue

BATCH_TURN = 4
DEATHS_MAX = 3
DEATHS_ALONE_MAX = 2
BUDGET_GROWTH = 1.1


class LaneQueue:
    """Items that wait and batches that run. `budget` and `max_items` are as in BatchQueue."""

    def __init__(self, budget: int, max_items: int) -> None:
        self._full_budget = budget
        self._interactive: BatchQueue[QueuedItem] = BatchQueue(budget, max_items)
        self._batch: BatchQueue[QueuedItem] = BatchQueue(budget, max_items)
        self._lanes = (self._interactive, self._batch)
        self._suspects: deque[list[QueuedItem]] = deque()
        self._running: list[list[QueuedItem]] = []
        self._turn = 0
        self._suspect_turn = False

    def __len__(self) -> int:
        """How many items can be taken now."""
        suspects = 0 if self._a_suspect_runs else sum(map(len, self._suspects))
        return len(self._interactive) + len(self._batch) + suspects

    def __iter__(self) -> Iterator[QueuedItem]:
        """All items that wait."""
        return chain(self._interactive, self._batch, *self._suspects)

    @property
    def running(self) -> list[list[QueuedItem]]:
        """The batches that were taken and have not ended."""
        return self._running

    @property
    def _a_suspect_runs(self) -> bool:
        return any(batch[0].is_suspect for batch in self._running)

    @property
    def oldest_s(self) -> float:
        """When the oldest item that can be taken was queued, in unix seconds."""
        suspects = self._suspects[0] if self._suspects and not self._a_suspect_runs else ()
        return min(
            queued.queued_at_s
            for queued in chain(*(lane.oldest_of_each_key() for lane in self._lanes), suspects)
        )

    def add(self, queued: QueuedItem) -> None:
        """Appends an item to its lane, or to the suspects."""
        if queued.is_suspect:
            self._suspects.append([queued])
        else:
            (self._batch if queued.lane == "batch" else self._interactive).add(queued)

    def take(self, processes: int, is_wanted: Callable[[QueuedItem], bool]) -> list[QueuedItem]:
        """The next batch for one of `processes`, without unwanted items.

        Empty if nothing can be taken.

        A batch has at most its share of the items that wait and run. A larger one would delay items
        that another process could run at the same time.
        """
        batch = [queued for queued in self._choose(processes) if is_wanted(queued)]
        if batch:
            self._running.append(batch)
        return batch

    def _choose(self, processes: int) -> list[QueuedItem]:
        free = len(self._interactive) + len(self._batch)
        if self._suspects and not self._a_suspect_runs and (self._suspect_turn or not free):
            self._suspect_turn = False
            return self._suspects.popleft()
        self._suspect_turn = True
        self._turn += 1
        is_batch_turn = self._turn % BATCH_TURN == 0 or not len(self._interactive)
        lane = self._batch if is_batch_turn and len(self._batch) else self._interactive
        running = sum(len(batch) for batch in self._running)
        share = -(-(free + running) // processes)
        return lane.take(max(1, share))

    def batch_ended(self, batch: list[QueuedItem]) -> None:
        """Removes `batch`, as `take` returned it, from the running batches."""
        self._running = [other for other in self._running if other is not batch]

    def batch_died(self, batch: list[QueuedItem]) -> list[QueuedItem]:
        """Queues `batch` again after its model process died. Returns the items to give up."""
        self.batch_ended(batch)
        for queued in batch:
            queued.deaths += 1
            queued.deaths_alone += len(batch) == 1
        if batch[0].deaths_alone >= DEATHS_ALONE_MAX and batch[0].deaths >= DEATHS_MAX:
            return batch
        middle = len(batch) // 2
        self._suspects.extend(half for half in (batch[:middle], batch[middle:]) if half)
        return []

    def discard_unwanted(self, is_wanted: Callable[[QueuedItem], bool]) -> None:
        """Removes the items that are not wanted."""
        for lane in self._lanes:
            lane.discard_unwanted(is_wanted)
        left = ([queued for queued in group if is_wanted(queued)] for group in self._suspects)
        self._suspects = deque(group for group in left if group)

    def adjust_budget(self, *, was_short: bool) -> None:
        """Adjusts the budget to whether the device had too little memory for the last batch."""
        for lane in self._lanes:
            target = lane.budget // 2 if was_short else int(lane.budget * BUDGET_GROWTH) + 1
            lane.budget = max(1, min(self._full_budget, target))
