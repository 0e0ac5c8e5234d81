"""Stops jobs early: canceled jobs, late jobs, and jobs whose inputs can't be computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from shared.errors import PenstockError, Unavailable
from shared.messages import Item, Receipt, failure
from shared.stores.records import Records
from workers.jobs.answers import is_streamed
from workers.jobs.completion import Completion
from workers.jobs.items import ModelQueue
from workers.scheduling.job import PulledJob, QueuedItem


class Cancellation:
    """Stops jobs early.

    Args:
        on_unwanted: called when a running batch may have lost its last caller.
    """

    def __init__(
        self,
        queue: ModelQueue,
        completion: Completion,
        records: Records,
        on_unwanted: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._completion = completion
        self._records = records
        self.on_unwanted = on_unwanted

    def cancel(self, record: str) -> None:
        """Drops `record`'s jobs. Items that are already running finish with their batch."""
        for pulled in self._completion.registry.find(record):
            pulled.is_canceled = True
            self._drop(pulled)

    def expire(self, pulled: PulledJob) -> None:
        """Drops a job at its deadline."""
        pulled.is_late = True
        self._drop(pulled)
        self.on_unwanted()

    def fail(self, pulled: PulledJob, error: PenstockError) -> None:
        """Fails a job with an error. Results already available for its items are not delivered."""
        if not pulled.is_over:
            pulled.outcomes.clear()
            for item in pulled.items:
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))

    def expire_start(self, pulled: PulledJob) -> None:
        """Drops a job's items that didn't start before the queue limit."""
        started = _items_in(self._queue.running, pulled)
        for item in pulled.items:
            if item.index not in started and item.index not in pulled.outcomes:
                self._completion.settle(pulled, pulled.expired(item.index))
        self._queue.discard_unwanted()

    def has_started(self, pulled: PulledJob) -> bool:
        """Returns whether all of a job's unfinished items have already reached the model."""
        started = _items_in(self._queue.running, pulled)
        return all(item.index in started or item.index in pulled.outcomes for item in pulled.items)

    async def recheck(self) -> None:
        """Reads all records again, to find jobs that were canceled while Redis was unavailable."""
        for pulled in self._completion.registry.find():
            with contextlib.suppress(Unavailable):
                record = await self._records.read(pulled.run)
                if record is not None and (record.state == "canceled" or record.closed):
                    self.cancel(pulled.run)

    def _drop(self, pulled: PulledJob) -> None:
        """Settles all items, except those in batches that stop after their current step."""
        running = self._queue.running
        started = _items_in(running, pulled)
        unwanted = (batch for batch in running if all(queued.is_unwanted for queued in batch))
        stopping = _items_in(unwanted, pulled)
        for item in pulled.items:
            if item.index not in stopping:
                queued, receipt = started.get(item.index), None
                if queued is not None:
                    receipt = _receipt_of_leaver(pulled, item, queued)
                outcome = pulled.unwanted(item.index, receipt, started=queued is not None)
                self._completion.settle(pulled, outcome)
        # The ack makes room for new jobs, so this job's items must not stay in the queue.
        self._queue.discard_unwanted()


def _receipt_of_leaver(pulled: PulledJob, item: Item, queued: QueuedItem) -> Receipt | None:
    """Returns the receipt for an item whose caller leaves while its batch continues for others.

    If another caller is waiting for the same item, that caller pays for the whole item. The part of
    a stream that was read is charged to its reader, because the remaining caller may also
    disconnect without reading anything.
    """
    is_last = all(other is pulled or other.is_unwanted for other, _ in queued.waiters)
    spent = queued.spent_work() if is_last else None
    if pulled.reads_cache and item.cache_key:
        cache = "miss" if is_streamed(item) else "joined"
        return pulled.receipt(cache=cache, work=queued.work, spent_work=spent)
    return pulled.receipt(spent_work=spent) if is_last else None


def _items_in(batches: Iterable[Sequence[QueuedItem]], pulled: PulledJob) -> dict[int, QueuedItem]:
    """Returns the job's items that are in `batches`, keyed by index."""
    return {
        item.index: queued
        for batch in batches
        for queued in batch
        for job, item in queued.waiters
        if job is pulled
    }
