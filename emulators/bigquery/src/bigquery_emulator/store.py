"""The embedded BigQuery's DuckDB database: its file, sessions, and GoogleSQL macros.

Tables are in the attached database `data` (one file, or in memory), and query results are in
`memory`, so that a large result never touches the file. Statements that change `data` run in the
server's writer thread, one at a time. Streamed rows are added concurrently, in separate
transactions.
"""

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb

from bigquery_emulator.udf.registry import register, unregister

log = logging.getLogger(__name__)

Cursor = Any
FILE_NAME = "bigquery.duckdb"
_SUFFIXES = ("", ".wal", ".wal.checkpoint", ".wal.recovery")
"""Suffixes of the database files."""
_LOST = "has been invalidated"
_IS_DURABLE = "COMMIT succeeded and is durable"
"""DuckDB's message for a commit that succeeded even though the log could not be checkpointed."""
_IS_ATTACHED = "SELECT 1 FROM duckdb_databases() WHERE database_name = 'data'"
_MEMORY_LIMIT = "2GB"
_MACROS = Path(__file__).parent / "googlesql" / "macros.sql"


class Store:
    """A DuckDB instance. The server calls `open` when it starts and `close` when it stops.

    Args:
        data_dir: directory of the database file, created if missing. None keeps everything in
            memory.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._root: Cursor = None
        self._place = ":memory:"
        self.changes = 0
        """Incremented by each transaction before its caller gets the response."""
        self._is_lost = False
        self._reopened = 0
        """How many times the database was closed and reopened."""
        self._reopening = threading.Lock()
        self._counting = threading.Lock()
        self._uploads: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Opens the database and loads the macros.

        Raises:
            OSError: another process is using the file; the file is damaged, comes from a newer
                version, or is not a database; or the disk is full.
        """
        self._root = duckdb.connect(":memory:")
        self._root.execute("SET GLOBAL TimeZone = 'UTC'")
        self._root.execute(f"SET GLOBAL memory_limit = '{_MEMORY_LIMIT}'")
        # In GoogleSQL, LN(0) and similar calls are errors, not infinities.
        self._root.execute("SET GLOBAL ieee_floating_point_ops = false")
        spill_dir = ""
        if self._data_dir is not None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            self._place = str(self._data_dir / FILE_NAME)
            spill_dir = str(self._data_dir / "spill")
        # If the data is not on disk, a query that runs out of memory fails. By default, DuckDB
        # would spill to the working directory.
        self._root.execute(f"SET GLOBAL temp_directory = {_literal(spill_dir)}")
        try:
            self._attach()
        except (duckdb.Error, RuntimeError, ValueError) as error:
            self._root.close()
            self._root = None
            reason = str(error).split("\n")[0]
            raise OSError(f"cannot open {self._place}: {reason}") from error
        self._root.execute("CREATE SCHEMA bq")
        register(self._root)
        self._root.execute(_MACROS.read_text())
        # No query may access the machine's files or the network. Apart from the database itself,
        # which may be reopened, only Parquet files in this directory may be read.
        self._uploads = tempfile.TemporaryDirectory(prefix="penstock-bigquery-")
        self._root.execute(f"SET GLOBAL allowed_directories = [{_literal(self.uploads_dir)}]")
        if self._data_dir is not None:
            own = ", ".join(_literal(self._place + suffix) for suffix in _SUFFIXES)
            self._root.execute(f"SET GLOBAL allowed_paths = [{own}]")
        self._root.execute("SET GLOBAL enable_external_access = false")
        self._root.execute("SET GLOBAL lock_configuration = true")

    @property
    def uploads_dir(self) -> str:
        """The only directory whose files DuckDB may read. Holds uploads while they are loaded."""
        assert self._uploads is not None, "the store is not open: this is a bug"
        return self._uploads.name

    def close(self) -> None:
        """Writes the log back into the database file and closes it."""
        if self._uploads is not None:
            self._uploads.cleanup()
            self._uploads = None
        if self._root is not None:
            try:
                self._root.execute("CHECKPOINT data")
            except duckdb.Error as error:
                # This can happen when the disk is full. The log has everything and will be read at
                # the next startup.
                log.warning("the log stays beside the data: %s", str(error).split("\n")[0])
            unregister(self._root)
            self._root.close()
            self._root = None

    @contextmanager
    def reading(self) -> Iterator[Cursor]:
        """Opens a session that can only read `data`. Each statement sees one consistent state.

        Raises:
            duckdb.IOException: the database was lost because the disk is full and can't be reopened
            yet, or the database was just reopened.
        """
        if self._is_lost:
            self._reopen()
        reopened = self._reopened
        cursor = self._root.cursor()
        try:
            yield cursor
        except duckdb.Error as error:
            # DuckDB invalidates a database if it can't write its log back to the file, for example
            # on a full disk.
            self._is_lost = self._is_lost or _LOST in str(error)
            is_told = isinstance(error, duckdb.IOException | duckdb.InterruptException)
            if is_told or reopened == self._reopened:
                raise
            # Without the database, every table seems to be missing, but the statement may be valid.
            raise duckdb.IOException("the database was reopened in the meantime") from error
        finally:
            cursor.close()

    def _reopen(self) -> None:
        """Reopens the database. The log contains all confirmed changes.

        Waits first until all sessions that were open when the database was lost have been closed.
        """
        with self._reopening:
            if not self._is_lost:
                return
            self._reopened += 1
            if self._root.execute(_IS_ATTACHED).fetchone() is not None:
                self._root.execute("DETACH data")
            try:
                self._attach()
            except (duckdb.Error, RuntimeError, ValueError) as error:
                reason = str(error).split("\n")[0]
                raise duckdb.IOException(f"the database is being reopened: {reason}") from error
            self._is_lost = False
            self.changes += 1
            log.warning("%s was opened again after its disk was full", self._place)

    def _attach(self) -> None:
        self._root.execute(f"ATTACH {_literal(self._place)} AS data")

    @contextmanager
    def transaction(self) -> Iterator[Cursor]:
        """Opens a session that can change `data`.

        Its statements are either all committed together or not at all.

        Raises:
            duckdb.Error: the commit failed, and nothing was committed.
        """
        try:
            with self.reading() as cursor:
                cursor.execute("BEGIN")
                try:
                    yield cursor
                except BaseException:
                    with suppress(duckdb.Error):  # No transaction is left if the database was lost.
                        cursor.execute("ROLLBACK")
                    raise
                self._commit(cursor)
        finally:
            with self._counting:
                self.changes += 1

    def _commit(self, cursor: Cursor) -> None:
        # Not done with a plain statement, which would fail in the same way and look like a failed
        # commit.
        try:
            cursor.execute("COMMIT")
        except duckdb.IOException as error:
            if _IS_DURABLE not in str(error):
                raise
            self._is_lost = self._is_lost or _LOST in str(error)
            log.warning("the log was not written back: %s", str(error).split("\n")[0])


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
