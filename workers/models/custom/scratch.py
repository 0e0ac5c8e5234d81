"""The scratch folder of a runner: its home, its temporary files, and its working directory.

The working directory has the files of the class's folder: small ones as copies, large ones as
links. So a class reads its files by relative paths, and what it writes there is its own, as in a
container of Cog's: also an `output.png` that is there from an earlier run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path

PREFIX = "penstock-scratch-"
WORKING_DIR = "src"
LEFT_AFTER_S = 60.0
"""A younger folder may be one that is about to be locked."""
MAX_COPIED_BYTES = 8 * 1024 * 1024
"""Larger files are linked, and can't be written."""
MAX_COPIES_BYTES = 64 * 1024 * 1024
"""Of all copies together."""
MAX_ENTRIES = 10_000
"""Above it, folders are linked as a whole, and the class can't write into these."""
LINKED = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
"""Folders that are linked as a whole, as hidden ones are."""


class Scratch:
    """A scratch folder with the files of a class's folder, until it is closed.

    It is locked while this process lives. What a process that was killed has left is removed by the
    next one that makes a scratch folder on this machine.

    Args:
        folder: of the class.
    """

    def __init__(self, folder: Path) -> None:
        remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _locked(self.path)
        (self.path / WORKING_DIR).mkdir()
        _fill(folder, self.path / WORKING_DIR)

    def close(self) -> None:
        """Removes it."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)


def remove_left() -> None:
    """Removes the scratch folders whose processes have ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            is_new = time.time() - path.stat().st_mtime < LEFT_AFTER_S
            if not is_new and (lock := _locked(path)) is not None:
                _remove(path)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Locks a folder. Returns its descriptor, or None if another process has it locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _fill(folder: Path, working_dir: Path) -> None:
    waiting = deque([(folder, working_dir)])
    count = copied_bytes = 0
    while waiting:
        source, target = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(source) as entries:
            for entry in entries:
                count += 1
                place = target / entry.name
                if count < MAX_ENTRIES and _is_open(entry):
                    place.mkdir()
                    waiting.append((Path(entry.path), place))
                elif not (size := _copied(entry, place, MAX_COPIES_BYTES - copied_bytes)):
                    place.symlink_to(entry.path)
                else:
                    copied_bytes += size


def _is_open(entry: os.DirEntry[str]) -> bool:
    """True for a folder into which a class may write."""
    is_hidden = entry.name.startswith(".") or entry.name in LINKED
    return not is_hidden and entry.is_dir(follow_symlinks=False)


def _copied(entry: os.DirEntry[str], place: Path, room_bytes: int) -> int:
    """Copies a file, if it is small. Returns its bytes, or 0."""
    with contextlib.suppress(OSError):
        size = entry.stat().st_size
        if entry.is_file() and size <= min(MAX_COPIED_BYTES, room_bytes):
            shutil.copy(entry.path, place)
            return max(1, size)
    place.unlink(missing_ok=True)
    return 0


def _remove(scratch: Path) -> None:
    """Removes it, also if the class has made folders in it that can't be written."""
    shutil.rmtree(scratch, ignore_errors=True)
    if scratch.exists():
        for place, _, _ in os.walk(scratch):  # from above, so that each can be read
            with contextlib.suppress(OSError):
                Path(place).chmod(0o700)
        shutil.rmtree(scratch, ignore_errors=True)
