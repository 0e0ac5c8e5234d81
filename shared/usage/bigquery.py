"""Sends rows to BigQuery: stores them on disk until they are sent, and wraps Google's client.

Rows are stored in segments of JSON lines, in a folder that processes may share. Each owner locks
its segments. A lock (flock) is released when its process exits, no matter how. A segment that can
be locked therefore has no live owner, and whichever process locks it sends its rows. Nothing is
fsynced: written rows survive a crash of the process, but not of the machine.

A segment that waits for a long time is compressed to a fifth of its size. A packed segment is a
gzip file with the same lines. Its name includes the number of rows, so that they can be counted
without reading the file: `<segment>.<rows>.gz`. It is renamed into place before the segment is
removed. If a process dies in between, both remain, and only the packed one is used.

Google's client writes rows and runs queries. Its errors are translated, and rejected rows are
separated from the rows to retry. The sending thread imports it when the first rows arrive, because
the import takes longer than the API's startup.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import itertools
import json
import logging
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client import Counter

from shared.errors import MALFORMED, Unavailable

log = logging.getLogger(__name__)

PACKED_SUFFIX = ".gz"
HALF_MADE = ".new"
LEVEL = 1
"""Takes 4 µs of CPU time per row, as much as writing the row. Level 6 takes 10 µs and saves only a
sixth more.
"""

CREATE_TRIES = 3

REJECTED = Counter(
    "penstock_rows_rejected_total",
    "Rows that BigQuery rejected permanently; kept in rejected.jsonl",
)

Fields = dict[str, Any]
"""One row, keyed by column name."""
RowLine = bytes
"""One row as a JSON object, without a line break."""
_ENCODER = msgspec.json.Encoder()

SEND_TIMEOUT_S = 10.0
CANCEL_LIMIT_S = 2.0
TOO_LARGE = "bytes billed"
"""BigQuery's error text when a query would read more than `maximum_bytes_billed`."""
TIMED_OUT = "timed out"
"""BigQuery's error text when it stops a job after `job_timeout_ms`."""
REFUSED = frozenset({400, 413})
"""Statuses for invalid rows.

Other problems (a missing table, permission, or quota) can be fixed, so they are retried.
"""

NO_FIELD = "no such field"
"""BigQuery's error reason for a row with a column that the table does not have."""

WRITTEN = Counter("penstock_rows_written_total", "Rows that BigQuery has")
TRIMMED = Counter(
    "penstock_rows_trimmed_total", "Rows written without the columns that an older table lacks"
)


def is_packed(path: Path) -> bool:
    """Returns whether this is a packed segment's name."""
    return path.suffix == PACKED_SUFFIX


def rows_in(path: Path) -> int:
    """Returns the number of rows in a packed segment, based on its name.

    Returns 0 for any other name.
    """
    count = path.name.removesuffix(PACKED_SUFFIX).rpartition(".")[2]
    return int(count) if count.isdecimal() else 0


def original_of(path: Path) -> Path:
    """Returns the path of the segment that a packed segment replaced."""
    return path.with_name(path.name.removesuffix(PACKED_SUFFIX).rpartition(".")[0] + ".segment")


def pack(path: Path, data: bytes, rows: int) -> tuple[Path, int]:
    """Compresses a segment that the caller has locked.

    Returns:
        The packed segment, and its size in bytes.

    Raises:
        OSError: the packed segment could not be written to disk. The original segment is unchanged.
    """
    packed = path.with_name(f"{path.stem}.{rows}{PACKED_SUFFIX}")
    half_made = packed.with_name(packed.name + HALF_MADE)
    squeezed = gzip.compress(data, LEVEL, mtime=0)
    # Only the owner of the segment's lock writes here, so an existing file was left by a dead
    # process.
    fd = os.open(half_made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # The packed segment must not be sent while the segment still exists.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(fd, "wb", closefd=False) as file:
            file.write(squeezed)
        half_made.rename(packed)
        path.unlink()
    except OSError:
        half_made.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return packed, len(squeezed)


def clear_half_made(folder: Path) -> None:
    """Deletes files left by processes that died while packing. Their segments still exist."""
    for path in folder.glob(f"*{PACKED_SUFFIX}{HALF_MADE}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def unpack(data: bytes) -> bytes:
    """Returns the lines in a packed segment.

    Raises:
        ValueError: the segment is damaged.
    """
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


class Segment:
    """A file of rows, locked by this process."""

    def __init__(self, path: Path, fd: int, size_bytes: int = 0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd

    def append(self, rows: Sequence[RowLine]) -> None:
        """Appends lines.

        After an error, nothing more may be appended, because the last line may be incomplete.

        Raises:
            OSError: not all of the lines could be written.
        """
        lines = b"".join(row + b"\n" for row in rows)
        taken_bytes = os.write(self._fd, lines)
        self.size_bytes += taken_bytes
        if taken_bytes < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def since_s(self) -> float:
        """Unix time when the segment was created."""
        return _since_s(self.path)

    def release(self) -> None:
        """Releases the lock, so that any process may send the rows.

        Calling it again does nothing.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SegmentSize(NamedTuple):
    """The number of rows and bytes in a segment without an owner."""

    rows: int
    size_bytes: int


class Spool:
    """The folder of segments.

    Two threads may call `create` and `release` concurrently. Only one thread may call the other
    methods.

    Args:
        max_bytes: limit on all segments without an owner. Beyond that, no new segments are created.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._numbers = itertools.count()
        self._unseen_paths: list[Path] = []
        self._stuck: set[Path] = set()
        self.unowned: dict[Path, SegmentSize] = {}
        """Segments without an owner at the last scan, oldest first."""

    @property
    def unowned_rows(self) -> int:
        """Number of rows in segments without an owner."""
        return sum(size.rows for size in list(self.unowned.values()))

    @property
    def unowned_bytes(self) -> int:
        """Number of bytes in segments without an owner."""
        return sum(size.size_bytes for size in list(self.unowned.values()))

    @property
    def oldest_s(self) -> float:
        """Unix time when the oldest segment without an owner was created, or now."""
        return min(map(_since_s, list(self.unowned)), default=time.time())

    def create(self) -> Segment:
        """Creates an empty segment.

        Raises:
            OSError: the disk or the folder's limit does not allow another segment.
        """
        if self.unowned_bytes >= self._max_bytes:
            raise OSError(
                errno.EDQUOT, f"rows on disk have reached the limit of {self._max_bytes} bytes"
            )
        for _ in range(CREATE_TRIES):
            path = self._folder / f"{time.time_ns()}-{os.getpid()}-{next(self._numbers)}.segment"
            fd = self._open_new(path)
            try:
                # Another process may have deleted the empty file before we locked it.
                is_ours = _lock(fd) and os.fstat(fd).st_nlink
            except OSError:
                os.close(fd)
                raise
            if is_ours:
                return Segment(path, fd)
            os.close(fd)
        raise OSError(errno.EAGAIN, "another process took the new segments")

    def _open_new(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    def adopt(self) -> tuple[Segment, list[RowLine]] | None:
        """Locks the oldest segment without an owner, and returns it with its rows.

        None if there are no such segments.

        Until the caller removes the segment, it still counts as having no owner.
        """
        for is_new in (False, True):
            if is_new:
                self.scan()
            while self._unseen_paths:
                path = self._unseen_paths.pop(0)
                adopted = self._adopt(path)
                if adopted is not None:
                    return adopted
                self.unowned.pop(path, None)
        return None

    def _adopt(self, path: Path) -> tuple[Segment, list[RowLine]] | None:
        """Locks a segment, and returns it with its rows.

        None if it has an owner, no readable rows, or is damaged. In the last two cases, it is
        removed or set aside.
        """
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if not _lock(fd) or not os.fstat(fd).st_nlink:
                os.close(fd)
                return None
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
        except OSError:
            os.close(fd)
            raise
        segment = Segment(path, fd, len(data))
        try:
            lines = unpack(data) if is_packed(path) else data
        except ValueError as error:
            self._set_aside(segment, str(error))
            return None
        rows = self._read_lines(lines)
        if rows:
            return segment, rows
        self.remove(segment)
        return None

    def _read_lines(self, data: bytes) -> list[RowLine]:
        """Returns only complete lines with a row.

        A writer that died mid-line never reported that line as safe.
        """
        rows, unreadable = [], []
        for line in data.split(b"\n")[:-1]:
            try:
                msgspec.json.decode(line, type=Fields)["row_id"]
            except (*MALFORMED, KeyError) as error:
                damaged = _ENCODER.encode({"line": line.decode(errors="replace")})
                unreadable.append((damaged, f"unreadable on disk: {error}"))
            else:
                rows.append(line)
        self.reject(unreadable)
        return rows

    def _set_aside(self, segment: Segment, reason: str) -> None:
        """Sets aside an unreadable packed segment for inspection."""
        rows = rows_in(segment.path)
        REJECTED.inc(rows)
        aside = segment.path.with_name(segment.path.name + ".damaged")
        log.error("rows unreadable", extra={"rows": rows, "reason": reason, "path": str(aside)})
        try:
            segment.path.rename(aside)
        except OSError:  # otherwise, it would be read again and again
            self._stuck.add(segment.path)
        segment.release()

    def pack(self, limit: int) -> None:
        """Compresses segments without an owner, up to `limit` of them.

        Raises:
            OSError: the packed segments could not be written to disk. The original segments are
                unchanged.
        """
        waiting = (
            path for path in list(self.unowned) if not is_packed(path) and path not in self._stuck
        )
        for path in itertools.islice(waiting, limit):
            with suppress(FileNotFoundError), path.open("rb") as file:
                # st_nlink == 0: another process already sent or packed this segment.
                if not _lock(file.fileno()) or not os.fstat(file.fileno()).st_nlink:
                    continue
                data = file.read()
                if rows := data.count(b"\n"):
                    packed, size_bytes = pack(path, data, rows)
                    self.unowned[packed] = SegmentSize(rows, size_bytes)
                    self.unowned.pop(path, None)
                    self._unseen_paths.append(packed)

    def scan(self) -> None:
        """Finds segments without an owner and counts their rows."""
        before, segments = dict(self.unowned), dict[Path, SegmentSize]()
        packed = set(self._folder.glob(f"*{PACKED_SUFFIX}"))
        replaced = {original_of(path) for path in packed}
        clear_half_made(self._folder)
        for path in sorted(packed.union(self._folder.glob("*.segment"))):
            if path in self._stuck:
                continue
            if path in before and path not in replaced:
                segments[path] = before[path]
                continue
            with suppress(OSError), path.open("rb") as file:
                if not _lock(file.fileno()):
                    continue
                if path in replaced:  # left by a process that died before it could delete it
                    path.unlink()
                elif path in packed:
                    size_bytes = os.fstat(file.fileno()).st_size
                    segments[path] = SegmentSize(rows_in(path), size_bytes)
                else:
                    data = file.read()
                    segments[path] = SegmentSize(data.count(b"\n"), len(data))
        # Updated in place, because other threads count at the same time and must not see too few
        # rows.
        self.unowned.update(segments)
        for path in before.keys() - segments.keys():
            self.unowned.pop(path, None)
        self._unseen_paths = list(segments)

    def release(self, segment: Segment, rows: int) -> None:
        """Releases a segment to the next process that adopts it, which may be this one."""
        self.unowned[segment.path] = SegmentSize(rows, segment.size_bytes)
        segment.release()

    def remove(self, segment: Segment) -> None:
        """Removes a segment whose rows have all been sent or rejected."""
        try:
            segment.path.unlink(missing_ok=True)
        except (
            OSError
        ) as error:  # the disk became read-only; skip it, or it would be resent forever
            self._stuck.add(segment.path)
            log.warning(
                "segment not removed", extra={"path": str(segment.path), "reason": str(error)}
            )
        segment.release()

    def reject(self, refused: Sequence[tuple[RowLine, str]]) -> None:
        """Keeps rows that BigQuery rejected permanently, with the reason, for inspection."""
        if not refused:
            return
        REJECTED.inc(len(refused))
        log.error("rows rejected", extra={"rows": len(refused), "reason": refused[0][1]})
        lines = b"".join(
            _ENCODER.encode({"reason": reason, "row": msgspec.Raw(row)}) + b"\n"
            for row, reason in refused
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "rejected.jsonl").open("ab", buffering=0) as file:
                file.write(lines)
        except OSError as error:
            log.error(
                "rejected rows could not be saved",
                extra={"reason": str(error), "lines": lines.decode()[:65536]},
            )


def _since_s(path: Path) -> float:
    nanoseconds = path.name.partition("-")[0]
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else time.time()


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class BigQuerySender:
    """insertAll through Google's client, with translated errors.

    Args:
        table: `DATASET.TABLE`.
        endpoint: URL of an embedded BigQuery, or empty for Google's.
    """

    linger_s = 1.0
    """An insertAll costs as much CPU time as a request, and rows are not urgent."""

    def __init__(self, project: str, table: str, endpoint: str) -> None:
        self._project = project
        self._table = f"{project}.{table}"
        self._endpoint = endpoint
        self._client: Any = None

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        """Inserts `rows`. Returns permanently rejected rows with BigQuery's reasons.

        A table from an older release lacks the newest columns. In that case, rows are written
        without them, and counted.

        Raises:
            Unavailable: not all rows were inserted. Send all of them again: BigQuery drops
                those it already has by their insert IDs.
        """
        refused = self._insert_all([msgspec.json.decode(row) for row in rows])
        return [(_ENCODER.encode(row), reason) for row, reason in refused]

    def _insert_all(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        refused = self._insert(rows)
        older = [row for row, reason in refused if NO_FIELD in reason]
        if older:
            missing = next(reason for _, reason in refused if NO_FIELD in reason)
            log.warning(
                "the table is missing columns", extra={"rows": len(older), "reason": missing}
            )
            wrong = [(row, reason) for row, reason in refused if NO_FIELD not in reason]
            still_wrong = self._insert(older, ignore_unknown_values=True)
            TRIMMED.inc(len(older) - len(still_wrong))
            refused = wrong + still_wrong
        WRITTEN.inc(len(rows) - len(refused))
        return refused

    def _insert(self, rows: Sequence[Fields], **options: bool) -> list[tuple[Fields, str]]:
        """Inserts `rows`, in two halves if BigQuery rejects the request because of one of them.

        Returns the rejected rows with BigQuery's reasons.

        Raises:
            Unavailable: see `send`.
        """
        from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            errors = self._open().insert_rows_json(
                self._table,
                list(rows),
                row_ids=[_insert_id(row) for row in rows],
                skip_invalid_rows=True,
                retry=None,
                timeout=SEND_TIMEOUT_S,
                **options,
            )
        except GoogleAPICallError as error:
            if error.code not in REFUSED:
                raise Unavailable(f"BigQuery: {error}") from error
            if len(rows) == 1:
                return [(rows[0], str(error))]
            # one invalid row fails the request, so separate it from the other rows
            half = len(rows) // 2
            return self._insert(rows[:half], **options) + self._insert(rows[half:], **options)
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise Unavailable(f"BigQuery: {error}") from error
        return [(rows[error["index"]], json.dumps(error["errors"])) for error in errors]

    def _open(self) -> Any:
        if self._client is None:
            self._client = open_client(self._project, self._endpoint)
        return self._client


def run_query(
    client: Any,
    sql: str,
    config: Any,
    limit_s: float,
    *,
    retry: Any = None,
    max_results: int | None = None,
) -> tuple[Any, Any]:
    """Runs a query with a time limit that BigQuery also enforces. Returns the query's job and rows.

    Args:
        client: result of `open_client`.
        config: a QueryJobConfig, to which the limit is added.
        limit_s: maximum number of seconds per query.

    Raises:
        Unavailable: the query took too long.
        google.api_core.exceptions.GoogleAPIError: BigQuery rejected the query or is unreachable.
    """
    from google.api_core.exceptions import GoogleAPICallError

    config.job_timeout_ms = int(limit_s * 1000)
    job = client.query(sql, job_config=config, retry=retry, job_retry=None, timeout=limit_s)
    try:
        rows = job.result(retry=retry, job_retry=None, timeout=limit_s, max_results=max_results)
    except TimeoutError as error:
        _cancel(job)
        raise _too_slow(limit_s, error) from error
    except GoogleAPICallError as error:
        if TIMED_OUT in str(error):
            raise _too_slow(limit_s, error) from error
        raise
    return job, rows


def public_reason(reason: str, otherwise: str) -> str:
    """Returns the part of a BigQuery query error that callers may see.

    Args:
        otherwise: text to return if nothing better is known.
    """
    if TOO_LARGE in reason:
        return "the query reads too many bytes; use a shorter range"
    return otherwise


def _cancel(job: Any) -> None:
    """Asks BigQuery to cancel an abandoned job. The job's time limit stops it in any case."""
    from google.api_core.exceptions import GoogleAPIError
    from requests.exceptions import RequestException

    with suppress(GoogleAPIError, RequestException, TimeoutError):
        job.cancel(retry=None, timeout=CANCEL_LIMIT_S)


def _too_slow(limit_s: float, error: Exception) -> Unavailable:
    return Unavailable(
        f"BigQuery: query did not finish within {limit_s:g} s: {error}",
        public=f"the query took longer than {limit_s:g} s; use a shorter range",
    )


def _insert_id(row: Fields) -> str:
    """Returns the ID that BigQuery uses to drop duplicates, on a best-effort basis.

    Distinct rows are kept.
    """
    return ":".join(str(row[name]) for name in ("row_id", "status", "attempt") if name in row)


def open_client(project: str, endpoint: str) -> Any:
    """Returns Google's client for a project.

    If an endpoint is set, the client uses an embedded BigQuery.
    """
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import bigquery

    options: dict[str, Any] = {"project": project}
    if endpoint:
        options |= {
            "credentials": AnonymousCredentials(),
            "client_options": {"api_endpoint": endpoint},
        }
    return bigquery.Client(**options)
