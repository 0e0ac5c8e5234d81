"""Detects lost or damaged data in a data directory, which SQLite does not do.

SQLite silently stops reading its log at the first incomplete frame, and its database file has no
checksums. So each record has a checksum, and the last commit's number is also stored in a separate
file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

FILE_NAME = "pubsub.commits"
_CRC_BYTES = 4
_NUMBER_BYTES = 8


def sealed(data: bytes) -> bytes:
    """Return a record followed by its checksum (CRC-32)."""
    return data + zlib.crc32(data).to_bytes(_CRC_BYTES, "big")


def unsealed(record: bytes) -> bytes | None:
    """Return the data of a sealed record. None: it is damaged."""
    data, crc = record[:-_CRC_BYTES], record[-_CRC_BYTES:]
    return data if zlib.crc32(data).to_bytes(_CRC_BYTES, "big") == crc else None


class LastCommit:
    """The last commit's number, in a separate file.

    It is written after each commit without waiting for the disk, so it is never ahead of the
    process's commits. After a power failure, however, it may be ahead of the database file.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = os.open(data_dir / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> int:
        """Return the number, or 0 if there is none or it is damaged."""
        data = unsealed(os.pread(self._file, _NUMBER_BYTES + _CRC_BYTES, 0))
        return int.from_bytes(data, "big") if data else 0

    def write(self, number: int) -> None:
        """Store the number. On a full disk, the old number stays, which only weakens the check."""
        try:
            os.pwrite(self._file, sealed(number.to_bytes(_NUMBER_BYTES, "big")), 0)
        except OSError:
            return
