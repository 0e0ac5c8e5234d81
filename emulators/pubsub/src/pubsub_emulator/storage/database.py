"""A data directory's SQLite file: WAL mode, one connection, one thread at a time."""

import logging
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pubsub_emulator.storage.changes import Changes
from pubsub_emulator.storage.integrity import LastCommit, sealed, unsealed
from pubsub_emulator.storage.reserve import RESERVE_BYTES, Reserve

FILE_NAME = "pubsub.sqlite3"
VERSION = 2
CHECKPOINT_PAGES = 2000
"""After 8 MiB, the log is written back into the file and reused from its start."""
LONGEST_LOG_BYTES = 64 * 1024**2
CACHE_KIB = 16 * 1024
SPARE_PAGES = 1024
"""Free pages that the file keeps for later use (4 MiB). The rest are returned to the disk."""
SHRINK_PAGES = 1024
"""Number of pages returned at a time. A publish may have to wait for this."""
PROBE_BYTES = 64 * 1024
"""After a failure, this much space must be available before anything new is accepted."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE resource (path TEXT PRIMARY KEY, holder INTEGER NOT NULL, moment_s REAL NOT NULL, proto BLOB NOT NULL);
CREATE TABLE message (sequence INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE held (
  sequence INTEGER, holder INTEGER, number INTEGER NOT NULL, attempts INTEGER NOT NULL, PRIMARY KEY (sequence, holder)
) WITHOUT ROWID;
CREATE TABLE probe (id INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE last_commit (id INTEGER PRIMARY KEY, number INTEGER NOT NULL);
PRAGMA user_version = {VERSION};
COMMIT;
"""  # noqa: E501
_FROM_VERSION_1 = f"""
BEGIN;
CREATE TABLE last_commit (id INTEGER PRIMARY KEY, number INTEGER NOT NULL);
UPDATE resource SET proto = sealed(proto);
UPDATE message SET data = sealed(data);
PRAGMA user_version = {VERSION};
COMMIT;
"""
"""Version 1 had no checksums."""
# A message and its holder rows are written in one transaction; this handles manually repaired
# files.
_ORPHANS = (
    "DELETE FROM held WHERE holder NOT IN (SELECT holder FROM resource)",
    "DELETE FROM message WHERE sequence NOT IN (SELECT sequence FROM held)",
)
_SAVE = "INSERT OR REPLACE INTO resource (path, holder, moment_s, proto) VALUES (?, ?, ?, ?)"
_ERASE = "DELETE FROM resource WHERE path = ?"
_KEEP = "INSERT OR REPLACE INTO message (sequence, data) VALUES (?, ?)"
_DROP = "DELETE FROM message WHERE sequence = ?"
_HOLD = "INSERT OR REPLACE INTO held (sequence, holder, number, attempts) VALUES (?, ?, ?, ?)"
_COUNT = "INSERT OR REPLACE INTO last_commit (id, number) VALUES (1, ?)"
_RELEASE = "DELETE FROM held WHERE sequence = ? AND holder = ?"


_log = logging.getLogger(__name__)


class WriteFailed(Exception):
    """The file could not be written (disk full or input/output error). It is unchanged."""


@contextmanager
def opened_database(data_dir: Path, *, fsync: bool) -> Iterator["Database"]:
    """Open a directory's file, creating it if it is missing, and close it when the block ends.

    Args:
        data_dir: the directory. Only one server can use it at a time.
        fsync: True if each commit waits for the disk. Otherwise, a commit survives any exit or
            crash of this process, but a power failure may lose the last few commits; the file stays
            intact.

    Raises:
        OSError: the directory can't be used, another server uses it, or the file has a different
            format.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    path, reserve = data_dir / FILE_NAME, Reserve(data_dir)
    reserve.give_up_if_full()
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise OSError(f"Pub/Sub can't open {path}: {error}") from error
    last_commit = LastCommit(data_dir)
    try:
        try:
            _prepare(connection, fsync=fsync)
            database = Database(connection, last_commit, reserve)
        except sqlite3.Error as error:
            hint = "; is another server using it?" if "locked" in str(error) else ""
            raise OSError(f"Pub/Sub can't use {path}: {error}{hint}") from error
        if database.lost_commits:
            _log.warning(
                "%s lacks the last %d commits: it or its log was cut, replaced or removed, or the "
                "power failed. Messages published in them are lost, and acks in them undone",
                path,
                database.lost_commits,
            )
        yield database
    finally:
        last_commit.close()
        # A full disk may prevent the last checkpoint, in which case the log stays and is read at
        # the next start.
        with suppress(sqlite3.Error):
            connection.close()


def _prepare(connection: sqlite3.Connection, *, fsync: bool) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {LONGEST_LOG_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        what = " ".join(state.split())
        raise sqlite3.DatabaseError(
            f"it is corrupt ({what}). Move it elsewhere to start without it"
        )
    if not tables:
        connection.executescript(_SCHEMA)
    elif version == 1:
        connection.create_function("sealed", 1, sealed, deterministic=True)
        connection.executescript(_FROM_VERSION_1)
    elif version != VERSION:
        raise sqlite3.DatabaseError(
            f"its version is {version}, but this server requires version {VERSION}"
        )
    for statement in _ORPHANS:
        connection.execute(statement)


class Database:
    """Reads everything once; from then on, it only writes.

    Args:
        last_commit: number of the previous process's last commit.
        reserve: space reserved for acks when the disk is full.
    """

    def __init__(
        self, connection: sqlite3.Connection, last_commit: LastCommit, reserve: Reserve
    ) -> None:
        self._connection = connection
        self._last_commit = last_commit
        self._reserve = reserve
        row = connection.execute("SELECT number FROM last_commit").fetchone()
        here, elsewhere = row[0] if row else 0, last_commit.read()
        self.lost_commits = max(0, elsewhere - here)
        """How many commits from earlier processes are missing from the file."""
        self._commits = here
        # Reset so that the loss is reported only once.
        last_commit.write(here)

    def resources(self) -> Iterator[tuple[str, int, float, bytes | None]]:
        """Yield the path, holder, time and serialized proto of each resource. None: damaged."""
        for path, holder, moment_s, proto in self._connection.execute(
            "SELECT path, holder, moment_s, proto FROM resource ORDER BY holder"
        ):
            yield path, holder, moment_s, unsealed(proto)

    def messages(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the sequence number and serialized proto of each message, oldest first.

        None: damaged.
        """
        for sequence, data in self._connection.execute(
            "SELECT sequence, data FROM message ORDER BY sequence"
        ):
            yield sequence, unsealed(data)

    def held(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each row's sequence, holder, delivery number and attempts, sorted by sequence."""
        yield from self._connection.execute(
            "SELECT sequence, holder, number, attempts FROM held ORDER BY sequence"
        )

    def highest_number(self) -> int:
        """Return the highest number in any row, so that no number is used twice."""
        (highest,) = self._connection.execute(
            "SELECT max((SELECT ifnull(max(sequence), 0) FROM message), "
            "(SELECT ifnull(max(number), 0) FROM held), "
            "(SELECT ifnull(max(holder), 0) FROM resource))"
        ).fetchone()
        return int(highest)

    def write(self, changes: Changes) -> None:
        """Write all changes as one transaction, or none.

        Do not modify the changes until this returns.

        Raises:
            WriteFailed: SQLite failed, for the reason given, or new data would take up space that
                acks need.
        """
        if changes.offered and not self._reserve.covers(changes.log_bytes):
            raise WriteFailed("the disk is nearly full")
        with self._transaction():
            self._write_rows(changes)
            self._connection.execute(_COUNT, (self._commits + 1,))
        self._commits += 1
        self._last_commit.write(self._commits)

    def remove(self, sequences: Collection[int]) -> None:
        """Remove messages and their holders. On a full disk, they stay until the next start."""
        with suppress(WriteFailed), self._transaction():
            for statement in (_DROP, "DELETE FROM held WHERE sequence = ?"):
                self._connection.executemany(statement, [(sequence,) for sequence in sequences])

    def take_reserve(self) -> None:
        """Reserve space for when the disk is full.

        Raises:
            WriteFailed: the disk is full.
        """
        if not self._reserve.take():
            raise WriteFailed(f"no space is left for {RESERVE_BYTES // 1024**2} MiB")

    def make_room(self) -> None:
        """When the disk is full, release the reserve and the log's space.

        Nothing is lost if this fails.
        """
        self._reserve.give_up()
        self._write_log_back()

    def _write_log_back(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def give_back(self) -> None:
        """When the disk is full, release as many unused pages as the remaining space allows.

        Raises:
            WriteFailed: contains SQLite's reason.
        """
        with _translated():
            self._connection.executescript("PRAGMA incremental_vacuum")
        self._write_log_back()

    def probe(self) -> None:
        """Check whether the disk has some space again.

        Raises:
            WriteFailed: contains SQLite's reason.
        """
        with self._transaction():
            self._connection.execute(
                "INSERT INTO probe (data) VALUES (zeroblob(?))", (PROBE_BYTES,)
            )
        with self._transaction():
            self._connection.execute("DELETE FROM probe")

    def shrink(self) -> bool:
        """Return some unused pages to the disk. Returns whether there are more.

        Raises:
            WriteFailed: contains SQLite's reason.
        """
        with _translated():
            (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            if free <= SPARE_PAGES:
                return False
            # Doesn't use `execute`, which runs only the first step of a statement that returns no
            # rows, so it would release only one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")
            if free > SPARE_PAGES + SHRINK_PAGES:
                return True
        self._write_log_back()
        return False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                # After some failures, SQLite has already rolled back.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _write_rows(self, changes: Changes) -> None:
        resources, held = changes.resources.items(), changes.held.items()
        write_each = self._connection.executemany
        saved = [(path, row) for path, row in resources if row is not None]
        write_each(_SAVE, [(path, *row[:-1], sealed(row[-1])) for path, row in saved])
        write_each(_ERASE, [(path,) for path, row in resources if row is None])
        messages = changes.messages.items()
        write_each(_KEEP, [(sequence, sealed(data)) for sequence, data in messages])
        write_each(_HOLD, [(*key, *row) for key, row in held if row is not None])
        write_each(_RELEASE, [key for key, row in held if row is None])
        write_each(_DROP, [(sequence,) for sequence in changes.dropped])


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise WriteFailed(str(error)) from error
