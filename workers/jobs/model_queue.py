"""The items of one model that wait for a batch, run, or ran a moment ago.

Identical items share one result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from shared.catalog import Model
from shared.messages import Item
from shared.tasks.text import TokenChunk
from workers.job import PulledJob, QueuedItem
from workers.jobs.completion import Completion
from workers.models.base import Prepared
from workers.runtime.protocol import BatchResult
from workers.scheduling.priority_queue import PriorityQueue

LINGER_S = 1.0
"""The time that a finished item can still be coalesced with.

By then its result has reached the cache.
"""


class ModelQueue:
    """Queues items, coalesces identical ones, and drops those that are canceled or late.

    `on_queued` is called when there is more to take. The worker sets it.
    """

    def __init__(self, model: Model, completion: Completion) -> None:
        self._completion = completion
        self._queue = PriorityQueue(model.budget, model.batch.max_items)
        self._by_cache_key: dict[str, QueuedItem] = {}
        self._earliest_s = float("inf")
        self.on_queued: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> int:
        """The number of items that can be taken now."""
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was queued, in unix seconds."""
        return self._queue.oldest_s

    @property
    def running(self) -> list[list[QueuedItem]]:
        """The batches that were taken and have not ended."""
        return self._queue.running

    def earliest_deadline_s(self, after_s: float) -> float:
        """The earliest deadline from `after_s` on, in unix seconds. Infinite if there is none."""
        if self._earliest_s < after_s:
            deadlines_s = (
                pulled.start_by_s for queued in self._queue for pulled, _ in queued.open_waiters()
            )
            self._earliest_s = min(
                (one_s for one_s in deadlines_s if one_s >= after_s), default=float("inf")
            )
        return self._earliest_s

    def coalesce(self, pulled: PulledJob, item: Item) -> bool:
        """Lets `item` share the result of an identical item, if one waits, runs, or just ran."""
        queued = (
            self._by_cache_key.get(item.cache_key)
            if item.cache_key and pulled.reads_cache
            else None
        )
        if queued is None:
            return False
        if queued.computed is None:
            queued.waiters.append((pulled, item))
            self._queue.update(queued)
        else:
            self._completion.settle(pulled, queued.coalesced(pulled, item))
        return True

    def add(
        self, prepared: Prepared, pulled: PulledJob, item: Item, written: list[TokenChunk]
    ) -> None:
        """Queues a prepared item. The caller calls `on_queued` after the last one.

        `written` is what an earlier worker has written of it.
        """
        queued = QueuedItem(
            prepared, item.cache_key, time.time(), [(pulled, item)], written=written
        )
        if item.cache_key:
            self._by_cache_key.setdefault(item.cache_key, queued)
        self._queue.add(queued)
        self._earliest_s = min(self._earliest_s, pulled.start_by_s)

    def take(self, processes: int) -> list[QueuedItem]:
        """The next batch for one of `processes`. Empty if nothing waits that is still wanted."""
        self._earliest_s = float("-inf")  # may be in the batch, so it is computed again on demand
        return self._queue.take(processes, self._is_wanted, time.time())

    def admit(self, inside: Collection[QueuedItem], processes: int) -> list[QueuedItem]:
        """Admits items to `inside`, which one of `processes` computes step by step."""
        self._earliest_s = float("-inf")
        return self._queue.admit(inside, processes, self._is_wanted, time.time())

    def to_preempt(self, inside: Collection[QueuedItem]) -> list[QueuedItem]:
        """Returns the items of one process that are to be preempted for another item."""
        return self._queue.to_preempt(inside, self._is_wanted)

    def item_ended(self, queued: QueuedItem) -> None:
        """Takes note that an admitted item has left its batch."""
        self._queue.batch_ended([queued])
        self._queue.adjust_budget(was_short=False)

    def preempted(self, queued: QueuedItem) -> None:
        """Queues an item again for which the device had too little memory."""
        self._queue.batch_ended([queued])
        self._queue.adjust_budget(was_short=True)
        self._queue.add(queued)

    def left_over(self, queued: QueuedItem) -> None:
        """Queues an item again that came too late to be admitted, or was preempted."""
        self._queue.batch_ended([queued])
        self._queue.add(queued)

    def discard_unwanted(self) -> None:
        """Removes items whose callers no longer wait."""
        self._queue.discard_unwanted(self._is_wanted)

    def batch_ended(self, batch: list[QueuedItem], done: BatchResult) -> None:
        """Takes note of a batch that ran, how long, and whether the device had enough memory."""
        self._queue.batch_ended(batch)
        self._queue.adjust_budget(was_short=done.out_of_memory)
        if not done.steps_saved and not done.has_failed:
            self._queue.observe_batch(batch, done.finished_at_s - done.started_at_s)

    def batch_died(self, batch: list[QueuedItem]) -> list[QueuedItem]:
        """Queues a batch again after its model process died. Returns the items to give up."""
        failed = self._queue.batch_died(batch)
        for queued in failed:
            self.forget(queued)
        return failed

    def requeue(self, queued: QueuedItem) -> None:
        """Queues an item again for callers coalesced with one that was being canceled."""
        self._queue.add(queued)
        self.on_queued()

    def forget(self, queued: QueuedItem) -> None:
        """From now on an identical item is found in the cache, or computed again."""
        key = queued.cache_key
        if key and self._by_cache_key.get(key) is queued:
            del self._by_cache_key[key]

    def forget_when_cached(self, queued: QueuedItem) -> None:
        """Does the same, but waits until the result is in the cache if it goes there."""
        if queued.is_cached:
            asyncio.get_running_loop().call_later(LINGER_S, self.forget, queued)
        else:
            self.forget(queued)

    def _is_wanted(self, queued: QueuedItem) -> bool:
        """Settles the waiters that are canceled or late. Returns whether others remain."""
        now_s, wanted = time.time(), []
        for pulled, item in queued.open_waiters():
            if pulled.is_unwanted:
                self._completion.settle(pulled, pulled.unwanted(item.index, started=False))
            elif not queued.has_started and pulled.start_by_s <= now_s:
                self._completion.settle(pulled, pulled.expired(item.index))
            else:
                wanted.append((pulled, item))
        queued.waiters = wanted
        if not wanted:
            self.forget(queued)
        return bool(wanted)
