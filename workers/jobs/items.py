"""One model's items, from the queue to their results.

Items are waiting for a batch, running, or have just run. Identical items share one result. A
batch's progress, previews, tokens and results are passed on to its jobs, and failed items are
retried.

Previews are encoded as WebP. Generated tokens go to a stream as they are produced, so that callers
can follow along. A worker that takes over from a dead one continues from the tokens in the stream.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from shared.errors import Canceled, ModelFailed, Unavailable
from shared.messages import Item, PrintedLogs, failure
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks.custom import PieceChunk, build_streamed_key
from shared.models.tasks.text import TokenChunk
from shared.stores.previews import PreviewStore
from shared.stores.records import Records
from shared.stores.stream_chunks import Chunk, merge_chunks
from shared.stores.token_streams import TokenStreams, Written
from workers import metrics
from workers.jobs.answers import is_streamed
from workers.jobs.completion import Completion
from workers.jobs.spans import traces_of
from workers.models.base import Prepared, PreparedCustom, PreparedPrompt, RgbImage
from workers.models.reports import BatchResult, FileOfPiece, ItemPreview, Previews
from workers.scheduling.job import Computed, PulledJob, QueuedItem
from workers.scheduling.priority_queue import PriorityQueue
from workers.scheduling.tenant_shares import TenantShares

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long other items can still be coalesced with a finished item.

By then, its result has reached the cache.
"""

QUALITY = 60
FASTEST = 0
"""libwebp's method setting. A 256 x 256 image takes 1.5 ms and about 7 KB."""

PROGRESS_EVERY_S = 0.5

OUTPUT_EVENT_EVERY_S = 0.6
"""Interval between two events about growing output. The function that delivers them drops events
that arrive within 0.5 s of the last one.
"""
_Reader = tuple[PulledJob, int]
"""A job and the index of one of its items."""
_HeldChunk = tuple[Chunk, Sequence[FileOfPiece]]
Arrived = tuple[PulledJob, Item, Prepared, list[Chunk]]
"""An item that is ready to be queued, and its output from an earlier worker."""

_NEVER = 1 << 62


class ModelQueue:
    """Queues items, coalesces identical items, and drops canceled and late items.

    Args:
        on_queued: called when there are more items to take.
    """

    def __init__(self, model: Model, completion: Completion, on_queued: Callable[[], None]) -> None:
        self._completion = completion
        shares = TenantShares() if model.definition.runs_to_the_end(model) else None
        self._queue = PriorityQueue(model.budget, model.batch.max_items, shares)
        self._by_cache_key: dict[str, QueuedItem] = {}
        self._earliest_s = float("inf")
        self.on_queued = on_queued

    @property
    def waiting(self) -> int:
        """The number of items that can be taken now."""
        return len(self._queue)

    @property
    def has_full_batch(self) -> bool:
        """True if the next batch is full and doesn't need the process to itself."""
        return self._queue.has_full_batch

    @property
    def oldest_s(self) -> float:
        """Returns when the oldest waiting item was queued, in Unix seconds."""
        return self._queue.oldest_s

    @property
    def running(self) -> list[list[QueuedItem]]:
        """Returns the batches that were taken and have not finished."""
        return self._queue.running

    def earliest_deadline_s(self, after_s: float) -> float:
        """Returns the earliest deadline from `after_s` on, in Unix seconds, or infinity if none."""
        if self._earliest_s < after_s:
            deadlines_s = (
                pulled.start_by_s for queued in self._queue for pulled, _ in queued.open_waiters()
            )
            self._earliest_s = min(
                (one_s for one_s in deadlines_s if one_s >= after_s), default=float("inf")
            )
        return self._earliest_s

    def coalesce(self, pulled: PulledJob, item: Item) -> bool:
        """Lets `item` share an identical item's result, if one is waiting, running, or just ran."""
        queued = self._by_cache_key.get(item.cache_key or "")
        if queued is None or not pulled.reads_cache:
            return False
        if queued.computed is None:
            queued.waiters.append((pulled, item))
            self._queue.update(queued)
        else:
            self._completion.settle(pulled, queued.coalesced(pulled, item))
        return True

    def add(self, arrived: Iterable[Arrived], queued_at_s: float) -> None:
        """Queues prepared items. The caller calls `on_queued` afterward.

        A job's items with the same key wait as one part, except for items that were coalesced with
        an identical one from `arrived`.
        """
        items = list[QueuedItem]()
        for pulled, item, prepared, written in arrived:
            if self.coalesce(pulled, item):
                continue
            queued = QueuedItem(
                prepared, item.cache_key, queued_at_s, [(pulled, item)], written=written
            )
            if item.cache_key:
                self._by_cache_key.setdefault(item.cache_key, queued)
            items.append(queued)
        for _, part in groupby(items, _part_of):
            first, *others = part
            self._queue.add(first, *others)
            self._earliest_s = min(self._earliest_s, first.deadline_s)

    def take(self, processes: int) -> list[QueuedItem]:
        """Returns the next batch for one of the `processes`.

        Empty if no item that is waiting is still wanted.
        """
        self._earliest_s = float("-inf")  # its item may have been taken, so recompute it on demand
        return self._queue.take(processes, self._is_wanted, time.time())

    def admit(self, inside: Collection[QueuedItem], processes: int) -> list[QueuedItem]:
        """Admits items to `inside`, which one of the `processes` computes step by step."""
        self._earliest_s = float("-inf")
        return self._queue.admit(inside, processes, self._is_wanted, time.time())

    def to_preempt(self, inside: Collection[QueuedItem]) -> list[QueuedItem]:
        """Returns the items in one process to preempt in favor of another item."""
        return self._queue.to_preempt(inside, self._is_wanted)

    def item_ended(self, queued: QueuedItem, done: BatchResult) -> None:
        """Records that an admitted item has left its batch."""
        self._queue.batch_ended([queued])
        took_s = done.finished_at_s - done.started_at_s
        is_computed = not isinstance(done.outcomes[0], Canceled)
        self._queue.observe_item(queued, took_s, time.time(), is_computed=is_computed)
        self._queue.adjust_budget(was_short=False)

    def requeue_preempted(self, queued: QueuedItem) -> None:
        """Requeues an item because the device had too little memory for it."""
        self._queue.batch_ended([queued])
        self._queue.adjust_budget(was_short=True)
        self._queue.add(queued)

    def requeue_unfinished(self, queued: QueuedItem) -> None:
        """Requeues an item that arrived too late to be admitted, or was preempted."""
        self._queue.batch_ended([queued])
        self._queue.add(queued)

    def discard_unwanted(self) -> None:
        self._queue.discard_unwanted(self._is_wanted)

    def batch_ended(self, batch: list[QueuedItem], done: BatchResult) -> None:
        """Records that a batch ran, how long it took, and whether the device had enough memory."""
        self._queue.batch_ended(batch)
        self._queue.adjust_budget(was_short=done.out_of_memory)
        if not done.steps_saved and not done.has_failed:
            self._queue.observe_batch(batch, done.finished_at_s - done.started_at_s)

    def batch_died(self, batch: list[QueuedItem], *, was_shared: bool) -> list[QueuedItem]:
        """Queues a batch again after its model process died. Returns the items to give up on."""
        failed = self._queue.batch_died(batch, was_shared=was_shared)
        for queued in failed:
            self.forget(queued)
        return failed

    def requeue(self, queued: QueuedItem) -> None:
        """Requeues an item for callers that were coalesced with it while it was being canceled."""
        self._queue.add(queued)
        self.on_queued()

    def forget(self, queued: QueuedItem) -> None:
        """Stops coalescing with this item.

        After this, an identical item is found in the cache or computed again.
        """
        key = queued.cache_key
        if key and self._by_cache_key.get(key) is queued:
            del self._by_cache_key[key]

    def forget_when_cached(self, batch: Sequence[QueuedItem]) -> None:
        """Same as `forget`, but first waits until the results are cached, if they will be."""
        self._forget_all([queued for queued in batch if not queued.is_cached])
        if cached := [queued for queued in batch if queued.is_cached]:
            asyncio.get_running_loop().call_later(LINGER_S, self._forget_all, cached)

    def _forget_all(self, batch: Sequence[QueuedItem]) -> None:
        for queued in batch:
            self.forget(queued)

    def _is_wanted(self, queued: QueuedItem) -> bool:
        """Settles waiters that are canceled or late. Returns whether others remain."""
        now_s, wanted = time.time(), []
        if len(queued.waiters) == 1:  # as is nearly always the case
            pulled, _ = queued.waiters[0]
            if not pulled.is_unwanted and (queued.has_started or pulled.start_by_s > now_s):
                return True
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


def _part_of(queued: QueuedItem) -> tuple[object, str]:
    """Returns a key that is the same for all items that may share a part."""
    return queued if len(queued.waiters) > 1 else queued.waiters[0][0], queued.key


def encode_preview(preview: RgbImage) -> bytes:
    """Returns the image as a small WebP."""
    from PIL import Image  # rarely needed, and takes 0.1 s to import

    encoded = io.BytesIO()
    image = Image.frombytes("RGB", (preview.width, preview.height), preview.pixels)
    image.save(encoded, "WEBP", quality=QUALITY, method=FASTEST)
    return encoded.getvalue()


class BatchResults:
    """Distributes the results of one model's batches."""

    def __init__(
        self,
        model: Model,
        queue: ModelQueue,
        completion: Completion,
        records: Records,
        previews: PreviewStore,
    ) -> None:
        self._queue = queue
        self._completion = completion
        self._records = records
        self._previews = previews
        self._waits = metrics.WAIT_SECONDS.labels(model.name)
        self._metrics = metrics.BatchMetrics(model.name)
        self._reported_s = float("-inf")

    def report_progress(
        self,
        batch: Sequence[QueuedItem],
        watch: Callable[[Sequence[int]], None],
        step: int,
        steps: int,
    ) -> None:
        """Writes a batch's progress to the records of its predictions, at most twice a second.

        Calls `watch` with the batch's slots whose previews have viewers.
        """
        now_s = time.monotonic()
        if now_s - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = now_s
        predictions = {
            pulled for queued in batch for pulled, _ in queued.waiters if pulled.shown_in
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
            *(self._note(pulled, step, steps) for pulled in predictions)
        )
        watched = {
            pulled for pulled, is_watched in zip(predictions, reported, strict=True) if is_watched
        }
        # By this point, the process may be running its next batch.
        if watched and any(running is batch for running in self._queue.running):
            watch([index for index, queued in enumerate(batch) if _wait_for(queued, watched)])

    async def _note(self, pulled: PulledJob, step: int, steps: int) -> bool:
        """Records a prediction's progress. Returns whether a reader wants previews.

        A flow run counts its items when they finish.
        """
        noted = (step, steps) if pulled.envelope.has_record else (0, 0)
        return await self._records.progress(pulled.shown_in, *noted)

    def report_items(
        self,
        progress: Mapping[QueuedItem, tuple[int, int]],
        watch: Callable[[Collection[QueuedItem]], None],
    ) -> None:
        """Writes the progress of admitted items. Each item has a separate step and step count.

        A prediction with several items is only as far along as its slowest item. Calls `watch` with
        the items whose previews have viewers.
        """
        reported: dict[PulledJob, tuple[int, int]] = {}
        for queued, steps in progress.items():
            for pulled, _ in queued.waiters:
                if pulled.shown_in:
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
            *(self._note(pulled, *steps) for pulled, steps in reported.items())
        )
        watched = {
            pulled for pulled, is_watched in zip(reported, answers, strict=True) if is_watched
        }
        if watched:
            watch([queued for queued in progress if _wait_for(queued, watched)])

    def report_logs(self, queued: QueuedItem, logs: PrintedLogs) -> None:
        """Writes the text an item has printed so far to its predictions' records."""
        for pulled, _ in queued.open_waiters():
            if pulled.envelope.has_record:
                attempt = pulled.envelope.attempt
                writing = self._records.put_logs(pulled.record, attempt, logs)
                self._completion.registry.spawn(writing)
                self._completion.notify_webhook(pulled, "logs", logs.end)

    def pass_on_image(self, queued: QueuedItem, seen: ItemPreview) -> None:
        """Writes a preview of one item for the predictions waiting for it."""
        self._completion.registry.spawn(
            self._pass_on([queued], Previews(seen.number, seen.step, seen.steps, {0: seen.image}))
        )

    def pass_on_previews(self, batch: Sequence[QueuedItem], previews: Previews) -> None:
        """Writes previews for the predictions waiting for these items."""
        self._completion.registry.spawn(self._pass_on(batch, previews))

    async def _pass_on(self, batch: Sequence[QueuedItem], previews: Previews) -> None:
        for index, preview in previews.images.items():
            # Runs on a thread, because libwebp releases the interpreter lock for the milliseconds
            # it takes.
            encoded = await asyncio.to_thread(encode_preview, preview)
            for pulled, item in batch[index].open_waiters():
                if pulled.shown_in:
                    await self._previews.add(
                        pulled.shown_in, item.index, previews.step, previews.steps, encoded
                    )

    def distribute(self, batch: list[QueuedItem], done: BatchResult) -> None:
        self._queue.batch_ended(batch, done)
        traces = traces_of(batch)
        self._metrics.observe(done, traces[0].exemplar if traces else None)
        self._observe_waits(batch, done, is_traced=bool(traces))
        work: Sequence[int | None] = done.computed_work or [None] * len(batch)
        for index, (queued, outcome) in enumerate(zip(batch, done.outcomes, strict=True)):
            logs, call = done.logs.get(index), done.calls.get(index)
            self._settle(queued, Computed(outcome, done, traces, work[index], logs, call))
        self._queue.forget_when_cached(batch)

    def end_item(self, queued: QueuedItem, done: BatchResult) -> None:
        """Settles an item that left its batch before the others."""
        self._queue.item_ended(queued, done)
        traces = traces_of([queued])
        self._metrics.observe(done, traces[0].exemplar if traces else None)
        computed = Computed(done.outcomes[0], done, traces, logs=done.logs.get(0))
        self._observe_waits([queued], done, is_traced=bool(traces))
        self._settle(queued, computed)
        self._queue.forget_when_cached([queued])

    def _settle(self, queued: QueuedItem, computed: Computed) -> None:
        if isinstance(computed.outcome, Canceled):
            self._requeue_coalesced(queued)
        queued.computed = computed
        for pulled, item_outcome in queued.outcomes():
            if isinstance(queued.prepared, PreparedCustom):
                pulled.written[item_outcome.index] = queued.written
            self._completion.settle(pulled, item_outcome)

    def _observe_waits(
        self, batch: Sequence[QueuedItem], done: BatchResult, *, is_traced: bool
    ) -> None:
        if is_traced:
            for queued in batch:
                traces = traces_of([queued])
                wait_s = max(0.0, done.started_at_s - queued.queued_at_s)
                self._waits.observe(wait_s, traces[0].exemplar if traces else None)
            return
        for queued_at_s, items in Counter([queued.queued_at_s for queued in batch]).items():
            self._waits.observe_equal(max(0.0, done.started_at_s - queued_at_s), items)

    def _requeue_coalesced(self, queued: QueuedItem) -> None:
        """Requeues a canceled item for callers that have been coalesced with it since."""
        coalesced = [waiter for waiter in queued.open_waiters() if not waiter[0].is_unwanted]
        if coalesced:
            queued.waiters = [waiter for waiter in queued.waiters if waiter[0].is_unwanted]
            self._queue.requeue(QueuedItem(queued.prepared, None, time.time(), coalesced))

    def retry(self, batch: list[QueuedItem], reason: str, *, was_shared: bool = False) -> None:
        """Requeues a batch after its model process died.

        Items that caused too many deaths fail.

        Args:
            was_shared: True if the process had another batch as well.
        """
        for queued in self._queue.batch_died(batch, was_shared=was_shared):
            deaths = (
                f"{queued.deaths} model processes died while processing this item, "
                f"{queued.deaths_alone} of them while it was their only item"
            )
            error = ModelFailed(f"{deaths}; the last error: {reason}")
            for number, (pulled, item) in enumerate(queued.open_waiters()):
                pulled.dead_letter_reason = error.message
                spent = 0 if number else queued.deaths * queued.length
                receipt = pulled.receipt(spent_work=spent)
                self._completion.settle(pulled, failure(item.index, error, receipt))
        self._queue.on_queued()


def _share_done(steps: tuple[int, int]) -> float:
    return steps[0] / steps[1]


def _wait_for(queued: QueuedItem, jobs: Collection[PulledJob]) -> bool:
    return any(pulled in jobs for pulled, _ in queued.waiters)


class TokenOutput:
    """The streams for one model's items. Each reader has a separate stream."""

    def __init__(self, completion: Completion, streams: TokenStreams) -> None:
        self._completion = completion
        self._streams = streams
        self._open: dict[QueuedItem, dict[_Reader, int]] = {}
        """Number of tokens in each reader's stream, for each item being generated."""
        self._held: dict[QueuedItem, deque[_HeldChunk]] = {}
        """Chunks whose files are being stored, plus the chunks that follow them."""
        self._grown: dict[PulledJob, int] = {}
        """Number of pieces in each prediction's output, while its webhook is being notified."""
        self._is_sending = False
        self._has_more = False

    def pass_on(self, chunks: Sequence[tuple[QueuedItem, Chunk, Sequence[FileOfPiece]]]) -> None:
        """Appends new output to its readers' streams, after its files are stored."""
        for queued, chunk, files in chunks:
            if queued in self._held:
                self._held[queued].append((chunk, files))
            elif files:
                self._held[queued] = deque([(chunk, files)])
                self._completion.registry.spawn(self._store(queued, self._held[queued]))
            else:
                self._append(queued, chunk)

    async def _store(self, queued: QueuedItem, held: deque[_HeldChunk]) -> None:
        """Stores the files of chunks, then appends the chunks in order."""
        try:
            while held and self._held.get(queued) is held:
                chunk, files = held[0]
                for pulled, index in _readers(queued):
                    for file, data in ((chunk_file.file, chunk_file.data) for chunk_file in files):
                        key = build_streamed_key(pulled.record, index, file)
                        await self._completion.large_results.store_streamed(
                            pulled.envelope, key, Blob(file.media_type, data=data)
                        )
                held.popleft()
                if self._held.get(queued) is held:  # otherwise the item has finished
                    self._append(queued, chunk)
        except Unavailable as error:  # the final reply includes what is missing
            log.warning("stream file not stored", extra={"reason": error.message})
            held.clear()
        if self._held.get(queued) is held:
            del self._held[queued]

    def _append(self, queued: QueuedItem, chunk: Chunk) -> None:
        queued.written.append(chunk)
        self._open.setdefault(queued, {})
        self._has_more = True
        if not self._is_sending:
            self._is_sending = True
            self._completion.registry.spawn(self._send_all())

    def forget(self, queued: QueuedItem) -> None:
        """Forgets an item. The reply contains the rest of its streams."""
        self._open.pop(queued, None)
        self._held.pop(queued, None)

    async def _send_all(self) -> None:
        """Sends until there is no new output, using one round trip for all items."""
        try:
            while self._has_more:
                self._has_more = False
                await self._send()
        finally:
            self._is_sending = False

    async def _send(self) -> None:
        due: list[tuple[dict[_Reader, int], _Reader, Chunk]] = []
        for queued, sent in list(self._open.items()):
            readers = _readers(queued)
            if not readers:  # a preempted item may lose its readers while it waits
                del self._open[queued]
            for reader in readers:
                chunk = merge_chunks(queued.written, sent.get(reader, 0))
                if chunk is not None:
                    due.append((sent, reader, chunk))
        if not due:
            return
        written = [
            Written(pulled.record, index, pulled.envelope.attempt, chunk)
            for _, (pulled, index), chunk in due
        ]
        ends = await self._streams.append(written)
        if ends is None:  # Redis is unavailable, so everything is sent with the next tokens
            return
        for (sent, reader, chunk), end in zip(due, ends, strict=True):
            # A reader whose record has been claimed by another worker gets nothing more from this
            # one.
            sent[reader] = end if end is not None else _NEVER
            self._has_more |= end is not None and end < chunk.end
            if end and isinstance(chunk, PieceChunk):
                self._announce(reader[0], end)

    def _announce(self, pulled: PulledJob, pieces: int) -> None:
        """Notifies a prediction's webhook that its output has grown to this number of pieces."""
        if "output" not in pulled.envelope.webhook_events:
            return
        is_notifying = pulled in self._grown
        self._grown[pulled] = pieces
        if not is_notifying:
            self._completion.registry.spawn(self._notify_of_output(pulled))

    async def _notify_of_output(self, pulled: PulledJob) -> None:
        """Publishes events until the output stops growing.

        Completion is reported by a separate event.
        """
        notified = 0
        while not pulled.is_over and (pieces := self._grown[pulled]) > notified:
            notified = pieces
            self._completion.notify_webhook(pulled, "output", pieces)
            await asyncio.sleep(OUTPUT_EVENT_EVERY_S)
        del self._grown[pulled]

    async def resume(
        self, missing: Sequence[tuple[PulledJob, Item]], prepared: Sequence[object]
    ) -> list[list[Chunk]]:
        """Reads what earlier workers generated for items that are about to be queued.

        Waits only for items that may have been delivered before.
        """
        written: list[list[Chunk]] = [[] for _ in missing]
        wanted = [
            index
            for index, (pulled, item) in enumerate(missing)
            if pulled.envelope.attempt > 1
            and is_streamed(item)
            and isinstance(prepared[index], PreparedPrompt | PreparedCustom)
        ]
        if not wanted:
            return written
        wanted_items = [(missing[index][0].record, missing[index][1].index) for index in wanted]
        try:
            streams = await self._streams.read_written(wanted_items)
        except Unavailable:  # the text is generated again, and readers compare
            return written
        for index, chunks in zip(wanted, streams, strict=True):
            written[index] = chunks
        return written


def _readers(queued: QueuedItem) -> list[_Reader]:
    return [
        (pulled, item.index)
        for pulled, item in queued.open_waiters()
        if pulled.envelope.has_record and is_streamed(item)
    ]


def to_compute(queued: QueuedItem) -> Prepared:
    """Returns an item as sent to the model process, with its tenant and earlier output."""
    prepared = queued.prepared
    if not isinstance(prepared, PreparedPrompt | PreparedCustom):
        return prepared
    whole = merge_chunks(queued.written, 0) or TokenChunk(0, [])
    if isinstance(prepared, PreparedCustom):
        written = {"written_pieces": whole.end, "written_text": whole.text}
        return msgspec.structs.replace(prepared, **written)
    assert isinstance(whole, TokenChunk), "a generation writes tokens; this is a bug"
    return msgspec.structs.replace(
        prepared,
        owner=queued.tenant,
        written_ids=b"".join(token.to_bytes(4, "little") for token in whole.ids),
        written_text=whole.text,
        written_cached_tokens=whole.cached_tokens,
        written_logprobs=whole.logprobs,
    )
