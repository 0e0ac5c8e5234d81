"""Passes the progress and the results of batches on to their jobs, and retries failed ones."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.catalog import Model
from shared.errors import Canceled, ModelFailed
from shared.messages import failure
from shared.stores.records import Records
from workers import metrics
from workers.job import Computed, QueuedItem, kept_traces
from workers.jobs.completion import Completion
from workers.jobs.model_queue import ModelQueue
from workers.runtime.protocol import BatchResult

PROGRESS_EVERY_S = 0.5


class BatchResults:
    """Distributes the results of one model's batches."""

    def __init__(
        self, model: Model, queue: ModelQueue, completion: Completion, records: Records
    ) -> None:
        self._queue = queue
        self._completion = completion
        self._records = records
        self._waits = metrics.WAIT_SECONDS.labels(model.name)
        self._reported_s = float("-inf")

    def report_progress(self, batch: Sequence[QueuedItem], step: int, steps: int) -> None:
        """Writes a batch's progress to the records of its predictions, at most twice a second."""
        now_s = time.monotonic()
        if now_s - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = now_s
        jobs = {pulled for queued in batch for pulled, _ in queued.waiters}
        for pulled in jobs:
            if pulled.envelope.prediction:
                work = self._records.progress(pulled.record, step, steps)
                self._completion.registry.spawn(work)
                self._completion.notify_webhook(pulled, "logs", step)

    def distribute(self, batch: list[QueuedItem], done: BatchResult) -> None:
        """Settles the items of a batch that ran."""
        self._queue.batch_ended(batch, done)
        traces = kept_traces(batch)
        metrics.observe_batch(done, traces[0].exemplar if traces else None)
        for queued, outcome in zip(batch, done.outcomes, strict=True):
            self._observe_wait(queued, done, is_traced=bool(traces))
            if isinstance(outcome, Canceled):
                self._requeue_joined(queued)
            queued.computed = Computed(outcome, done, traces)
            for pulled, item_outcome in list(queued.outcomes()):
                self._completion.settle(pulled, item_outcome)
            self._queue.forget_when_cached(queued)

    def _observe_wait(self, queued: QueuedItem, done: BatchResult, *, is_traced: bool) -> None:
        traces = kept_traces([queued]) if is_traced else []
        wait_s = max(0.0, done.started_at_s - queued.queued_at_s)
        self._waits.observe(wait_s, traces[0].exemplar if traces else None)

    def _requeue_joined(self, queued: QueuedItem) -> None:
        """Queues a canceled item again for callers who joined it in the meantime."""
        joined = [waiter for waiter in queued.open_waiters() if not waiter[0].is_unwanted]
        if joined:
            queued.waiters = [waiter for waiter in queued.waiters if waiter[0].is_unwanted]
            self._queue.requeue(QueuedItem(queued.prepared, None, time.time(), joined))

    def retry(self, batch: list[QueuedItem], reason: str) -> None:
        """Queues a batch again after its model process died.

        Items that caused too many deaths fail.
        """
        for queued in self._queue.batch_died(batch):
            deaths = (
                f"{queued.deaths} model processes died over this item, "
                f"{queued.deaths_alone} of them with it alone"
            )
            error = ModelFailed(f"{deaths}; the last: {reason}")
            for pulled, item in queued.open_waiters():
                pulled.dead_letter_reason = error.message
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))
        self._queue.on_queued()
