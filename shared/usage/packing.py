"""Segments of rows that wait for long, compressed: a fifth of the size.

A packed segment is gzip of the same lines. Its name has the number of rows, so that nobody needs to
read it to count them: `<segment>.<rows>.gz`. It replaces the segment in one rename. A process that
dies in between leaves both, and the packed one counts.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import zlib
from contextlib import suppress
from pathlib import Path

SUFFIX = ".gz"
HALF_MADE = ".new"
LEVEL = 1
"""4 µs of CPU a row, as much as writing it. Level 6 takes 10 µs for a sixth less."""


def is_packed(path: Path) -> bool:
    """Whether this is the name of a packed segment."""
    return path.suffix == SUFFIX


def rows_in(path: Path) -> int:
    """The number of rows in a packed segment, by its name. 0 if it is no such name."""
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
