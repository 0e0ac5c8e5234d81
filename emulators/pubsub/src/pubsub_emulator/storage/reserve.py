"""Disk space that is freed when the disk fills up, so that acks can still be written."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

FILE_NAME = "pubsub.reserve"
RESERVE_BYTES = 8 * 1024**2
"""The size to which SQLite's log grows before it is written back."""
LEAST_FREE_BYTES = 1024**2
ROOM_FOR_ACKS_BYTES = 2 * 1024**2
AMPLE_BYTES = 2 * 1024**3
AMPLE_S = 0.05
"""With this much more space than needed, the disk is not checked again for a while.

No disk fills up that quickly, and a check takes 0.02 ms, a quarter of a message's commit time.
"""
_LOG_NAME = "pubsub.sqlite3-wal"


class Reserve:
    """A file of zeros next to the database."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._log_path = data_dir / _LOG_NAME
        self._is_ample_until_s = 0.0

    def take(self) -> bool:
        """Create the file, or extend it. Returns whether the disk had enough space."""
        try:
            # Done even if the file exists, because a process killed at this point leaves a shorter
            # file, and a copy may have holes.
            with self._path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError:
            self.give_up()
            return False
        return True

    def covers(self, new_bytes: int) -> bool:
        """True if a commit leaves enough space to write the log back, regardless of other disk use.

        Everything in the log may be new to the database file. If neither file can grow, acks can't
        be written and no space can be freed.
        """
        now_s = time.monotonic()
        if now_s < self._is_ample_until_s:
            return True
        try:
            free_bytes = shutil.disk_usage(self._path.parent).free
            log_bytes = self._log_path.stat().st_size if self._log_path.exists() else 0
        except OSError:
            # The directory was removed. SQLite keeps its files open and reports errors itself.
            return True
        needed_bytes = log_bytes + 2 * new_bytes + ROOM_FOR_ACKS_BYTES
        if free_bytes >= needed_bytes + AMPLE_BYTES:
            self._is_ample_until_s = now_s + AMPLE_S
        return free_bytes + RESERVE_BYTES >= needed_bytes

    def give_up_if_full(self) -> None:
        """Free the reserve if nothing could be opened otherwise."""
        if shutil.disk_usage(self._path.parent).free < LEAST_FREE_BYTES:
            self.give_up()

    def give_up(self) -> None:
        with suppress(OSError):
            self._path.unlink()
