"""A batch that runs on a model process, for a model that computes whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from shared.tenants.plan import Priority
from workers.jobs.consumer import JobConsumer
from workers.metrics import BusyRatio
from workers.models.client import ModelProcessDied, RunningBatch
from workers.models.reports import BatchResult
from workers.runtime.pooled_process import PooledProcess
from workers.scheduling.job import QueuedItem

TIMEOUT_S = 300.0
"""A batch that takes longer than this is stuck. Its process is killed, and its jobs are retried."""


class BatchRun:
    """One batch. `start` sends it, and `finish` waits for its result.

    Args:
        number: the model's number in the pool.
        busy: counts the process as busy from `count_busy` until the batch finishes.
    """

    def __init__(
        self,
        process: PooledProcess,
        number: int,
        consumer: JobConsumer,
        batch: list[QueuedItem],
        busy: BusyRatio,
    ) -> None:
        self.number = number
        self.consumer = consumer
        self.batch = batch
        self._process = process
        self._busy = busy
        self._counted: dict[Priority, float] | None = None
        self._running: RunningBatch | None = None
        self._noted = AsyncExitStack()
        self.died_with_others = False
        """True if the process was also running other batches when it died."""

    async def start(self, on_over: Callable[[], None]) -> str:
        """Sends the batch.

        Returns the reason if the process has died by then; otherwise, returns an empty string.

        Args:
            on_over: called when the batch has finished.
        """
        await self._noted.enter_async_context(self.consumer.note_suspects(self.batch))
        batches = self.consumer.batches
        try:
            self._running = await self._process.send(
                [queued.prepared for queued in self.batch],
                timeout_s=TIMEOUT_S,
                model=self.number,
                on_step=partial(batches.report_progress, self.batch, self._watch),
                on_previews=partial(batches.pass_on_previews, self.batch),
            )
        except ModelProcessDied as error:
            await self.close()
            return error.message
        self._running.done.add_done_callback(lambda _: on_over())
        self.stop_unwanted()  # the batch's callers may have disconnected while it was waiting
        return ""

    @property
    def is_over(self) -> bool:
        """True if `finish` does not have to wait for the process."""
        return self._running is not None and self._running.done.done()

    @property
    def has_died(self) -> bool:
        """True if the process died while it was running the batch."""
        return (
            self._running is not None
            and self._running.done.done()
            and self._running.done.exception() is not None
        )

    def count_busy(self) -> None:
        """Counts the process as busy with this batch. The next batch does not count yet."""
        priorities: list[Priority] = [
            "batch" if queued.may_wait_for_hours else "interactive" for queued in self.batch
        ]
        self._counted = self._busy.start(priorities)

    def stop_unwanted(self) -> None:
        """Cancels the batch if all of its callers have disconnected."""
        if self._running is not None and all(queued.is_unwanted for queued in self.batch):
            self._running.cancel()

    async def finish(self) -> BatchResult | str:
        """Returns the result, or the reason the process died."""
        assert self._running is not None, "it was started; this is a bug"
        try:
            done = await self._running.done
            await self._process.finish(done, self.number)
        except ModelProcessDied as error:
            return error.message
        finally:
            await self.close()
        return done

    async def abandon(self) -> None:
        """Ignores the result because the worker is stopping."""
        if self._running is not None:
            self._running.done.cancel()
        await self.close()

    async def close(self) -> None:
        """Undoes `start` and `count_busy`."""
        if self._counted is not None:
            self._busy.end(self._counted)
            self._counted = None
        await self._noted.aclose()

    def _watch(self, slots: Sequence[int]) -> None:
        if self._running is not None:
            self._running.watch(slots)
