"""A runner's scratch folder: its home, its temporary files, and its view of the class's folder.

The view contains the folder's files: small files as copies, and large files as copies that share
their blocks (ioctl_ficlone(2)) or, if the file system doesn't support that, as links. The class is
loaded from there, so it can read and write next to its own file and use relative paths. As in one
of Cog's containers, its files are private, including an `output.png` left by an earlier run. If the
system permits it, the runner mounts the folder below the view (confinement.py), and no links are
needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path

PREFIX = "penstock-scratch-"
WORKING_DIR = "src"
LEFT_AFTER_S = 60.0
"""Minimum age for removing a leftover folder. A newer folder may be about to be locked."""
MAX_COPIED_BYTES = 8 * 1024 * 1024
"""Larger files are linked, so they can't be written to."""
MAX_COPIES_BYTES = 64 * 1024 * 1024
"""Maximum total size of the copies."""
MAX_ENTRIES = 10_000
"""Beyond this size, whole folders are linked, and the class can't write to them.
"""
MAX_LINKED_ENTRIES = 1000
"""Maximum number of entries, across all levels, in a linked folder for it to be copied instead. A
larger folder stays a link.
"""
LINKED = frozenset(
    {"__pycache__", "node_modules", "venv", "site-packages", ".git", ".hg", ".svn", ".tox", ".venv"}
)
"""Folders that are always linked as a whole."""
_FICLONE = 0x40049409


class Scratch:
    """A scratch folder with the files from a class's folder, until it is closed.

    It is locked while this process is alive. If a process is killed, its scratch folder is removed
    by the next process that creates one on this machine.
    """

    def __init__(self, folder: Path) -> None:
        remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _lock_folder(self.path)
        (self.path / WORKING_DIR).mkdir()
        _fill(folder, self.path / WORKING_DIR)

    def find_linked_files(self) -> list[str]:
        """Returns the paths of files and folders that are only links in the view.

        Excludes folders in LINKED, because nothing writes there.
        """
        view = self.path / WORKING_DIR
        links = []
        for place, folders, names in os.walk(view):
            for name in (*names, *(name for name in folders if name not in LINKED)):
                if Path(place, name).is_symlink():
                    links.append(str(Path(place, name).relative_to(view)))
        return sorted(links)

    def close(self) -> None:
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)


def remove_left() -> None:
    """Removes scratch folders whose processes died without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            is_new = time.time() - path.stat().st_mtime < LEFT_AFTER_S
            if not is_new and (lock := _lock_folder(path)) is not None:
                _remove(path)
                os.close(lock)


def _lock_folder(path: Path) -> int | None:
    """Locks a folder. Returns the folder's descriptor, or None if another process has it locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _fill(folder: Path, working_dir: Path) -> None:
    real = folder.resolve()
    # The last are the folders that contain this one; links to them are not copied.
    waiting = deque([(folder, working_dir, {real, *real.parents, *working_dir.resolve().parents})])
    count = copied_bytes = 0
    while waiting:
        source, target, above = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(source) as entries:
            # Small files go first, because they include the sources and the total size of the
            # copies is limited.
            for entry in sorted(entries, key=_size_of):
                count += 1
                place = target / entry.name
                if count < MAX_ENTRIES and _is_open(entry, above):
                    place.mkdir()
                    below = {*above, Path(entry.path).resolve()} if entry.is_symlink() else above
                    waiting.append((Path(entry.path), place, below))
                elif not (size := _copy_file(entry, place, MAX_COPIES_BYTES - copied_bytes)):
                    place.symlink_to(entry.path)
                else:
                    copied_bytes += size


def _size_of(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(OSError):
        return entry.stat().st_size
    return 0


def _is_open(entry: os.DirEntry[str], above: set[Path]) -> bool:
    """True for a folder that a class may write into. `above`: folders to exclude."""
    if entry.name in LINKED or entry.is_dir(follow_symlinks=False):
        return entry.name not in LINKED
    with contextlib.suppress(OSError):  # a link to itself
        real = Path(os.path.realpath(entry.path))
        return entry.is_dir() and real not in above and _is_small(real)
    return False


def _is_small(folder: Path) -> bool:
    """Returns whether a folder has few entries, including those in its subfolders."""
    waiting, count = [folder], 0
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                if count > MAX_LINKED_ENTRIES:
                    return False
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
    return True


def _copy_file(entry: os.DirEntry[str], place: Path, room_bytes: int) -> int:
    """Copies a file if it is small or can share its blocks.

    Returns the number of bytes the copy takes up, or 0 if there is no copy.
    """
    with contextlib.suppress(OSError):
        size = entry.stat().st_size
        if entry.is_file() and size <= min(MAX_COPIED_BYTES, room_bytes):
            shutil.copy2(entry.path, place)  # with its timestamp, which validates compiled modules
            return max(1, size)
        if entry.is_file():
            _clone(entry.path, place)
            return 1
    place.unlink(missing_ok=True)
    return 0


def _clone(source: str, place: Path) -> None:
    """Creates a copy that shares blocks with the original until either one is written to.

    Raises:
        OSError: the file system doesn't support such copies, or the files are on different file
            systems.
    """
    with open(source, "rb") as original, place.open("xb") as copy:
        fcntl.ioctl(copy, _FICLONE, original.fileno())


def _remove(scratch: Path) -> None:
    """Removes a scratch folder, even if the class has created unwritable folders in it."""
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.exists():
            for place, _, _ in os.walk(scratch):  # top down, so that each folder can be read
                with contextlib.suppress(OSError):
                    Path(place).chmod(0o700)
            shutil.rmtree(scratch, ignore_errors=True)
    except RecursionError:  # folders nested a thousand levels deep
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(scratch)], stderr=subprocess.DEVNULL, check=False)
