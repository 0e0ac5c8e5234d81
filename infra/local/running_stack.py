"""Lets commands find the stack that `penstock up` runs in the same folder.

`up` holds a lock on `stack.lock` in its state folder, which the OS releases no matter how `up`
exits. While the file is locked, `stack.json` in the same folder contains the stack's settings and
process IDs.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import ConfigurationError

LOCK, FILE = "stack.lock", "stack.json"
PLACES = frozenset(
    {
        *("PENSTOCK_PROJECT", "PENSTOCK_BROKER", "PENSTOCK_PUBSUB_ENDPOINT"),
        *("PENSTOCK_BIGQUERY_ENDPOINT", "PENSTOCK_REDIS_URL", "PENSTOCK_RECORDS_URL"),
        *("PENSTOCK_OBJECTS_URL", "PENSTOCK_ROWS_URL", "PUBSUB_EMULATOR_HOST"),
    }
)
"""Variables that identify a deployment. A user who sets any of them is referring to a different
stack.
"""


@dataclass(frozen=True)
class RunningStack:
    """The contents of stack.json: the stack's `PENSTOCK_*` variables and its process IDs."""

    settings: dict[str, str]
    processes: dict[str, int]
    needs_keys: bool
    """True if requests need a key from the key directory in the stack's settings."""


class Announcement:
    """The file that describes a running stack. It is rewritten whenever a process is restarted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: RunningStack | None = None

    def update(self, now: RunningStack) -> None:
        """Writes the file if anything has changed. Only the file's owner can read it."""
        if now == self._written:
            return
        part = self._path.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(now), file, indent=1)
        part.rename(self._path)
        self._written = now


@contextmanager
def hold_state_folder(state_dir: Path) -> Iterator[Announcement]:
    """Holds the lock on a state folder.

    Raises:
        ConfigurationError: another `penstock up` holds it.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / FILE
    with (state_dir / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another penstock up is already running in {state_dir}; stop it or run this "
                "command in a different folder"
            ) from None
        path.unlink(missing_ok=True)
        try:
            yield Announcement(path)
        finally:
            path.unlink(missing_ok=True)


def find_running_stack(state_dir: Path) -> RunningStack | None:
    """Returns the stack that this user's `penstock up` runs from a state folder, or None."""
    try:
        with (state_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        with (state_dir / FILE).open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None  # another user could put other servers' addresses in it
            return RunningStack(**json.load(file))
    except (OSError, ValueError):
        return None
