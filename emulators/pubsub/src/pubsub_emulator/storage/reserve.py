"""Room on the disk that is given up when the disk is full, so that acks can still be written."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

FILE_NAME = "pubsub.reserve"
RESERVE_BYTES = 8 * 1024**2
"""As much as SQLite's log grows to before it is written back."""
LEAST_FREE_BYTES = 1024**2
ROOM_FOR_ACKS_BYTES = 2 * 1024**2
AMPLE_BYTES = 2 * 1024**3
AMPLE_S = 0.05
"""With so much more than is needed, the disk isn't looked at again before this. No disk takes so
much in so little time, and a look takes 0.02 ms, a quarter of the commit of a message.
"""
_LOG_NAME = "pubsub.sqlite3-wal"


class Reserve:
    """A file of zeros beside the database."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._log_path = data_dir / _LOG_NAME
        self._is_ample_until_s = 0.0

    def take(self) -> bool:
        """Makes the file, or what is missing of it. Returns whether the disk had the room."""
        try:
            # Also if it is there: a process that was killed here left less, and a copy has holes.
            with self._path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError:
            self.give_up()
            return False
        return True

    def covers(self, new_bytes: int) -> bool:
        """True if a commit leaves enough to write the log back, whatever the disk takes after it.

        What is in the log may all be new in the file. Once neither has room to grow, no ack can be
        written, and no room can be made.
        """
        now_s = time.monotonic()
        if now_s < self._is_ample_until_s:
            return True
        try:
            free_bytes = shutil.disk_usage(self._path.parent).free
            log_bytes = self._log_path.stat().st_size if self._log_path.exists() else 0
        except OSError:
            # Somebody removed the directory. SQLite has its files open and says itself what it can.
            return True
        needed_bytes = log_bytes + 2 * new_bytes + ROOM_FOR_ACKS_BYTES
        if free_bytes >= needed_bytes + AMPLE_BYTES:
            self._is_ample_until_s = now_s + AMPLE_S
        return free_bytes + RESERVE_BYTES >= needed_bytes

    def give_up_if_full(self) -> None:
        """Returns the room if nothing could be opened without it."""
        if shutil.disk_usage(self._path.parent).free < LEAST_FREE_BYTES:
            self.give_up()

    def give_up(self) -> None:
        """Returns the room to the disk."""
        with suppress(OSError):
            self._path.unlink()
