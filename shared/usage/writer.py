"""Writes rows to a table in the background: of BigQuery, or of the object store.

Rows are on disk at once, and are removed from it when sent. `write` puts a row into the journal
(shared/usage/journal.py), which survives the death of this process. A thread sends the rows, one
segment at a time, with an insertId of row_id, status and attempt. So BigQuery drops repeats (best
effort), and the view `rows_deduplicated` always does. Rows that can't be sent stay. The thread also
sends the rows that other processes left in the same folder. It is a thread, because Google's client
is synchronous. The destination of rows is the sender's matter (shared/usage/senders.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import Counter, Gauge

from shared.backoff import backoff
from shared.errors import Unavailable
from shared.settings import SPOOL_MAX_BYTES
from shared.usage.journal import BATCH_ROWS, FIRST_PAUSE_S, MAX_PAUSE_S, Journal, RowBatch
from shared.usage.row import Row
from shared.usage.senders import RowSender
from shared.usage.spool import Fields, Spool
from shared.usage.worker_hour import WorkerHour

log = logging.getLogger(__name__)

SENDERS = 4
"""Batches that are sent at the same time while there is a backlog.

One insertAll takes BigQuery tens of milliseconds or more, and one after the other would make an
outage of minutes last for hours.
"""
HURRY_S = 0.05
"""The time that rows wait for more while jobs wait for them, because the disk does not take
them."""
CLOSE_S = 2.0
"""Limit of the last sends at close. A container has ten seconds for its whole shutdown."""
COLUMNS = [
    name.removesuffix("_s") if name.endswith("_at_s") else name for name in Row.__struct_fields__
]

FAILURES = Counter(
    "penstock_rows_send_failures_total", "Requests to BigQuery that failed; their rows are kept"
)
PENDING = Gauge("penstock_rows_pending", "Rows that BigQuery does not have yet")
PENDING_BYTES = Gauge("penstock_rows_pending_bytes", "What they take on disk")
OLDEST = Gauge("penstock_rows_oldest_seconds", "Age of the oldest of them; 0 if there is none")


def fields_of(row: Row) -> Fields:
    """Returns the row as BigQuery's columns: `*_at_s` loses its unit, and None is left out."""
    return {
        column: value
        for column, value in zip(COLUMNS, msgspec.structs.astuple(row), strict=True)
        if value is not None
    }


def fields_by_name(row: msgspec.Struct) -> Fields:
    """Returns a row whose fields have the names of their columns. None is left out."""
    columns: Fields = msgspec.to_builtins(row)
    return {column: value for column, value in columns.items() if value is not None}


class _Attempt(threading.Thread):
    """Sends one batch. A daemon, because a process ends while a request hangs."""

    def __init__(self, sender: RowSender, batch: RowBatch) -> None:
        super().__init__(name="rows-sending", daemon=True)
        self.batch = batch
        self.refused: list[tuple[Fields, str]] = []
        self.error: Exception | None = None
        self._sender = sender

    def run(self) -> None:
        """Sends, and keeps what became of it."""
        rows = self.batch.rows
        try:
            for start in range(0, len(rows), BATCH_ROWS):
                self.refused += self._sender.send(rows[start : start + BATCH_ROWS])
        except Exception as error:
            # Raised again by the thread that waits for this one.
            self.error = error


_open_writers: list[RowWriter] = []
"""Those of this process. The gauges are about all of them."""


class RowWriter:
    """Writes rows to the table of a sender.

    Args:
        sender: where they go. Each table has a writer and a folder of its own, so that one that is
            not there keeps no rows of another one waiting.
        spool_dir: the folder of rows on disk. Processes may share it.
        spool_max_bytes: limit of rows without a living owner. Above it new rows stay in memory.
    """

    def __init__(
        self, sender: RowSender, *, spool_dir: Path, spool_max_bytes: int = SPOOL_MAX_BYTES
    ) -> None:
        self._sender = sender
        self._spool = Spool(spool_dir, spool_max_bytes)
        self._journal = Journal(self._spool)
        self._flushes = 0
        self._give_up_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._journal.open)
        _open_writers.append(self)
        PENDING.set_function(lambda: sum(one.pending for one in _open_writers))
        PENDING_BYTES.set_function(lambda: sum(one.pending_bytes for one in _open_writers))
        OLDEST.set_function(lambda: max((one.oldest_age_s for one in _open_writers), default=0.0))
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._journal.changed:
            self._give_up_s = time.monotonic() + CLOSE_S
            self._journal.changed.notify_all()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        await asyncio.to_thread(self._journal.close)
        _open_writers.remove(self)

    @property
    def pending_bytes(self) -> int:
        """The size of the pending rows on disk, in bytes."""
        return self._journal.size_bytes

    @property
    def oldest_age_s(self) -> float:
        """The age of the oldest of them in seconds. 0 if there is none."""
        return time.time() - self._journal.oldest_s if self._journal.rows else 0.0

    @property
    def pending(self) -> int:
        """Rows that BigQuery does not have yet: in memory, in flight, and on disk."""
        return self._journal.rows

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Adds rows, on the event loop. Never waits for BigQuery and never raises.

        Args:
            rows: the rows.
            on_safe: called once, later on this event loop, when each is on disk or in BigQuery.
                From then on the death of this process does not lose them. Never called if the
                writer is closed first.
        """
        self._journal.append([fields_of(row) for row in rows], on_safe)

    def write_hour(self, row: WorkerHour) -> None:
        """The same for a writer of the `worker_hours` table."""
        self._journal.append([fields_by_name(row)], None)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until BigQuery has every row, at most `timeout_s`. Returns whether it has."""
        return await asyncio.to_thread(self._flush, timeout_s)

    def _flush(self, timeout_s: float) -> bool:
        with self._journal.changed:
            self._flushes += 1
            self._journal.changed.notify_all()
            try:
                return self._journal.changed.wait_for(lambda: self.pending == 0, timeout_s)
            finally:
                self._flushes -= 1

    @property
    def _is_hurried(self) -> bool:
        """True if a caller waits for rows to be sent."""
        return self._flushes > 0 or self._give_up_s is not None

    def _run(self) -> None:
        """Sends rows until closed: full segments at once, the open one after it lingered."""
        pauses, takes_open = backoff(FIRST_PAUSE_S, MAX_PAUSE_S), True
        while not self._is_over():
            try:
                is_sent = self._send(takes_open or self._is_hurried)
            except Unavailable as error:
                FAILURES.inc()
                log.warning(
                    "rows not sent", extra={"reason": error.message, "pending": self.pending}
                )
            except Exception as error:  # a bug must cost a pause, not all rows that follow
                log.error("sending rows failed; this is a bug", exc_info=error)
            else:
                pauses, takes_open = backoff(FIRST_PAUSE_S, MAX_PAUSE_S), not is_sent
                if not is_sent and self._give_up_s is not None:
                    return
                if not is_sent:
                    self._wait_for_rows()
                continue
            self._pause(next(pauses))
            if self._give_up_s is not None:
                return

    def _is_over(self) -> bool:
        closing_s = self._give_up_s
        return closing_s is not None and (self.pending == 0 or time.monotonic() >= closing_s)

    def _send(self, takes_open: bool) -> bool:
        """Sends some batches. Returns False if there are none."""
        self._journal.save()
        first = self._journal.next_batch(takes_open)
        if first is None:
            return False
        attempts = [_Attempt(self._sender, first)]
        while len(attempts) < SENDERS and (more := self._journal.next_batch(takes_open=False)):
            attempts.append(_Attempt(self._sender, more))
        for attempt in attempts:
            attempt.start()
        for attempt in attempts:
            self._wait_for(attempt)
        for attempt in attempts:
            self._spool.reject(attempt.refused)
            if attempt.error is None:
                self._journal.mark_sent(attempt.batch)
        failed = [attempt for attempt in attempts if attempt.error is not None]
        for attempt in reversed(failed):  # they keep their order
            self._journal.requeue(attempt.batch)
        for attempt in failed:
            if attempt.error is not None:
                raise attempt.error
        return True

    def _wait_for(self, attempt: _Attempt) -> None:
        """Waits for an attempt, and looks after the rows that wait."""
        attempt.join(FIRST_PAUSE_S)
        while attempt.is_alive():  # BigQuery is slow, or hangs
            self._journal.save()
            self._journal.pack()
            attempt.join(FIRST_PAUSE_S)

    def _wait_for_rows(self) -> None:
        journal, changed = self._journal, self._journal.changed
        with changed:
            changed.notify_all()  # for callers of flush
            # Bounded, so that segments another process left behind are found in time too.
            changed.wait_for(lambda: journal.waiting or self._is_hurried, MAX_PAUSE_S)
            changed.wait_for(lambda: journal.is_full or self._is_hurried, self._sender.linger_s)
            if journal.is_short_of_disk:
                changed.wait_for(lambda: self._is_hurried, HURRY_S)

    def _pause(self, pause_s: float) -> None:
        """Waits before the next try, and looks after the rows that wait."""
        until_s = time.monotonic() + pause_s
        while (left_s := until_s - time.monotonic()) > 0 and self._give_up_s is None:
            self._journal.save()
            self._journal.pack()
            with self._journal.changed:
                self._journal.changed.wait(min(left_s, FIRST_PAUSE_S))
