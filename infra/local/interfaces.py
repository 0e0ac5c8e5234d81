"""Inspects custom models whose sources have changed, and writes their penstock.schema.json.

The class runs in a separate process, as in `penstock models check`, which also installs its
packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shared.errors import ConfigurationError
from shared.models.catalog_file import LOCAL
from shared.models.interface import INTERFACE_FILE
from shared.models.tasks import TASKS

REFRESH = (sys.executable, "-m", "workers.models.custom", "refresh")
POLL_S = 0.05
QUIET_S = 5.0
"""Seconds until the user is notified that an inspection is still running."""


class LocalClass(NamedTuple):
    """A custom model whose class is on this machine: model name and folder."""

    model: str
    folder: str


class Inspection:
    """A running `penstock models check` of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        handle, name = tempfile.mkstemp(prefix="penstock-inspection-")
        self._said = Path(name)
        self._process = subprocess.Popen(
            [*REFRESH, folder], stdin=subprocess.DEVNULL, stdout=handle, stderr=handle
        )
        os.close(handle)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> list[str]:
        """Stops the inspection if it is running and returns lines to show to the user.

        Raises:
            ConfigurationError: the class can't be served. The message contains the reason.
        """
        self.kill()
        lines = self._said.read_text(errors="replace").splitlines()
        self._said.unlink()
        if self._process.returncode:
            reason = "\n".join(lines).strip().removeprefix("penstock: ")
            raise ConfigurationError(
                reason or f"{self._folder} could not be inspected", field="source"
            )
        return [line for line in lines if line.startswith("note: ")]


def refresh_interfaces(models_file: Path, say: Callable[[str], None]) -> None:
    """Inspects the catalog's local custom models whose sources have changed.

    Raises:
        ConfigurationError: a class can't be served and has no penstock.schema.json from an earlier
        inspection, so the catalog can't be read.
    """
    for local_class in local_classes(models_file):
        inspection = Inspection(local_class.folder)
        say_at_s = time.monotonic() + QUIET_S
        try:
            while not inspection.has_ended:
                time.sleep(POLL_S)
                if time.monotonic() > say_at_s:
                    say_at_s = float("inf")
                    say(f"{local_class.model}: inspecting its class and installing its packages")
        except BaseException:
            inspection.kill()
            raise
        try:
            notes = inspection.end()
        except ConfigurationError as error:
            if not INTERFACE_FILE.find(Path(local_class.folder).expanduser()).is_file():
                raise
            notes = [error.message]
        for line in notes:
            say(f"{local_class.model}: {line}")


def local_classes(models_file: Path) -> Iterator[LocalClass]:
    """Yields the local classes.

    Yields nothing if the catalog can't be read, because the catalog's reader reports that.
    """
    try:
        document: Any = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError):
        return
    entries = document.get("models") if isinstance(document, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and "interface" not in entry:
            name, source = entry.get("task"), entry.get("source")
            task = TASKS.get(name) if isinstance(name, str) else None
            if task and task.has_interface and isinstance(source, str) and source.startswith(LOCAL):
                yield LocalClass(str(entry.get("name")), source.removeprefix(LOCAL))
