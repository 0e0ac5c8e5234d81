"""Passes progress, previews and results of batches on to their jobs, and retries failed ones.

Previews are encoded as WebP.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from PIL import Image

from shared.catalog import Model
from shared.errors import Canceled, ModelFailed, PenstockError
from shared.messages import failure
from shared.stores.records import Records
from shared.tasks import Result
from shared.tracing.spans import TraceContext
from workers import metrics
from workers.job import Computed, PulledJob, QueuedItem, kept_traces
from workers.jobs.completion import Completion
from workers.jobs.model_queue import ModelQueue
from workers.models.base import Picture
from workers.runtime.protocol import BatchResult, ItemPreview, Previews

QUALITY = 60
FASTEST = 0
"""The method of libwebp. A picture of 256 x 256 takes 1.5 ms and has about 7 KB."""


def encode_preview(picture: Picture) -> bytes:
    """The picture as a small WebP."""
    encoded = io.BytesIO()
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
    image.save(encoded, "WEBP", quality=QUALITY, method=FASTEST)
    return encoded.getvalue()


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

    def report_progress(
        self,
        batch: Sequence[QueuedItem],
        watch: Callable[[Sequence[int]], None],
        step: int,
        steps: int,
    ) -> None:
        """Writes a batch's progress to the records of its predictions, at most twice a second.

        Calls `watch` with the places of the batch that somebody wants to see.
        """
        now_s = time.monotonic()
        if now_s - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = now_s
        predictions = {
            pulled for queued in batch for pulled, _ in queued.waiters if pulled.envelope.has_record
        }
        if predictions:
            self._completion.registry.spawn(self._write(batch, predictions, watch, step, steps))
        for pulled in predictions:
            self._completion.notify_webhook(pulled, "logs", step)

    async def _write(
        self,
        batch: Sequence[QueuedItem],
        predictions: Collection[PulledJob],
        watch: Callable[[Sequence[int]], None],
        step: int,
        steps: int,
    ) -> None:
        reported = await asyncio.gather(
            *(self._records.progress(pulled.record, step, steps) for pulled in predictions)
        )
        watched = {
            pulled for pulled, is_watched in zip(predictions, reported, strict=True) if is_watched
        }
        # The process may be at its next batch by now.
        if watched and any(one is batch for one in self._queue.running):
            watch([place for place, queued in enumerate(batch) if _wait_for(queued, watched)])

    def report_items(
        self,
        progress: Mapping[QueuedItem, tuple[int, int]],
        watch: Callable[[Collection[QueuedItem]], None],
    ) -> None:
        """Writes the progress of items that joined others, each with a step and steps of its own.

        A prediction of several items is as far as the last of them. Calls `watch` with the items
        that somebody wants to see.
        """
        reported: dict[PulledJob, tuple[int, int]] = {}
        for queued, steps in progress.items():
            for pulled, _ in queued.waiters:
                if pulled.envelope.has_record:
                    reported[pulled] = min(reported.get(pulled, steps), steps, key=_share_done)
        if reported:
            self._completion.registry.spawn(self._write_items(reported, progress, watch))
        for pulled, (step, _) in reported.items():
            self._completion.notify_webhook(pulled, "logs", step)

    async def _write_items(
        self,
        reported: Mapping[PulledJob, tuple[int, int]],
        progress: Collection[QueuedItem],
        watch: Callable[[Collection[QueuedItem]], None],
    ) -> None:
        answers = await asyncio.gather(
            *(self._records.progress(pulled.record, *steps) for pulled, steps in reported.items())
        )
        watched = {
            pulled for pulled, is_watched in zip(reported, answers, strict=True) if is_watched
        }
        if watched:
            watch([queued for queued in progress if _wait_for(queued, watched)])

    def pass_on_picture(self, queued: QueuedItem, seen: ItemPreview) -> None:
        """Writes a preview of one item for the predictions that wait for it."""
        self._completion.registry.spawn(
            self._pass_on([queued], Previews(seen.number, seen.step, seen.steps, {0: seen.picture}))
        )

    def pass_on_previews(self, batch: Sequence[QueuedItem], previews: Previews) -> None:
        """Writes previews for the predictions that wait for these items."""
        self._completion.registry.spawn(self._pass_on(batch, previews))

    async def _pass_on(self, batch: Sequence[QueuedItem], previews: Previews) -> None:
        for place, picture in previews.pictures.items():
            # On a thread, because libwebp releases the interpreter for the milliseconds it takes.
            image = await asyncio.to_thread(encode_preview, picture)
            for pulled, item in batch[place].open_waiters():
                if pulled.envelope.has_record:
                    await self._records.previews.add(
                        pulled.record, item.index, previews.step, previews.steps, image
                    )

    def distribute(self, batch: list[QueuedItem], done: BatchResult) -> None:
        """Settles the items of a batch that ran."""
        self._queue.batch_ended(batch, done)
        traces = kept_traces(batch)
        metrics.observe_batch(done, traces[0].exemplar if traces else None)
        work: Sequence[int | None] = done.computed_work or [None] * len(batch)
        for queued, outcome, computed in zip(batch, done.outcomes, work, strict=True):
            self._settle(queued, outcome, done, traces, computed)

    def end_item(self, queued: QueuedItem, done: BatchResult) -> None:
        """Settles an item that left the others of its batch."""
        self._queue.item_ended(queued)
        traces = kept_traces([queued])
        metrics.observe_batch(done, traces[0].exemplar if traces else None)
        self._settle(queued, done.outcomes[0], done, traces)

    def _settle(
        self,
        queued: QueuedItem,
        outcome: Result | PenstockError,
        done: BatchResult,
        traces: Sequence[TraceContext],
        computed: int | None = None,
    ) -> None:
        self._observe_wait(queued, done, is_traced=bool(traces))
        if isinstance(outcome, Canceled):
            self._requeue_joined(queued)
        queued.computed = Computed(outcome, done, traces, computed)
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


def _share_done(steps: tuple[int, int]) -> float:
    return steps[0] / steps[1]


def _wait_for(queued: QueuedItem, jobs: Collection[PulledJob]) -> bool:
    return any(pulled in jobs for pulled, _ in queued.waiters)
