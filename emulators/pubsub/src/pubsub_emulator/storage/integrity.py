"""Tells what a data directory lost or what is damaged in it, which SQLite does not.

SQLite ends its log at the first frame that is not whole, without a word, and its file has no
checksums. So each record has one, and the number of the last commit is also beside the file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

FILE_NAME = "pubsub.commits"
_CRC_BYTES = 4
_NUMBER_BYTES = 8


def sealed(data: bytes) -> bytes:
    """A record with its checksum (CRC-32) behind it."""
    return data + zlib.crc32(data).to_bytes(_CRC_BYTES, "big")


def unsealed(record: bytes) -> bytes | None:
    """The data of a sealed record. None: it is damaged."""
    data, crc = record[:-_CRC_BYTES], record[-_CRC_BYTES:]
    return data if zlib.crc32(data).to_bytes(_CRC_BYTES, "big") == crc else None


class LastCommit:
    """The number of the last commit, in a file of its own.

    It is written after each commit and does not wait for the disk, so it is never ahead of what the
    process has committed. After a power cut it may be.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = os.open(data_dir / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(self) -> int:
        """The number. 0 if there is none, or it is damaged."""
        data = unsealed(os.pread(self._file, _NUMBER_BYTES + _CRC_BYTES, 0))
        return int.from_bytes(data, "big") if data else 0

    def write(self, number: int) -> None:
        """Keeps the number. On a disk that is full the old one stays, which only says less."""
        try:
            os.pwrite(self._file, sealed(number.to_bytes(_NUMBER_BYTES, "big")), 0)
        except OSError:
            return
