"""Writes rows to a table in the background, in BigQuery or the object store.

Rows are written to disk immediately, and deleted once they have been sent. `RowWriter.write` puts a
row into the journal, which survives a crash of this process. A thread sends the rows, one segment
at a time. Each insertId is built from row_id, status, and attempt, so BigQuery drops duplicates on
a best-effort basis, and the `rows_deduplicated` view always does. Rows that can't be sent stay on
disk. The thread also sends rows left by other processes in the same folder. A thread is needed
because Google's client is synchronous. The sender determines where the rows go
(shared/usage/senders.py).

The journal holds the rows that BigQuery doesn't have yet: on disk first, and in memory until they
are sent. `Journal.append` runs on the event loop. It writes rows with one write(2) to the page
cache, which costs less than waking a thread. Everything else is called from the thread. If disk
writes fail or are slow, the thread takes over. Rows then wait in memory, and are considered safe
only once they are on disk or in BigQuery.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from prometheus_client import Counter, Gauge

from shared.errors import Unavailable
from shared.process.concurrency import backoff
from shared.settings import SPOOL_MAX_BYTES
from shared.usage.bigquery import Fields, RowLine, Segment, Spool
from shared.usage.row import Row
from shared.usage.senders import RowSender
from shared.usage.worker_hour import WorkerHour
from shared.usage.worker_start import WorkerStart

BATCH_ROWS = 500
"""Google's recommended number of rows per insertAll:
https://docs.cloud.google.com/bigquery/quotas#streaming_inserts
"""
MEMORY_ROWS = 20_000
"""Limit on rows in memory, whether or not they are also on disk."""
PACKED_AT_ONCE = 50
"""Number of segments to compress between two checks for rows in memory. Takes about 0.1 s."""
SLOW_DISK_S = 0.1
"""Writes that take longer would block the event loop, so the thread takes over."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
CLOSE_LIMIT_S = 5.0
"""How long `close` waits for the other thread's write."""

DISK_UP = Gauge(
    "penstock_rows_disk_up",
    "1 while the disk accepts rows as they arrive, 0 while they wait in memory",
)
DISK_ERRORS = Counter("penstock_rows_disk_errors_total", "Writes of rows that failed or were slow")
LOST = Counter(
    "penstock_rows_lost_total", "Rows lost because neither disk nor BigQuery accepted them in time"
)

SENDERS = 4
"""Number of batches sent concurrently while there is a backlog.

An insertAll takes BigQuery tens of milliseconds or more. If batches were sent one at a time, it
would take hours to catch up after an outage of a few minutes.
"""
HURRY_S = 0.05
"""How long to wait for more rows when disk writes fail and jobs are waiting for their rows."""
CLOSE_S = 2.0
"""Time limit for the last sends when closing. A container has ten seconds for its whole shutdown.
"""
FAILURES = Counter(
    "penstock_rows_send_failures_total", "Requests to BigQuery that failed; their rows are kept"
)
PENDING = Gauge("penstock_rows_pending", "Rows that BigQuery does not have yet")
PENDING_BYTES = Gauge("penstock_rows_pending_bytes", "Size on disk of the pending rows")
OLDEST = Gauge("penstock_rows_oldest_seconds", "Age of the oldest pending row; 0 if there are none")

_encoder = msgspec.json.Encoder()
_open_writers: list[RowWriter] = []
"""This process's writers. The gauges cover all of this process's writers."""

log = logging.getLogger(__name__)


class UnsavedRow(NamedTuple):
    """A row that is only in memory, and the callback to run once it is safe."""

    line: RowLine
    on_safe: Callable[[], None] | None
    loop: asyncio.AbstractEventLoop | None
    since_s: float


@dataclass(eq=False, slots=True)
class RowBatch:
    """Rows that are sent together: a segment's rows, or rows that are only in memory."""

    segment: Segment | None
    rows: list[RowLine]
    since_s: float
    unsaved: list[UnsavedRow] = field(default_factory=list)


def notify_safe(rows: Sequence[UnsavedRow]) -> None:
    """Calls every `on_safe` on its event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for row in rows:
        if row.on_safe is not None and row.loop is not None:
            by_loop.setdefault(row.loop, []).append(row.on_safe)
    for loop, calls in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so its callers are gone too
            loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Journal:
    """Rows that have been written but not sent.

    `changed` guards them, and is notified when the thread has work.
    """

    def __init__(self, spool: Spool) -> None:
        self.changed = threading.Condition()
        self._spool = spool
        self._open: RowBatch | None = None
        self._sealed: deque[RowBatch] = deque()
        self._unsaved: deque[UnsavedRow] = deque()
        self._in_flight: list[RowBatch] = []
        self._is_disk_up = True
        self._retry_disk_at_s = 0.0
        self._disk_pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._is_losing = False
        # At shutdown, two threads write rows to disk: the writer's, which may hang in a request,
        # and the caller of `close`.
        self._saving = threading.Lock()

    def open(self) -> None:
        """Counts earlier processes' rows. A failing disk shows up with the first row."""
        DISK_UP.set(1)
        with _disk_errors_counted("rows of earlier processes not found"):
            self._spool.scan()

    def append(self, rows: Sequence[RowLine], on_safe: Callable[[], None] | None) -> None:
        """Adds rows, on the event loop. Never raises."""
        with self.changed:
            was_empty = not self.waiting
            if self._is_disk_up and self._write(rows):
                if on_safe is not None:
                    asyncio.get_running_loop().call_soon(on_safe)
            elif on_safe is None:
                self._keep_some_in_memory(rows)
            else:
                self._keep_in_memory(rows, on_safe)
            if was_empty or self._open is None:
                self.changed.notify_all()

    def _keep_some_in_memory(self, rows: Sequence[RowLine]) -> None:
        """Keeps rows that no caller is waiting for, as long as there is room."""
        kept_rows = rows[: max(0, MEMORY_ROWS - len(self._unsaved))]
        now_s = time.time()
        self._unsaved.extend(UnsavedRow(line, None, None, now_s) for line in kept_rows)
        self._lose(len(rows) - len(kept_rows))

    def _keep_in_memory(self, rows: Sequence[RowLine], on_safe: Callable[[], None]) -> None:
        """Keeps rows, and calls `on_safe` when all of them are safe."""
        loop, now_s, unsafe_count = asyncio.get_running_loop(), time.time(), len(rows)

        def mark_safe() -> None:
            nonlocal unsafe_count
            unsafe_count -= 1
            if not unsafe_count:
                on_safe()

        self._unsaved.extend(UnsavedRow(line, mark_safe, loop, now_s) for line in rows)

    def _write(self, rows: Sequence[RowLine]) -> bool:
        """Returns whether the rows are on disk now."""
        began_s = time.perf_counter()
        try:
            if self._open is None:
                segment = self._spool.create()
                self._open = RowBatch(segment, [], segment.since_s)
            batch = self._open
            assert batch.segment is not None, "only segments are open; this is a bug"
            batch.segment.append(rows)
            batch.rows.extend(rows)
            if len(batch.rows) >= BATCH_ROWS:
                self._seal()
        except OSError as error:
            self._disk_failed(str(error))
            return False
        took_s = time.perf_counter() - began_s
        if took_s > SLOW_DISK_S:
            self._disk_failed(f"a write took {took_s:.3f} s")
        return True

    def _seal(self) -> None:
        """Closes the open segment. Batches over the memory limit are kept only on disk."""
        batch, self._open = self._open, None
        if batch is not None and batch.rows:
            self._sealed.append(batch)
        elif batch is not None and batch.segment is not None:
            self._spool.remove(batch.segment)
        while len(self._sealed) > MEMORY_ROWS // BATCH_ROWS:
            self._release(self._sealed.popleft())

    def _release(self, batch: RowBatch) -> None:
        if batch.segment is not None:
            self._spool.release(batch.segment, len(batch.rows))

    def _disk_failed(self, reason: str) -> None:
        DISK_ERRORS.inc()
        self._seal()
        self._retry_disk_at_s = time.monotonic() + (
            next(self._disk_pauses) if not self._is_disk_up else 0.0
        )
        if self._is_disk_up:
            self._is_disk_up = False
            DISK_UP.set(0)
            log.warning(
                "can't write rows to disk; keeping them in memory", extra={"reason": reason}
            )

    def _disk_worked(self) -> None:
        self._disk_pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        if not self._is_disk_up:
            self._is_disk_up = True
            DISK_UP.set(1)
            log.info("rows can be written to disk again", extra={"in_memory": len(self._unsaved)})

    def _lose(self, rows: int) -> None:
        LOST.inc(rows)
        if rows and not self._is_losing:
            self._is_losing = True
            log.error(
                "rows were lost: writing to disk and to BigQuery both failed",
                extra={"in_memory": len(self._unsaved)},
            )

    def save(self) -> None:
        """Writes rows that are only in memory to disk, if an attempt is due."""
        with self._saving:
            self._save()

    def _save(self, is_last: bool = False) -> None:
        while self._unsaved and (is_last or self.is_disk_due):
            with self.changed:
                rows = list(islice(self._unsaved, BATCH_ROWS))  # kept until they are on disk
            began_s = time.perf_counter()
            try:
                batch = self._batch_on_disk(rows)
            except OSError as error:
                with self.changed:
                    self._disk_failed(str(error))
                return
            with self.changed:
                for _ in rows:
                    self._unsaved.popleft()
                self._sealed.append(batch)
                if time.perf_counter() - began_s <= SLOW_DISK_S:
                    self._disk_worked()
            notify_safe(rows)

    def pack(self) -> None:
        """Compresses rows that are only on disk, a few segments at a time.

        These rows wait a long time.
        """
        with _disk_errors_counted("segments not compressed"):
            self._spool.pack(PACKED_AT_ONCE)

    def _batch_on_disk(self, rows: Sequence[UnsavedRow]) -> RowBatch:
        segment = self._spool.create()
        try:
            segment.append([row.line for row in rows])
        except OSError:
            self._spool.remove(segment)
            raise
        return RowBatch(segment, [row.line for row in rows], rows[0].since_s)

    @property
    def is_disk_due(self) -> bool:
        """True if rows are only in memory and it is time to try the disk."""
        return bool(self._unsaved) and time.monotonic() >= self._retry_disk_at_s

    def next_batch(self, takes_open: bool) -> RowBatch | None:
        """Returns the next rows to send, or None.

        They are in flight until `mark_sent` or `requeue`.

        Args:
            takes_open: True if an incomplete segment may be sent too.
        """
        with self.changed:
            if self._unsaved:
                rows = [self._unsaved.popleft() for _ in range(min(BATCH_ROWS, len(self._unsaved)))]
                return self._fly(RowBatch(None, [row.line for row in rows], rows[0].since_s, rows))
            if not self._sealed and takes_open:
                self._seal()
            if self._sealed:
                return self._fly(self._sealed.popleft())
        with _disk_errors_counted("segment not read"):
            adopted = self._spool.adopt()
            if adopted is not None:
                with self.changed:
                    self._spool.unowned.pop(adopted[0].path, None)
                    return self._fly(RowBatch(*adopted, adopted[0].since_s))
        return None

    def _fly(self, batch: RowBatch) -> RowBatch:
        self._in_flight.append(batch)
        return batch

    def _land(self, batch: RowBatch) -> None:
        if batch in self._in_flight:  # not after `close`
            self._in_flight.remove(batch)

    def mark_sent(self, batch: RowBatch) -> None:
        """Records that BigQuery has the rows of `batch`, or rejected them permanently."""
        if batch.segment is not None:
            self._spool.remove(batch.segment)
        with self.changed:
            self._land(batch)
            self._is_losing = False
            self.changed.notify_all()
        notify_safe(batch.unsaved)

    def requeue(self, batch: RowBatch) -> None:
        """Records that `batch` was not sent."""
        with self.changed:
            self._land(batch)
            if batch.segment is None:
                self._unsaved.extendleft(reversed(batch.unsaved))
            else:
                self._sealed.appendleft(batch)
            self.changed.notify_all()

    def close(self) -> None:
        """Leaves everything on disk, even rows in flight. The thread may be stuck in a request."""
        has_disk = self._saving.acquire(timeout=CLOSE_LIMIT_S)
        try:
            with self.changed:
                for batch in self._in_flight[::-1]:
                    self.requeue(batch)
            if has_disk:  # otherwise the other thread is stuck in a write
                self._save(is_last=True)
        finally:
            if has_disk:
                self._saving.release()
        with self.changed:
            # The other rows' jobs were never acked, so they are redelivered, and their rows are
            # rewritten.
            self._lose(sum(row.on_safe is None for row in self._unsaved))
            self._unsaved.clear()
            self._seal()
            while self._sealed:
                self._release(self._sealed.popleft())

    @property
    def waiting(self) -> bool:
        """True if rows written here are waiting and not in flight."""
        return self._open is not None or bool(self._sealed) or bool(self._unsaved)

    @property
    def is_full(self) -> bool:
        """True if a full batch is waiting, or any rows that can become safe only in BigQuery."""
        return bool(self._sealed) or bool(self._unsaved)

    @property
    def is_short_of_disk(self) -> bool:
        """True if some rows are only in memory."""
        return bool(self._unsaved)

    @property
    def rows(self) -> int:
        """Number of rows not in BigQuery: here, in flight, and in segments without an owner."""
        with self.changed:
            held = sum(len(batch.rows) for batch in self._list_held())
            return held + len(self._unsaved) + self._spool.unowned_rows

    @property
    def size_bytes(self) -> int:
        with self.changed:
            return self._spool.unowned_bytes + sum(
                batch.segment.size_bytes for batch in self._list_held() if batch.segment
            )

    @property
    def oldest_s(self) -> float:
        """Unix time when the oldest of these rows was written, or now if there are none."""
        with self.changed:
            held = min((batch.since_s for batch in self._list_held()), default=time.time())
            unsaved_s = self._unsaved[0].since_s if self._unsaved else held
            return min(held, unsaved_s, self._spool.oldest_s)

    def _list_held(self) -> Sequence[RowBatch]:
        return [
            *self._sealed,
            *self._in_flight,
            *([] if self._open is None else [self._open]),
        ]


@contextmanager
def _disk_errors_counted(operation: str) -> Iterator[None]:
    """Counts a disk error and continues, because only the copy on disk is missing."""
    try:
        yield
    except OSError as error:
        DISK_ERRORS.inc()
        log.warning(operation, extra={"reason": str(error)})


def fields_of(row: Row) -> Fields:
    """Returns the row as BigQuery columns. None is omitted."""
    fields: Fields = msgspec.to_builtins(row)
    return fields


def fields_by_name(row: msgspec.Struct) -> Fields:
    """Returns a row whose fields already have column names. None is omitted."""
    columns: Fields = msgspec.to_builtins(row)
    return {column: value for column, value in columns.items() if value is not None}


class _Attempt(threading.Thread):
    """Sends one batch. A daemon thread, so that the process can exit while a request hangs."""

    def __init__(self, sender: RowSender, batch: RowBatch) -> None:
        super().__init__(name="rows-sending", daemon=True)
        self.batch = batch
        self.refused: list[tuple[RowLine, str]] = []
        self.error: Exception | None = None
        self._sender = sender

    def run(self) -> None:
        """Sends the batch, and stores the outcome."""
        rows = self.batch.rows
        try:
            for start in range(0, len(rows), BATCH_ROWS):
                self.refused += self._sender.send(rows[start : start + BATCH_ROWS])
        except Exception as error:
            # Raised again by the thread that waits for this one.
            self.error = error


class RowWriter:
    """Writes rows to a sender's table.

    Args:
        sender: the rows' destination. Each table has a separate writer and folder, so that a
            missing table doesn't delay another table's rows.
        spool_dir: folder for rows on disk. Processes may share it.
        spool_max_bytes: limit on rows without a live owner. Beyond that, new rows stay in memory.
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
        PENDING.set_function(lambda: sum(writer.pending for writer in _open_writers))
        PENDING_BYTES.set_function(lambda: sum(writer.pending_bytes for writer in _open_writers))
        OLDEST.set_function(
            lambda: max((writer.oldest_age_s for writer in _open_writers), default=0.0)
        )
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with self._journal.changed:
            self._give_up_s = time.monotonic() + CLOSE_S
            self._journal.changed.notify_all()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        await asyncio.to_thread(self._journal.close)
        _open_writers.remove(self)

    @property
    def pending_bytes(self) -> int:
        """Size of the pending rows on disk, in bytes."""
        return self._journal.size_bytes

    @property
    def oldest_age_s(self) -> float:
        """Age of the oldest pending row, in seconds. 0 if no rows are pending."""
        return time.time() - self._journal.oldest_s if self._journal.rows else 0.0

    @property
    def pending(self) -> int:
        """Number of rows that BigQuery does not have yet: in memory, in flight, and on disk."""
        return self._journal.rows

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Adds rows, on the event loop. Never waits for BigQuery and never raises.

        Args:
            on_safe: called once, later on this event loop, when each row is on disk or in BigQuery.
                From then on, the rows survive a crash of this process. Never called if the writer
                is closed first.
        """
        self._journal.append([_encoder.encode(row) for row in rows], on_safe)

    def write_report(self, row: WorkerHour | WorkerStart) -> None:
        """The same, for a writer whose table is `worker_hours` or `worker_starts`."""
        self._journal.append([_encoder.encode(fields_by_name(row))], None)

    async def flush(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for BigQuery to receive every row. Returns whether it has."""
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
        """True if a caller is waiting for rows to be sent."""
        return self._flushes > 0 or self._give_up_s is not None

    def _run(self) -> None:
        """Sends rows until closed: full segments immediately, and the open one after a delay."""
        pauses, takes_open = backoff(FIRST_PAUSE_S, MAX_PAUSE_S), True
        while not self._is_over():
            is_closing = self._give_up_s is not None  # so that no more rows are written
            try:
                is_sent = self._send(takes_open or self._is_hurried)
            except Unavailable as error:
                FAILURES.inc()
                log.warning(
                    "rows not sent", extra={"reason": error.message, "pending": self.pending}
                )
            except Exception as error:  # a bug may cause a pause, but must not lose all later rows
                log.error("sending rows failed; this is a bug", exc_info=error)
            else:
                pauses, takes_open = backoff(FIRST_PAUSE_S, MAX_PAUSE_S), not is_sent
                if not is_sent and is_closing:
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
        """Sends some batches. Returns False if there were none."""
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
            if attempt.error is None:  # otherwise, the refused rows are sent again too
                self._spool.reject(attempt.refused)
                self._journal.mark_sent(attempt.batch)
        failed = [attempt for attempt in attempts if attempt.error is not None]
        for attempt in reversed(failed):  # keeps their order
            self._journal.requeue(attempt.batch)
        for attempt in failed:
            if attempt.error is not None:
                raise attempt.error
        return True

    def _wait_for(self, attempt: _Attempt) -> None:
        """Waits for an attempt to finish, and handles waiting rows in the meantime."""
        attempt.join(FIRST_PAUSE_S)
        while attempt.is_alive():  # BigQuery is slow or hanging
            self._journal.save()
            self._journal.pack()
            attempt.join(FIRST_PAUSE_S)

    def _wait_for_rows(self) -> None:
        journal, changed = self._journal, self._journal.changed
        with changed:
            changed.notify_all()  # for callers of flush
            # Bounded, so that segments left behind by another process are found in time too.
            changed.wait_for(lambda: journal.waiting or self._is_hurried, MAX_PAUSE_S)
            changed.wait_for(lambda: journal.is_full or self._is_hurried, self._sender.linger_s)
            if journal.is_short_of_disk:
                changed.wait_for(lambda: self._is_hurried, HURRY_S)

    def _pause(self, pause_s: float) -> None:
        """Waits before the next attempt, and handles waiting rows in the meantime."""
        until_s = time.monotonic() + pause_s
        while (left_s := until_s - time.monotonic()) > 0 and self._give_up_s is None:
            self._journal.save()
            self._journal.pack()
            with self._journal.changed:
                self._journal.changed.wait(min(left_s, FIRST_PAUSE_S))
