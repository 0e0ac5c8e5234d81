"""Rows on their way to BigQuery: written in the background, kept on disk while BigQuery is out of reach.

`write` only appends to a queue. A thread of its own sends what waits, at most BATCH_ROWS at a time, with row_id as
insertId, so that a repeat is dropped by BigQuery (best effort) or by the view `rows_deduplicated` (always). A batch
that can't be sent becomes a segment in the spool directory; segments are sent again when BigQuery answers, also by the
next process that starts there. A thread and not the event loop, because Google's client is synchronous; and the import
stands in the thread, because it takes longer than the rest of an API's start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from prometheus_client import Counter

from shared.errors import Unavailable
from shared.rows_spool import Fields, Spool
from shared.usage import Row

log = logging.getLogger(__name__)

TABLE = "rows"
BATCH_ROWS = 500
"""What Google recommends for one insertAll (platform-facts B4)."""
MEMORY_ROWS = 20_000
"""More than this waiting goes to disk at once."""
LINGER_S = 1.0
"""How long rows wait for company: one insertAll costs as much CPU as a whole request, and nobody waits for a row."""
SEND_TIMEOUT_S = 10.0
REFUSED = frozenset({400, 413})
"""Statuses that say the rows are wrong; all others (a missing table, a right, a quota) may be mended by somebody."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
CLOSE_S = 2.0
"""How long a close may take to send what is left; a container has ten seconds for all of its end."""

WRITTEN = Counter("penstock_rows_written_total", "Rows that BigQuery has")


def fields_of(row: Row) -> Fields:
    """The row as BigQuery's columns: `*_at_s` loses its unit, what is None is left out."""
    fields = msgspec.structs.asdict(row)
    return {
        name.removesuffix("_s") if name.endswith("_at_s") else name: v for name, v in fields.items() if v is not None
    }


class Waiting(NamedTuple):
    """A row on its way, and whom to tell when it can't be lost any more."""

    fields: Fields
    on_safe: Callable[[], None] | None
    loop: asyncio.AbstractEventLoop | None


class RowWriter:
    """Writes rows to `project.dataset.rows`.

    Args:
        project: the project of the dataset.
        dataset: the dataset id.
        endpoint: URL of an embedded BigQuery; empty for Google's.
        spool_dir: where rows wait on disk; may be shared by processes.
    """

    def __init__(self, *, project: str, dataset: str, endpoint: str, spool_dir: Path) -> None:
        self._table = f"{project}.{dataset}.{TABLE}"
        self._project = project
        self._endpoint = endpoint
        self._spool = Spool(spool_dir)
        self._waiting: deque[Waiting] = deque()
        self._wake = threading.Condition()
        self._in_flight: list[Waiting] = []
        self._flushes = 0
        self._give_up_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)

    async def __aenter__(self) -> Self:
        self._spool.open()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._wake:
            self._give_up_s = time.monotonic() + CLOSE_S
            self._wake.notify_all()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():  # BigQuery hangs; should it have taken the rows after all, row_id tells them apart
            self._keep(list(self._in_flight))
            self._spill(0)

    @property
    def pending(self) -> int:
        """Rows that BigQuery does not have yet: in memory, in the request in flight, and on disk."""
        return len(self._waiting) + len(self._in_flight) + self._spool.rows

    def write(self, row: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Queues a row; never waits for BigQuery and never raises.

        Args:
            row: what is to be written.
            on_safe: called once, on this event loop, when the row is on disk or in BigQuery: from then on the death
                of this process loses nothing.
        """
        loop = None if on_safe is None else asyncio.get_running_loop()
        with self._wake:
            self._waiting.append(Waiting(fields_of(row), on_safe, loop))
            self._wake.notify()
        if len(self._waiting) >= 2 * MEMORY_ROWS:  # the thread is held up in a request
            self._spill(MEMORY_ROWS)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until BigQuery has every row, at most `timeout_s`; says whether it has."""
        return await asyncio.to_thread(self._flush, timeout_s)

    def _flush(self, timeout_s: float) -> bool:
        with self._wake:
            self._flushes += 1
            self._wake.notify_all()
            try:
                return self._wake.wait_for(lambda: self.pending == 0, timeout_s)
            finally:
                self._flushes -= 1

    @property
    def _is_hurried(self) -> bool:
        """Whether somebody waits for rows to be sent."""
        return self._flushes > 0 or self._give_up_s is not None

    def _run(self) -> None:
        """The thread: sends until closed; then what is left goes to disk."""
        sender = Sender(self._project, self._table, self._endpoint)
        pause_s = FIRST_PAUSE_S
        while not self._is_over():
            try:
                is_sent = self._send_waiting(sender) or self._send_spooled(sender)
            except Unavailable as error:
                log.warning("rows not sent", extra={"reason": error.message, "pending": self.pending})
                if self._give_up_s is not None:
                    break
                self._pause(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            if not is_sent:
                self._wait_for_rows()
        self._spill(0)

    def _is_over(self) -> bool:
        closing_s = self._give_up_s
        return closing_s is not None and (self.pending == 0 or time.monotonic() >= closing_s)

    def _send_waiting(self, sender: Sender) -> bool:
        with self._wake:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_ROWS, len(self._waiting)))]
            self._in_flight = batch
        try:
            if batch:
                self._spool.reject(sender.send([row.fields for row in batch]))
                _tell_safe(batch)
        except Unavailable:
            self._keep(batch)
            raise
        finally:
            with self._wake:
                self._in_flight = []
                self._wake.notify_all()
        return bool(batch)

    def _send_spooled(self, sender: Sender) -> bool:
        is_sent = False
        for rows in self._spool.segments():
            for start in range(0, len(rows), BATCH_ROWS):
                self._spool.reject(sender.send(rows[start : start + BATCH_ROWS]))
            is_sent = True
        return is_sent

    def _wait_for_rows(self) -> None:
        with self._wake:
            self._wake.notify_all()  # whoever flushes
            # Bounded, so that segments another process left behind are found in time too.
            self._wake.wait_for(lambda: self._waiting or self._is_hurried, LONGEST_PAUSE_S)
            self._wake.wait_for(lambda: len(self._waiting) >= BATCH_ROWS or self._is_hurried, LINGER_S)

    def _pause(self, pause_s: float) -> None:
        """Waits before the next try; what arrives meanwhile beyond the bound goes to disk."""
        until_s = time.monotonic() + pause_s
        while (left_s := until_s - time.monotonic()) > 0 and self._give_up_s is None:
            with self._wake:
                self._wake.wait(left_s)
            if len(self._waiting) > MEMORY_ROWS:
                self._spill(MEMORY_ROWS // 2)

    def _spill(self, keep: int) -> None:
        with self._wake:
            rows = [self._waiting.popleft() for _ in range(max(0, len(self._waiting) - keep))]
        self._keep(rows)
        with self._wake:
            self._wake.notify_all()

    def _keep(self, rows: Sequence[Waiting]) -> None:
        self._spool.add([row.fields for row in rows])
        _tell_safe(rows)


def _tell_safe(rows: Sequence[Waiting]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for row in rows:
        if row.on_safe is not None and row.loop is not None:
            by_loop.setdefault(row.loop, []).append(row.on_safe)
    for loop, calls in by_loop.items():
        with suppress(RuntimeError):  # the loop has closed: nobody is left to be told
            loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Sender:
    """insertAll by Google's client, its errors translated."""

    def __init__(self, project: str, table: str, endpoint: str) -> None:
        self._project = project
        self._table = table
        self._endpoint = endpoint
        self._client: Any = None

    def send(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        """Inserts `rows` and returns those that BigQuery refused for good, with its reason.

        Raises:
            Unavailable: nothing was inserted as far as we know; try again.
        """
        from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            errors = self._open().insert_rows_json(
                self._table,
                list(rows),
                row_ids=[row["row_id"] for row in rows],
                skip_invalid_rows=True,
                retry=None,
                timeout=SEND_TIMEOUT_S,
            )
        except GoogleAPICallError as error:
            if error.code not in REFUSED:
                raise Unavailable(f"BigQuery: {error}") from error
            if len(rows) == 1:
                return [(rows[0], str(error))]
            half = len(rows) // 2  # one row spoils the request: the others must not go with it
            return self.send(rows[:half]) + self.send(rows[half:])
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise Unavailable(f"BigQuery: {error}") from error
        refused = [(rows[error["index"]], json.dumps(error["errors"])) for error in errors]
        WRITTEN.inc(len(rows) - len(refused))
        return refused

    def _open(self) -> Any:
        if self._client is None:
            from google.auth.credentials import AnonymousCredentials
            from google.cloud import bigquery

            given: dict[str, Any] = {"project": self._project}
            if self._endpoint:
                given |= {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": self._endpoint}}
            self._client = bigquery.Client(**given)
        return self._client
