"""Reloads a custom model whose sources have changed, while everything else goes on.

Its class is inspected first. If it can't be served, the reason is said and the old one goes on.
Otherwise its penstock.schema.json is written, its worker stops as ever (what it has begun it ends,
or hands back), and starts again with the new sources. Jobs wait at the broker meanwhile. API and
runner of batches take the new schema by SIGHUP when the new worker starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from infra.local.interfaces import Inspection, LocalClass
from infra.local.process import Process
from infra.local.supervision import Supervisor
from shared.errors import ConfigurationError, Unavailable

LOOK_EVERY_S = 0.5
SETTLED_S = 0.4
"""An editor writes several files. The class is inspected when none has changed for so long."""
SUFFIXES = frozenset({".py", ".pyi", ".txt", ".yaml"})
LEFT_OUT = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
READERS = ("api", "batches")
"""The parts that read the catalog at their start, and again at SIGHUP."""

Stamp = frozenset[tuple[str, int, int]]


def stamp_of(folder: Path) -> Stamp:
    """The names, times and sizes of the files that may decide what a class does."""
    files: set[tuple[str, int, int]] = set()
    for place, folders, names in os.walk(folder.expanduser()):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in LEFT_OUT]
        for path in (Path(place, name) for name in names if Path(name).suffix in SUFFIXES):
            with contextlib.suppress(OSError):  # removed meanwhile
                status = path.stat()
                files.add((str(path), status.st_mtime_ns, status.st_size))
    return frozenset(files)


class Reloader:
    """Looks for changed sources. Its owner calls `look` again and again.

    Args:
        classes: the local classes of the catalog.
        workers: the names of the processes that serve them, by the names of their models.
        processes: of the stack, by their names.
        report: gets a word and facts about each reload.
        clock: returns monotonic seconds. Tests replace it.
    """

    def __init__(
        self,
        classes: Iterable[LocalClass],
        workers: Mapping[str, str],
        processes: Mapping[str, Process],
        supervisor: Supervisor,
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = [
            _WatchedClass(one, workers[one.model], processes, supervisor, report, clock)
            for one in classes
        ]
        self._clock = clock
        self._next_s = 0.0

    def look(self) -> None:
        """Does what is due. Returns at once."""
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LOOK_EVERY_S
            for one in self._watched:
                one.look()

    def close(self) -> None:
        for one in self._watched:
            one.close()


class _WatchedClass:
    """One class: its sources are as they were, or changed just now, or are being inspected."""

    def __init__(
        self,
        one: LocalClass,
        worker: str,
        processes: Mapping[str, Process],
        supervisor: Supervisor,
        report: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._class = one
        self._worker = worker
        self._processes = processes
        self._supervisor = supervisor
        self._report = report
        self._clock = clock
        self._stamp = stamp_of(Path(one.folder))
        self._changed_s: float | None = None
        self._inspection: Inspection | None = None

    def look(self) -> None:
        now_s, stamp = self._clock(), stamp_of(Path(self._class.folder))
        if stamp != self._stamp:
            self._stamp, self._changed_s = stamp, now_s
        if self._inspection is not None:
            if self._inspection.has_ended:
                self._on_inspected()
        elif self._changed_s is not None and now_s - self._changed_s >= SETTLED_S:
            self._changed_s = None
            self._inspection = Inspection(self._class.folder)

    def _on_inspected(self) -> None:
        assert self._inspection is not None, "it was looked at just now; this is a bug"
        inspection, self._inspection = self._inspection, None
        try:
            notes = inspection.end()
        except ConfigurationError as error:
            self._report(
                "kept",
                f"{self._class.model} as it was; its new sources can't be served: {error.message}",
            )
            return
        for note in notes:
            self._report("note", f"{self._class.model}: {note.removeprefix('note: ')}")
        if self._changed_s is None:  # else they have changed again
            self._report("reload", f"{self._class.model}: its sources have changed")
            self._supervisor.restart(self._worker, self._on_started)

    def _on_started(self) -> None:
        for name in READERS:
            # One that does not run is started again, and then reads the catalog.
            with contextlib.suppress(Unavailable, ProcessLookupError):
                self._processes[name].send_signal(signal.SIGHUP)

    def close(self) -> None:
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            with contextlib.suppress(ConfigurationError):  # nobody waits for it
                inspection.end()
