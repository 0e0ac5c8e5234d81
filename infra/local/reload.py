"""Reloads a custom model whose sources have changed, without interrupting anything else.

The class is inspected first. If it can't be served, the reason is reported and the old class keeps
running. Otherwise, penstock.schema.json is written, and the worker stops as usual (it finishes its
jobs or hands them back) and restarts with the new sources. Jobs wait at the broker until then. The
API and batch runner load the new schema on SIGHUP when the new worker starts.
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
"""The class is inspected once none of its files has changed for this long, because an editor may
write several files.
"""
SUFFIXES = frozenset({".py", ".pyi", ".txt", ".yaml"})
LEFT_OUT = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
READERS = ("api", "batches")
"""Processes that read the catalog when they start, and again on SIGHUP."""

Stamp = frozenset[tuple[str, int, int]]


def stamp_of(folder: Path) -> Stamp:
    """Returns the names, times, and sizes of files that may affect a class's behavior."""
    files: set[tuple[str, int, int]] = set()
    for place, folders, names in os.walk(folder.expanduser()):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in LEFT_OUT]
        for path in (Path(place, name) for name in names if Path(name).suffix in SUFFIXES):
            with contextlib.suppress(OSError):  # removed meanwhile
                status = path.stat()
                files.add((str(path), status.st_mtime_ns, status.st_size))
    return frozenset(files)


class Reloader:
    """Checks for changed sources. The owner calls `look` periodically."""

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
            _WatchedClass(
                model_class, workers[model_class.model], processes, supervisor, report, clock
            )
            for model_class in classes
            # The catalog may have gained a model since the stack read it.
            if model_class.model in workers
        ]
        self._clock = clock
        self._next_s = 0.0

    def look(self) -> None:
        """Does any work that is due, without blocking."""
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LOOK_EVERY_S
            for watched_class in self._watched:
                watched_class.look()

    def close(self) -> None:
        for watched_class in self._watched:
            watched_class.close()


class _WatchedClass:
    """A class whose sources are unchanged, have just changed, or are being inspected."""

    def __init__(
        self,
        local_class: LocalClass,
        worker: str,
        processes: Mapping[str, Process],
        supervisor: Supervisor,
        report: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._class = local_class
        self._worker = worker
        self._processes = processes
        self._supervisor = supervisor
        self._report = report
        self._clock = clock
        self._stamp = stamp_of(Path(local_class.folder))
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
        assert self._inspection is not None, "an inspection was expected; this is a bug"
        inspection, self._inspection = self._inspection, None
        try:
            notes = inspection.end()
        except ConfigurationError as error:
            self._report(
                "kept",
                f"{self._class.model} is unchanged because its new sources can't be served: "
                f"{error.message}",
            )
            return
        for note in notes:
            self._report("note", f"{self._class.model}: {note.removeprefix('note: ')}")
        if self._changed_s is None:  # otherwise, the sources have changed again
            self._report("reload", f"{self._class.model}: its sources have changed")
            self._supervisor.restart(self._worker, self._on_started)

    def _on_started(self) -> None:
        for name in READERS:
            # A process that is down is restarted anyway and then reads the catalog.
            with contextlib.suppress(Unavailable, ProcessLookupError):
                self._processes[name].send_signal(signal.SIGHUP)

    def close(self) -> None:
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            with contextlib.suppress(ConfigurationError):  # nobody is waiting for it
                inspection.end()
