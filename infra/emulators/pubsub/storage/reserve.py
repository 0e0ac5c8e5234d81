"""Room on the disk that is given up when the disk is full, so that acks can still be written."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

FILE_NAME = "pubsub.reserve"
RESERVE_BYTES = 8 * 1024**2
"""As much as SQLite's log grows to before it is written back."""
LEAST_FREE_BYTES = 1024**2


class Reserve:
    """A file of zeros beside the database.

    Args:
        data_dir: where it is.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME

    def take(self) -> bool:
        """Makes the file, if it is missing. Returns whether the disk had the room."""
        if self._path.exists():
            return True
        try:
            with self._path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up_if_full(self) -> None:
        """Returns the room if nothing could be opened without it."""
        if shutil.disk_usage(self._path.parent).free < LEAST_FREE_BYTES:
            self.give_up()

    def give_up(self) -> None:
        """Returns the room to the disk."""
        with suppress(OSError):
            self._path.unlink()
