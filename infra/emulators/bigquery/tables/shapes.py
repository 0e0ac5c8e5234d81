"""The lock between streamed rows and changes of the tables that they go to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from infra.emulators.bigquery.errors import BusyError

_LONGEST_WAIT_S = 60.0


class ShapeLock:
    """Held while a row is added, and while a table that exists is altered, replaced or removed.

    A row that is added while its table is built anew would be missing there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits for the lock and holds it for the length of a `with` block.

        Raises:
            BusyError: another held it for a minute.
        """
        if not self._lock.acquire(timeout=_LONGEST_WAIT_S):
            raise BusyError("Exceeded rate limits: a table was being altered for too long")
        try:
            yield
        finally:
            self._lock.release()
