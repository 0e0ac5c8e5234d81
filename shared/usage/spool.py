"""Rows on disk: segments of JSON lines in a folder that processes may share.

Each owner locks its segments. A lock (flock) ends with its process, however that ends. So a segment
that can be locked has no living owner, and the process that locks it sends its rows. Nothing is
synced: written rows outlive the process, but not the machine.

A segment that waits for long is packed, to a fifth of its size. A packed segment is gzip of the
same lines. Its name has the number of rows, so that nobody needs to read it to count them:
`<segment>.<rows>.gz`. It replaces the segment in one rename. A process that dies in between leaves
both, and the packed one counts.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import itertools
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

log = logging.getLogger(__name__)

SUFFIX = ".gz"
HALF_MADE = ".new"
LEVEL = 1
"""4 µs of CPU a row, as much as writing it. Level 6 takes 10 µs for a sixth less."""


def is_packed(path: Path) -> bool:
    """Returns whether this is the name of a packed segment."""
    return path.suffix == SUFFIX


def rows_in(path: Path) -> int:
    """Returns the rows in a packed segment, by its name. 0 if the name is of another form."""
    count = path.name.removesuffix(SUFFIX).rpartition(".")[2]
    return int(count) if count.isdecimal() else 0


def original_of(path: Path) -> Path:
    """The segment that a packed one has replaced."""
    return path.with_name(path.name.removesuffix(SUFFIX).rpartition(".")[0] + ".segment")


def pack(path: Path, data: bytes, rows: int) -> tuple[Path, int]:
    """Replaces a segment whose lock the caller has.

    Args:
        path: the segment.
        data: what it holds.
        rows: how many that are.

    Returns:
        The packed one, and its bytes.

    Raises:
        OSError: the disk did not take it. The segment is as before.
    """
    packed = path.with_name(f"{path.stem}.{rows}{SUFFIX}")
    half_made = packed.with_name(packed.name + HALF_MADE)
    squeezed = gzip.compress(data, LEVEL, mtime=0)
    # Only who has the lock of the segment writes here, so what is there is of a dead process.
    fd = os.open(half_made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Nobody may send the packed one while the segment is still there.
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
    """Removes what processes left that died while they packed. Their segments are still there."""
    for path in folder.glob(f"*{SUFFIX}{HALF_MADE}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def unpack(data: bytes) -> bytes:
    """The lines in a packed segment.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


CREATE_TRIES = 3

REJECTED = Counter(
    "penstock_rows_rejected_total", "Rows that BigQuery refused for good; kept in rejected.jsonl"
)

Fields = dict[str, Any]
"""One row by column."""
_ENCODER = msgspec.json.Encoder()


class Segment:
    """A file of rows whose lock we hold."""

    def __init__(self, path: Path, fd: int, size_bytes: int = 0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd

    def append(self, rows: Sequence[Fields]) -> None:
        """Appends lines.

        After an error nothing more may be added, because the last line may be incomplete.

        Raises:
            OSError: the disk did not take all of it.
        """
        lines = b"".join(_ENCODER.encode(row) + b"\n" for row in rows)
        taken_bytes = os.write(self._fd, lines)
        self.size_bytes += taken_bytes
        if taken_bytes < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def since_s(self) -> float:
        """When it was made, unix seconds."""
        return _since_s(self.path)

    def release(self) -> None:
        """Releases the lock, so that any process may send the rows. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SegmentSize(NamedTuple):
    """The rows and bytes of a segment without an owner."""

    rows: int
    size_bytes: int


class Spool:
    """The folder.

    Two threads may call `create` and `release` at once. Other methods belong to one thread.

    Args:
        folder: created when first needed.
        max_bytes: limit of all segments without an owner. Above it no new segment is created.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._numbers = itertools.count()
        self._unseen: list[Path] = []
        self._stuck: set[Path] = set()
        self.unowned: dict[Path, SegmentSize] = {}
        """Segments without an owner at the last scan, oldest first."""

    @property
    def unowned_rows(self) -> int:
        """Rows in segments without an owner."""
        return sum(size.rows for size in list(self.unowned.values()))

    @property
    def unowned_bytes(self) -> int:
        """Bytes of segments without an owner."""
        return sum(size.size_bytes for size in list(self.unowned.values()))

    @property
    def oldest_s(self) -> float:
        """When the oldest segment without an owner was created, unix seconds, or now."""
        return min(map(_since_s, list(self.unowned)), default=time.time())

    def create(self) -> Segment:
        """A new, empty segment.

        Raises:
            OSError: the disk or the bound of this folder does not allow it.
        """
        if self.unowned_bytes >= self._max_bytes:
            raise OSError(
                errno.EDQUOT, f"rows on disk have reached their limit of {self._max_bytes} bytes"
            )
        for _ in range(CREATE_TRIES):
            path = self._folder / f"{time.time_ns()}-{os.getpid()}-{next(self._numbers)}.segment"
            fd = self._open_new(path)
            # Another process may have come by before the lock was ours, and cleared the empty file
            # away.
            if _lock(fd) and os.fstat(fd).st_nlink:
                return Segment(path, fd)
            os.close(fd)
        raise OSError(errno.EAGAIN, "new segments were taken by another process")

    def _open_new(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    def adopt(self) -> tuple[Segment, list[Fields]] | None:
        """Locks the oldest segment without an owner, and returns it with its rows.

        None if there is none.

        It still counts as unowned until the caller removes it there.
        """
        for is_new in (False, True):
            if is_new:
                self.scan()
            while self._unseen:
                path = self._unseen.pop(0)
                adopted = self._adopt(path)
                if adopted is not None:
                    return adopted
                self.unowned.pop(path, None)
        return None

    def _adopt(self, path: Path) -> tuple[Segment, list[Fields]] | None:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if not _lock(fd) or not os.fstat(fd).st_nlink:
            os.close(fd)
            return None
        with open(fd, "rb", closefd=False) as file:
            data = file.read()
        segment = Segment(path, fd, len(data))
        try:
            rows = self._decode(unpack(data) if is_packed(path) else data)
        except ValueError as error:
            self._set_aside(segment, str(error))
            return None
        if rows:
            return segment, rows
        self.remove(segment)
        return None

    def _decode(self, data: bytes) -> list[Fields]:
        """Whole lines only: a writer that died in the middle of one never said that it was safe."""
        rows, unreadable = [], []
        for line in data.split(b"\n")[:-1]:
            try:
                row = msgspec.json.decode(line, type=Fields)
                row["row_id"]
            except (msgspec.DecodeError, KeyError) as error:
                unreadable.append(
                    ({"line": line.decode(errors="replace")}, f"unreadable on disk: {error}")
                )
            else:
                rows.append(row)
        self.reject(unreadable)
        return rows

    def _set_aside(self, segment: Segment, reason: str) -> None:
        """Keeps a packed segment that can't be read, for a person to look at."""
        rows = rows_in(segment.path)
        REJECTED.inc(rows)
        aside = segment.path.with_name(segment.path.name + ".damaged")
        log.error("rows unreadable", extra={"rows": rows, "reason": reason, "path": str(aside)})
        try:
            segment.path.rename(aside)
        except OSError:  # it would be read forever
            self._stuck.add(segment.path)
        segment.release()

    def pack(self, most: int) -> None:
        """Compresses segments without an owner, up to a limit.

        Raises:
            OSError: the disk does not take them. They are as before.
        """
        waiting = (
            path for path in list(self.unowned) if not is_packed(path) and path not in self._stuck
        )
        for path in itertools.islice(waiting, most):
            with suppress(FileNotFoundError), path.open("rb") as file:
                # st_nlink == 0: another process already sent or packed this segment.
                if not _lock(file.fileno()) or not os.fstat(file.fileno()).st_nlink:
                    continue
                data = file.read()
                if rows := data.count(b"\n"):
                    packed, size_bytes = pack(path, data, rows)
                    self.unowned[packed] = SegmentSize(rows, size_bytes)
                    self.unowned.pop(path, None)
                    self._unseen.append(packed)

    def scan(self) -> None:
        """Finds the segments without an owner and counts their rows."""
        before, segments = dict(self.unowned), dict[Path, SegmentSize]()
        packed = set(self._folder.glob(f"*{SUFFIX}"))
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
                if path in replaced:  # by a process that died before it could remove it
                    path.unlink()
                elif path in packed:
                    size_bytes = os.fstat(file.fileno()).st_size
                    segments[path] = SegmentSize(rows_in(path), size_bytes)
                else:
                    data = file.read()
                    segments[path] = SegmentSize(data.count(b"\n"), len(data))
        # In place: others count at the same time, and must not see fewer rows than there are.
        self.unowned.update(segments)
        for path in before.keys() - segments.keys():
            self.unowned.pop(path, None)
        self._unseen = list(segments)

    def release(self, segment: Segment, rows: int) -> None:
        """Releases a segment to the next process that adopts it, which may be this one."""
        self.unowned[segment.path] = SegmentSize(rows, segment.size_bytes)
        segment.release()

    def remove(self, segment: Segment) -> None:
        """Removes a segment whose rows are all sent or rejected."""
        try:
            segment.path.unlink(missing_ok=True)
        except (
            OSError
        ) as error:  # a disk that became read-only: left alone, or it would be sent forever
            self._stuck.add(segment.path)
            log.warning(
                "segment not removed", extra={"path": str(segment.path), "reason": str(error)}
            )
        segment.release()

    def reject(self, refused: Sequence[tuple[Fields, str]]) -> None:
        """Keeps what BigQuery refused for good, with the reason, for a person to look at."""
        if not refused:
            return
        REJECTED.inc(len(refused))
        log.error("rows rejected", extra={"rows": len(refused), "reason": refused[0][1]})
        lines = b"".join(
            _ENCODER.encode({"reason": reason, "row": row}) + b"\n" for row, reason in refused
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "rejected.jsonl").open("ab", buffering=0) as file:
                file.write(lines)
        except OSError as error:
            log.error(
                "rejected rows not kept",
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
