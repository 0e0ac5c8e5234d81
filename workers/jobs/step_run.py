"""A batch that runs on one model process, for a model that computes in steps.

Uses continuous batching: items are admitted between steps and leave one by one. The batch is over
when no items are left in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from shared.errors import BadInput, Canceled
from shared.stores.stream_chunks import Chunk
from shared.tenants.plan import Priority
from workers.jobs.items import (
    PROGRESS_EVERY_S,
    BatchResults,
    ModelQueue,
    TokenOutput,
    to_compute,
)
from workers.metrics import BusyRatio
from workers.models.client import ModelProcessDied
from workers.models.reports import (
    BatchResult,
    Chunks,
    Failure,
    ItemEnded,
    ItemLogs,
    ItemPreview,
    ItemsProgress,
    Pieces,
    Preempted,
    Spare,
    StepMessage,
)
from workers.runtime.pooled_process import PooledProcess
from workers.scheduling.job import QueuedItem

TIMEOUT_S = 300.0
"""A process that sends nothing for this long is stuck, so it is killed and its jobs are retried."""


class StepRun:
    """One batch.

    The caller notifies it when items are waiting, and when callers may have disconnected.

    Args:
        max_s: time limit per item. None means no limit.
        processes: number of processes that share the waiting items.
        may_admit: True if the process should stay with this model.
        busy: counts the process as busy, minus the spare time that it reports.
    """

    def __init__(
        self,
        process: PooledProcess,
        number: int,
        queue: ModelQueue,
        batches: BatchResults,
        tokens: TokenOutput,
        max_s: float | None,
        processes: int,
        may_admit: Callable[[], bool],
        on_item: Callable[[BatchResult], None],
        busy: BusyRatio,
    ) -> None:
        self._process = process
        self._number = number
        self._queue = queue
        self._batches = batches
        self._tokens = tokens
        self._max_s = max_s
        self._processes = processes
        self._may_admit = may_admit
        self._on_item = on_item
        self._busy = busy
        self._inside: dict[int, QueuedItem] = {}
        self._dropped: set[int] = set()
        self._preempted: set[int] = set()
        """Slots to free up for another tenant."""
        self._counted: dict[Priority, float] = {}
        self._reported_s = 0.0
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._too_long: set[int] = set()
        """Slots whose items were stopped because they exceeded their model's time limit."""

    async def run(self, batch: Sequence[QueuedItem]) -> str:
        """Runs until no items are left. Returns the reason the process died, or an empty string.

        If the process dies or items fail together, the items are requeued in halves.
        """
        self._add(0, batch)
        try:
            ended = await self._process.run_steps(
                [to_compute(queued) for queued in batch],
                timeout_s=TIMEOUT_S,
                on_message=self._handle,
                model=self._number,
            )
        except ModelProcessDied as error:
            self._retry(error.message)
            return error.message
        finally:
            for timer in self._timers.values():
                timer.cancel()
            self._count()
        if ended.failure is not None:
            self._fail(ended.failure)
        for queued in self._inside.values():  # these items arrived too late to be admitted
            self._queue.requeue_unfinished(queued)
        self._inside.clear()
        return ""

    def admit_waiting(self) -> None:
        """Admits waiting items while there is room."""
        if not self._inside or not self._may_admit():
            return
        admitted = self._queue.admit(self._inside.values(), self._processes)
        if admitted:
            first = self._process.admit([to_compute(queued) for queued in admitted])
            if first is None:  # it has just finished
                for queued in admitted:
                    self._queue.requeue_unfinished(queued)
                return
            self._add(first, admitted)
        self._preempt_for_others()

    def _preempt_for_others(self) -> None:
        """Interrupts items from a tenant with too many slots, in favor of a waiting tenant."""
        if self._preempted or self._dropped & self._inside.keys():
            return  # a slot is about to become free
        chosen = self._queue.to_preempt(self._inside.values())
        if chosen:
            self._preempted = {at for at, item in self._inside.items() if item in chosen}
            self._process.preempt(sorted(self._preempted))

    def drop_unwanted(self) -> None:
        """Stops items whose callers have all disconnected."""
        unwanted = [
            slot
            for slot, queued in self._inside.items()
            if slot not in self._dropped and queued.is_unwanted
        ]
        if unwanted:
            self._dropped.update(unwanted)
            self._process.drop(unwanted)

    def _add(self, first: int, items: Sequence[QueuedItem]) -> None:
        self._inside.update(enumerate(items, first))
        for queued in items:
            queued.has_started = True
        if self._max_s is not None:
            loop = asyncio.get_running_loop()
            for slot in range(first, first + len(items)):
                self._timers[slot] = loop.call_later(self._max_s, self._stop_long, slot)
        self._count()

    def _stop_long(self, slot: int) -> None:
        """Stops an item that has reached its model's time limit."""
        if slot in self._inside and slot not in self._dropped:
            self._too_long.add(slot)
            self._dropped.add(slot)
            self._process.drop([slot])

    def _handle(self, message: StepMessage) -> None:
        match message:
            case Chunks() | Pieces():
                self._pass_on(message)
            case ItemsProgress():
                self._report_progress(message)
            case ItemLogs():
                if (queued := self._inside.get(message.slot)) is not None:
                    self._batches.report_logs(queued, message.logs)
            case ItemPreview():
                if (queued := self._inside.get(message.slot)) is not None:
                    self._batches.pass_on_image(queued, message)
            case ItemEnded():
                self._end(message)
                self.admit_waiting()
            case Spare():
                self._busy.spare(self._counted, message.seconds)
            case Preempted():
                self._wait_again(message)

    def _pass_on(self, message: Chunks | Pieces) -> None:
        """Passes on items' new output, including its large files."""
        files = message.files if isinstance(message, Pieces) else {}
        written: Mapping[int, Chunk] = message.chunks
        self._tokens.pass_on(
            [
                (self._inside[slot], chunk, files.get(slot, ()))
                for slot, chunk in written.items()
                if slot in self._inside
            ]
        )

    def _wait_again(self, message: Preempted) -> None:
        """Requeues items that were preempted or ran out of memory."""
        was_preempted = bool(self._preempted & set(message.slots))
        for slot in message.slots:
            queued = self._inside.pop(slot, None)
            if queued is None:
                continue
            if (chunk := message.chunks.get(slot)) is not None:
                self._tokens.pass_on([(queued, chunk, ())])
            if slot in self._preempted:
                self._queue.requeue_unfinished(queued)
            else:
                self._queue.requeue_preempted(queued)
        self._preempted &= self._inside.keys()
        self._count()
        if was_preempted:
            self.admit_waiting()

    def _report_progress(self, message: ItemsProgress) -> None:
        if (now_s := time.monotonic()) - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = now_s
        progress = {
            self._inside[slot]: steps
            for slot, steps in message.progress.items()
            if slot in self._inside
        }
        self._batches.report_items(progress, self._watch)

    def _watch(self, watched: Collection[QueuedItem]) -> None:
        self._process.watch([slot for slot, queued in self._inside.items() if queued in watched])

    def _end(self, message: ItemEnded) -> None:
        queued = self._inside.pop(message.slot, None)
        self._preempted.discard(message.slot)
        if (timer := self._timers.pop(message.slot, None)) is not None:
            timer.cancel()
        if queued is None:
            return
        if message.slot in self._too_long:
            self._note_too_long(message.done)
        self._count()
        self._on_item(message.done)
        self._tokens.forget(queued)
        self._batches.end_item(queued, message.done)

    def _note_too_long(self, done: BatchResult) -> None:
        """Replaces a stopped item's outcome with the reason, if it has no result."""
        (result,) = done.results
        if isinstance(result, Failure) and result.code == Canceled.code:
            error = BadInput(
                f"input: took the model longer than the maximum of {self._max_s:g} s; send less "
                "per request",
                field="input",
            )
            done.results = [Failure.from_error(error)]

    def _fail(self, failure: Failure) -> None:
        """Handles the failure of all admitted items at once.

        If there was only one item, it is the cause.
        """
        if len(self._inside) > 1:
            self._retry(failure.message)
            return
        now_s = time.time()
        for slot in list(self._inside):
            done = BatchResult(
                results=[failure],
                started_at_s=now_s,
                finished_at_s=now_s,
                inference_ms=0.0,
                real_work=0,
                padded_work=0,
            )
            self._end(ItemEnded(0, slot, done))

    def _retry(self, reason: str) -> None:
        batch = list(self._inside.values())
        self._inside.clear()
        if batch:
            self._batches.retry(batch, reason)

    def _count(self) -> None:
        """Reports to the autoscaler which priorities the process is computing."""
        if self._counted:
            self._busy.end(self._counted)
            self._counted = {}
        if self._inside:
            priorities: list[Priority] = [
                "batch" if queued.may_wait_for_hours else "interactive"
                for queued in self._inside.values()
            ]
            self._counted = self._busy.start(priorities)
