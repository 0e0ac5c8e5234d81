"""Prevents rows from being streamed into a table while it is being changed."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from bigquery_emulator.errors import BusyError, UnavailableError
from bigquery_emulator.tables.resources import TableKey

_PATIENCE_S = 1.0
_LONGEST_WAIT_S = 60.0


class Shapes:
    """Tracks which tables are receiving rows and which are being altered, replaced, or removed.

    A row added while its table is being rebuilt would be lost.

    Args:
        patience_s: how long rows wait for a change to their table, measured from the start of the
            change.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._is_free = threading.Condition()
        self._adding: Counter[TableKey] = Counter()
        self._since_s: dict[TableKey, float] = {}
        """When the change to each table started."""

    @contextmanager
    def adding(self, key: TableKey) -> Iterator[None]:
        """Prevents changes to a table while rows are being added, during a `with` block.

        All incoming rows share one thread, so the wait is measured from the start of the change:
        rows for other tables wait at most that long, no matter how many requests arrive for this
        table.

        Raises:
            UnavailableError: the change is taking longer than that. The rows can be sent again.
        """
        with self._is_free:
            while (since_s := self._since_s.get(key)) is not None:
                left_s = since_s + self._patience_s - time.monotonic()
                if left_s <= 0:
                    raise UnavailableError(f"Table {key} is being changed. Try again later.")
                self._is_free.wait(left_s)
            self._adding[key] += 1
        try:
            yield
        finally:
            with self._is_free:
                self._adding[key] -= 1
                self._adding += Counter()  # drops zero counts
                self._is_free.notify_all()

    @contextmanager
    def changing(self, key: TableKey) -> Iterator[None]:
        """Keeps rows out of a table during a `with` block.

        There is only one writer, so changes never overlap.

        Raises:
            BusyError: rows have been arriving for a minute without a break.
        """
        with self._is_free:
            self._since_s[key] = time.monotonic()
        try:
            with self._is_free:
                if not self._is_free.wait_for(lambda: not self._adding[key], _LONGEST_WAIT_S):
                    raise BusyError(f"Exceeded rate limits: rows were being added to {key}")
            yield
        finally:
            with self._is_free:
                del self._since_s[key]
                self._is_free.notify_all()
