"""Drops jobs that are canceled or late, in the queue or in a running batch.

One timer per held job, which fires at the queue limit and at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from shared.errors import Unavailable
from shared.stores.records import Records
from workers.job import JobTimer, PulledJob, QueuedItem
from workers.jobs.completion import Completion
from workers.jobs.model_queue import ModelQueue

JobCallback = Callable[[PulledJob], None]


class Clock(Protocol):
    """The clock that deadlines are measured by. Tests have one that they move."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job in this many seconds, unless the timer is canceled before."""
        ...


class SystemClock:
    """The clock of the system, and timers of the running event loop."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        """Calls `act` with the job in this many seconds, unless the timer is canceled before."""
        return asyncio.get_running_loop().call_later(delay_s, act, pulled)


class Deadlines:
    """Watches jobs until they are over.

    Args:
        on_start_expired: called at a job's queue limit, if that is before its deadline.
        on_expired: called at a job's deadline.
        clock: what limits are measured by.
        part: of the time that is left, after which a limit counts as passed.
    """

    def __init__(
        self,
        on_start_expired: JobCallback,
        on_expired: JobCallback,
        clock: Clock,
        part: float = 1.0,
    ) -> None:
        self._clock = clock
        self._part = part
        self._on_start_expired = on_start_expired
        self._on_expired = on_expired

    def watch(self, pulled: PulledJob) -> None:
        """Starts the timer of a job that was just pulled."""
        if pulled.start_by_s < pulled.envelope.deadline_s:
            pulled.timer = self._at(pulled.start_by_s, self._pass_start, pulled)
        else:
            pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)

    def _pass_start(self, pulled: PulledJob) -> None:
        pulled.timer = self._at(pulled.envelope.deadline_s, self._on_expired, pulled)
        self._on_start_expired(pulled)

    def _at(self, unix_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        left_s = max(0.0, unix_s - self._clock.now_s())
        return self._clock.call_later(left_s * self._part, act, pulled)


class Cancellation:
    """Ends jobs early.

    `on_unwanted` is called when a running batch may have lost its last caller. The worker sets it.
    """

    def __init__(self, queue: ModelQueue, completion: Completion, records: Records) -> None:
        self._queue = queue
        self._completion = completion
        self._records = records
        self.on_unwanted: Callable[[], None] = lambda: None

    def cancel(self, record: str) -> None:
        """Drops the jobs of `record`. Items that run now end with their batch."""
        for pulled in self._completion.registry.find(record):
            pulled.is_canceled = True
            self._drop(pulled)

    def expire(self, pulled: PulledJob) -> None:
        """Drops a job at its deadline."""
        pulled.is_late = True
        self._drop(pulled)
        self.on_unwanted()

    def expire_start(self, pulled: PulledJob) -> None:
        """Drops the items of a job that did not start by its queue limit."""
        started = _items_in(self._queue.running, pulled)
        for item in pulled.items:
            if item.index not in started and item.index not in pulled.outcomes:
                self._completion.settle(pulled, pulled.expired(item.index))
        self._queue.discard_unwanted()

    def has_started(self, pulled: PulledJob) -> bool:
        """Returns whether the model has every item of a job that has no outcome yet."""
        started = _items_in(self._queue.running, pulled)
        return all(item.index in started or item.index in pulled.outcomes for item in pulled.items)

    async def recheck(self) -> None:
        """Reads all records again, to find jobs that were canceled while Redis was unavailable."""
        for pulled in self._completion.registry.find():
            with contextlib.suppress(Unavailable):
                record = await self._records.read(pulled.record)
                if record is not None and record.state == "canceled":
                    self.cancel(pulled.record)

    def is_unwanted(self, batch: Sequence[QueuedItem]) -> bool:
        """Returns whether all callers of a batch are gone."""
        return all(pulled.is_unwanted for queued in batch for pulled, _ in queued.waiters)

    def _drop(self, pulled: PulledJob) -> None:
        """Settles all items, except those in batches that stop after their current step."""
        running = self._queue.running
        started = _items_in(running, pulled)
        stopping = _items_in(filter(self.is_unwanted, running), pulled)
        for item in pulled.items:
            if item.index not in stopping:
                # Others go on with what has started, and one of them pays all of it.
                is_started = item.index in started
                is_joined = is_started and pulled.reads_cache and item.cache_key
                receipt = pulled.receipt(cache="joined") if is_joined else None
                outcome = pulled.unwanted(item.index, receipt, started=is_started)
                self._completion.settle(pulled, outcome)
        # The ack makes room for new jobs, so the items of this one must not stay in the queue.
        self._queue.discard_unwanted()


def _items_in(batches: Iterable[Sequence[QueuedItem]], pulled: PulledJob) -> set[int]:
    """The indexes of the job's items in `batches`."""
    waiters = (waiter for batch in batches for queued in batch for waiter in queued.waiters)
    return {item.index for job, item in waiters if job is pulled}
