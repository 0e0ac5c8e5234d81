"""The jobs that a worker holds for one model: each is acked, handed back, or still in progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from shared.stores.record_state import ReleasedClaim
from shared.stores.records import Records
from shared.transport import SmoothedDuration
from workers import metrics
from workers.job import PulledJob

log = logging.getLogger(__name__)

FINISH_LIMIT_S = 1.0


class JobRegistry:
    """Holds pulled jobs, and the background tasks that work on them, until both are done.

    Flow control limits how many jobs and tasks there are. Only this class acks or nacks a job.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._jobs: set[PulledJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.completion = SmoothedDuration()
        """From the outcome of a job's last item to its ack."""
        self.is_leaving = False
        """Whether the worker was told to go. Its end is then no job's fault."""

    def add(self, pulled: PulledJob) -> None:
        """Holds `pulled` until it is acked or handed back."""
        self._jobs.add(pulled)
        self._idle.clear()

    def find(self, record: str | None = None) -> list[PulledJob]:
        """All jobs, or those of one record. A repeated delivery can give one record two jobs.

        The record of a flow's run finds those of its steps.
        """
        return [pulled for pulled in self._jobs if record in (None, pulled.record, pulled.run)]

    def ack(self, pulled: PulledJob) -> None:
        """Acks a finished job, unless it was handed back in the meantime."""
        if pulled in self._jobs:
            self.completion.record(time.monotonic() - pulled.over_since_s)
            pulled.subscription.ack(pulled.message)
            self._remove(pulled)

    def hand_back(self, pulled: PulledJob) -> None:
        """Nacks an unfinished job, so that the broker delivers it again."""
        metrics.HANDED_BACK.inc()
        claims = 0 if pulled.is_released else 1
        self.spawn(
            self._records.release([ReleasedClaim(pulled.record, claims, int(pulled.is_alone))])
        )
        pulled.subscription.nack(pulled.message)
        self._remove(pulled)

    async def leave(self) -> None:
        """Releases all claims, as the worker was told to go: it may be killed before it is done."""
        self.is_leaving = True
        await self.release_claims(self._jobs)

    async def release_claims(self, pulled_jobs: Iterable[PulledJob]) -> None:
        """Releases the claims of jobs that stay here. They count no more if the worker dies."""
        released = []
        for pulled in pulled_jobs:
            if pulled.is_claimed and not pulled.is_released:
                released.append(
                    ReleasedClaim(pulled.record, 1, int(pulled.is_alone), is_back=False)
                )
                pulled.is_released, pulled.is_alone = True, False
        if released:
            await self._records.release(released)

    async def hand_back_all(self) -> None:
        """Cancels all tasks and hands all jobs back, at the end of the worker.

        Tasks that publish replies get a moment to finish first.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)
        for task in list(self._tasks):
            task.cancel()
        for pulled in list(self._jobs):
            pulled.end()
            self.hand_back(pulled)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)

    async def wait_idle(self) -> None:
        """Returns when no job and no task is left."""
        await self._idle.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which concerns a held job, as a background task."""
        task = asyncio.create_task(work)
        self._idle.clear()
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._check_idle()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("finishing a job failed; this is a bug", exc_info=error)

    def _remove(self, pulled: PulledJob) -> None:
        self._jobs.discard(pulled)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._jobs and not self._tasks:
            self._idle.set()
