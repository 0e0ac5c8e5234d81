"""Rows that BigQuery does not have yet: on disk first, and in memory until they are sent.

`append` runs on the event loop. It writes rows with one write(2) into the page cache, which costs
less than waking a thread. The thread of shared/usage/writer.py calls everything else. If the
disk refuses rows or is slow, that thread takes over. Rows then wait in memory, and count as safe
only once the disk or BigQuery has them.

It also knows the rows in flight, and calls back when rows are safe.
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
from typing import NamedTuple

from prometheus_client import Counter, Gauge

from shared.backoff import backoff
from shared.usage.spool import Fields, Segment, Spool

log = logging.getLogger(__name__)


class UnsavedRow(NamedTuple):
    """A row that is only in memory, and the callback for when it is safe."""

    fields: Fields
    on_safe: Callable[[], None] | None
    loop: asyncio.AbstractEventLoop | None
    since_s: float


@dataclass(eq=False, slots=True)
class RowBatch:
    """Rows that are sent together: those of a segment, or some that are in memory alone."""

    segment: Segment | None
    rows: list[Fields]
    since_s: float
    unsaved: list[UnsavedRow] = field(default_factory=list)


def notify_safe(rows: Sequence[UnsavedRow]) -> None:
    """Calls every `on_safe` on its event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for row in rows:
        if row.on_safe is not None and row.loop is not None:
            by_loop.setdefault(row.loop, []).append(row.on_safe)
    for loop, calls in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and so are its callers
            loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


BATCH_ROWS = 500
"""The number of rows that Google recommends for one insertAll:
https://docs.cloud.google.com/bigquery/quotas#streaming_inserts
"""
MEMORY_ROWS = 20_000
"""Limit of rows in memory: for copies of rows on disk, and for rows that are not on disk."""
PACKED_AT_ONCE = 50
"""Segments that are compressed between two looks at rows in memory. It takes about 0.1 s."""
SLOW_DISK_S = 0.1
"""A write that takes longer holds the event loop up: the thread takes over."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
CLOSE_LIMIT_S = 5.0
"""The time that `close` waits for a write of the other thread."""

DISK_UP = Gauge(
    "penstock_rows_disk_up", "1 while the disk takes rows as they come, 0 while they wait in memory"
)
DISK_ERRORS = Counter(
    "penstock_rows_disk_errors_total", "Writes of rows that the disk refused or was slow with"
)
LOST = Counter(
    "penstock_rows_lost_total", "Rows given up because neither disk nor BigQuery took them in time"
)


class Journal:
    """Rows that were written and not sent.

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
        # At the end two threads put rows on disk: the writer's, which may hang in a request, and
        # that of `close`.
        self._saving = threading.Lock()

    def open(self) -> None:
        """Counts the rows of earlier processes. A disk that fails is noticed at the first row."""
        DISK_UP.set(1)
        with _disk_errors_counted("rows of earlier processes not found"):
            self._spool.scan()

    def append(self, rows: Sequence[Fields], on_safe: Callable[[], None] | None) -> None:
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

    def _keep_some_in_memory(self, rows: Sequence[Fields]) -> None:
        """Keeps the rows that nobody waits for, as far as there is room."""
        kept = rows[: max(0, MEMORY_ROWS - len(self._unsaved))]
        now_s = time.time()
        self._unsaved.extend(UnsavedRow(fields, None, None, now_s) for fields in kept)
        self._lose(len(rows) - len(kept))

    def _keep_in_memory(self, rows: Sequence[Fields], on_safe: Callable[[], None]) -> None:
        """Keeps rows, and calls `on_safe` when the last of them is safe."""
        loop, now_s, left = asyncio.get_running_loop(), time.time(), len(rows)

        def one_is_safe() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_safe()

        self._unsaved.extend(UnsavedRow(fields, one_is_safe, loop, now_s) for fields in rows)

    def _write(self, rows: Sequence[Fields]) -> bool:
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
        """Closes the open segment. Batches above the memory limit stay on disk only."""
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
            log.warning("disk does not take rows; they wait in memory", extra={"reason": reason})

    def _disk_worked(self) -> None:
        self._disk_pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        if not self._is_disk_up:
            self._is_disk_up = True
            DISK_UP.set(1)
            log.info("disk takes rows again", extra={"in_memory": len(self._unsaved)})

    def _lose(self, rows: int) -> None:
        LOST.inc(rows)
        if rows and not self._is_losing:
            self._is_losing = True
            log.error(
                "rows are lost: disk and BigQuery both fail",
                extra={"in_memory": len(self._unsaved)},
            )

    def save(self) -> None:
        """Writes rows that are only in memory to disk, if a try is due."""
        with self._saving:
            self._save()

    def _save(self, is_last: bool = False) -> None:
        while self._unsaved and (is_last or self.is_disk_due):
            with self.changed:
                rows = list(islice(self._unsaved, BATCH_ROWS))  # they stay until they are on disk
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
        """Compresses rows that are on disk only, some at a time: they wait for long."""
        with _disk_errors_counted("segments not compressed"):
            self._spool.pack(PACKED_AT_ONCE)

    def _batch_on_disk(self, rows: Sequence[UnsavedRow]) -> RowBatch:
        segment = self._spool.create()
        try:
            segment.append([row.fields for row in rows])
        except OSError:
            self._spool.remove(segment)
            raise
        return RowBatch(segment, [row.fields for row in rows], rows[0].since_s)

    @property
    def is_disk_due(self) -> bool:
        """True if rows are in memory alone and it is time to try the disk."""
        return bool(self._unsaved) and time.monotonic() >= self._retry_disk_at_s

    def next_batch(self, takes_open: bool) -> RowBatch | None:
        """Returns the next rows to send, or None.

        They are in flight until `mark_sent` or `requeue`.

        Args:
            takes_open: whether a segment that is not full may be sent too.
        """
        with self.changed:
            if self._unsaved:
                rows = [self._unsaved.popleft() for _ in range(min(BATCH_ROWS, len(self._unsaved)))]
                return self._fly(
                    RowBatch(None, [row.fields for row in rows], rows[0].since_s, rows)
                )
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
        """BigQuery has the rows of `batch`, or refused them for good."""
        if batch.segment is not None:
            self._spool.remove(batch.segment)
        with self.changed:
            self._land(batch)
            self._is_losing = False
            self.changed.notify_all()
        notify_safe(batch.unsaved)

    def requeue(self, batch: RowBatch) -> None:
        """`batch` was not sent."""
        with self.changed:
            self._land(batch)
            if batch.segment is None:
                self._unsaved.extendleft(reversed(batch.unsaved))
            else:
                self._sealed.appendleft(batch)
            self.changed.notify_all()

    def close(self) -> None:
        """Leaves everything on disk, rows in flight too, as the thread may hang in a request."""
        has_disk = self._saving.acquire(timeout=CLOSE_LIMIT_S)
        try:
            with self.changed:
                for batch in self._in_flight[::-1]:
                    self.requeue(batch)
            if has_disk:  # else the other thread hangs in a write
                self._save(is_last=True)
        finally:
            if has_disk:
                self._saving.release()
        with self.changed:
            # The others' jobs were never acked: they come again, and so do their rows.
            self._lose(sum(row.on_safe is None for row in self._unsaved))
            self._unsaved.clear()
            self._seal()
            while self._sealed:
                self._release(self._sealed.popleft())

    @property
    def waiting(self) -> bool:
        """True if rows that were written here wait and are not in flight."""
        return self._open is not None or bool(self._sealed) or bool(self._unsaved)

    @property
    def is_full(self) -> bool:
        """True if a whole batch waits, or rows that only BigQuery can make safe."""
        return bool(self._sealed) or bool(self._unsaved)

    @property
    def is_short_of_disk(self) -> bool:
        """True if rows are in memory alone."""
        return bool(self._unsaved)

    @property
    def rows(self) -> int:
        """Rows that BigQuery does not have: here, in flight, and in segments without an owner."""
        with self.changed:
            held = sum(len(batch.rows) for batch in self._held())
            return held + len(self._unsaved) + self._spool.unowned_rows

    @property
    def size_bytes(self) -> int:
        """Their size on disk."""
        with self.changed:
            return self._spool.unowned_bytes + sum(
                batch.segment.size_bytes for batch in self._held() if batch.segment
            )

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was written, unix seconds, or now if there is none."""
        with self.changed:
            held = min((batch.since_s for batch in self._held()), default=time.time())
            alone = self._unsaved[0].since_s if self._unsaved else held
            return min(held, alone, self._spool.oldest_s)

    def _held(self) -> Sequence[RowBatch]:
        return [
            *self._sealed,
            *self._in_flight,
            *([] if self._open is None else [self._open]),
        ]


@contextmanager
def _disk_errors_counted(what: str) -> Iterator[None]:
    """Counts a disk error and goes on: only the rows on the disk are missing."""
    try:
        yield
    except OSError as error:
        DISK_ERRORS.inc()
        log.warning(what, extra={"reason": str(error)})
