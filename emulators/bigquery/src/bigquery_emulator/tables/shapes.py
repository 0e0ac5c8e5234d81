"""What keeps streamed rows and changes of the tables that they go to apart."""

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
    """Which tables take rows, and which are altered, replaced or removed.

    A row that is added while its table is built anew would be missing there.

    Args:
        patience_s: how long rows wait for a change of their table, from its begin.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._is_free = threading.Condition()
        self._adding: Counter[TableKey] = Counter()
        self._since_s: dict[TableKey, float] = {}
        """When the change of a table began."""

    @contextmanager
    def adding(self, key: TableKey) -> Iterator[None]:
        """Keeps a table as it is while rows are added, for the length of a `with` block.

        All rows that come share one thread. So the wait counts from the begin of the change: rows
        of other tables wait that long at most, however many requests of this table come.

        Raises:
            UnavailableError: the change takes longer. The rows are worth a retry.
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
                self._adding += Counter()  # forgets those at 0
                self._is_free.notify_all()

    @contextmanager
    def changing(self, key: TableKey) -> Iterator[None]:
        """Keeps rows from a table for the length of a `with` block. There is one writer.

        Raises:
            BusyError: rows were being added for a minute.
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
