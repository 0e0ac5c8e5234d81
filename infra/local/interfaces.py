"""Writes the schema.json of models of one's own whose sources have changed, before a stack starts.

The class runs in a process of its own, as for `penstock models check`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shared.catalog import LOCAL
from shared.errors import ConfigurationError
from shared.tasks import TASKS

CHECK = (sys.executable, "-m", "workers.models.custom", "check", "--if-changed")


def refresh_interfaces(models_file: Path) -> None:
    """Inspects the local models of one's own of a catalog, as far as they have changed.

    Raises:
        ConfigurationError: one of them can't be served. The message says why.
    """
    for folder in _folders(models_file):
        done = subprocess.run([*CHECK, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().removeprefix("penstock: ")
            raise ConfigurationError(reason or f"{folder} could not be inspected", field="source")


def _folders(models_file: Path) -> Iterator[str]:
    """Yields the folders of the classes. None, if the catalog can't be read: its reader says so."""
    try:
        document: Any = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return
    entries = document.get("models") if isinstance(document, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and "interface" not in entry:
            name, source = entry.get("task"), entry.get("source")
            task = TASKS.get(name) if isinstance(name, str) else None
            if task and task.has_interface and isinstance(source, str) and source.startswith(LOCAL):
                yield source.removeprefix(LOCAL)
