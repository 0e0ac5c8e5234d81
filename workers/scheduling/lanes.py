"""What waits for one model in a worker: two lanes of jobs, and the suspects. Pure: no clock, no I/O.

- Where both lanes wait, one batch in BATCH_TURN is of the lane `batch`: it may wait, but never for ever.
- A suspect was in the hands of a model process or a worker that died. The suspects of one death are tried again in
  halves, until the one that kills is alone; one group at a time, so that the other processes stay up for its
  neighbors. Where others wait too, they take turns.
- Only who dies alone is blamed: DEATHS_ALONE_MAX times, and DEATHS_MAX times in all. So what dies for another reason
  (a kill by hand, a machine short of memory) costs an innocent nothing but time, though it strikes in the middle.
- A device that ran out of memory gets half the budget, and a tenth more again with each batch that fits.
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
HEALING = 1.1


class LaneQueue:
    """Entries that wait for a model process, and how many run; `budget` and `max_items` as in BatchQueue."""

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
        """How many entries could be taken now."""
        suspects = 0 if self._a_suspect_runs else sum(map(len, self._suspects))
        return len(self._interactive) + len(self._batch) + suspects

    def __iter__(self) -> Iterator[QueuedItem]:
        """All entries that wait."""
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
        """When the oldest that could be taken was queued, unix seconds."""
        suspects = self._suspects[0] if self._suspects and not self._a_suspect_runs else ()
        return min(entry.queued_at_s for entry in chain(*(lane.oldest_of_each_key() for lane in self._lanes), suspects))

    def add(self, entry: QueuedItem) -> None:
        """Puts `entry` last in its lane, or among the suspects."""
        if entry.is_suspect:
            self._suspects.append([entry])
        else:
            (self._batch if entry.lane == "batch" else self._interactive).add(entry)

    def take(self, processes: int, is_wanted: Callable[[QueuedItem], bool]) -> list[QueuedItem]:
        """The next batch for one of `processes`, of what is wanted; empty where nothing could be taken.

        Not more than its share of what waits and runs: what could run elsewhere at the same time would only wait in it,
        and the others would be left with scraps.
        """
        batch = [entry for entry in self._choose(processes) if is_wanted(entry)]
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
        is_for_batch = self._turn % BATCH_TURN == 0 or not len(self._interactive)
        lane = self._batch if is_for_batch and len(self._batch) else self._interactive
        running = sum(len(batch) for batch in self._running)
        share = -(-(free + running) // processes)
        return lane.take(max(1, share))

    def batch_ended(self, batch: list[QueuedItem]) -> None:
        """`batch`, as it was taken, runs no more."""
        self._running = [other for other in self._running if other is not batch]

    def batch_died(self, batch: list[QueuedItem]) -> list[QueuedItem]:
        """Takes back `batch`, as it was taken, over which its model process died; returns who is to blame for it."""
        self.batch_ended(batch)
        for entry in batch:
            entry.deaths += 1
            entry.deaths_alone += len(batch) == 1
        if batch[0].deaths_alone >= DEATHS_ALONE_MAX and batch[0].deaths >= DEATHS_MAX:
            return batch
        middle = len(batch) // 2
        self._suspects.extend(half for half in (batch[:middle], batch[middle:]) if half)
        return []

    def discard_unwanted(self, is_wanted: Callable[[QueuedItem], bool]) -> None:
        """Removes the entries that are not wanted."""
        for lane in self._lanes:
            lane.discard_unwanted(is_wanted)
        left = ([entry for entry in group if is_wanted(entry)] for group in self._suspects)
        self._suspects = deque(group for group in left if group)

    def adjust_budget(self, *, was_short: bool) -> None:
        """Takes over whether the device had memory enough for the last batch."""
        for lane in self._lanes:
            wished = lane.budget // 2 if was_short else int(lane.budget * HEALING) + 1
            lane.budget = max(1, min(self._full_budget, wished))
