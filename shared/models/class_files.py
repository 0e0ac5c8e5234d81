"""Files that Penstock writes into a custom class's folder, next to the author's files."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError

MAX_BYTES = 1024 * 1024
"""A file larger than this was not written by Penstock."""


@dataclass(frozen=True)
class ClassFile:
    """A JSON file written by Penstock, at most one per class.

    `name`: file name. `old_name`: name used through release 0.1.0, which an author may be using for
    something else. `marks`: fields that all of our files contain.
    """

    name: str
    old_name: str
    marks: frozenset[str]

    def find(self, folder: Path) -> Path:
        """Returns the path of the file in a folder, whether or not it exists.

        Returns the old path if only that file exists and was written by Penstock.
        """
        path, old = folder / self.name, folder / self.old_name
        return old if not path.exists() and self._is_ours(old) else path

    def write(self, folder: Path, text: str) -> Path:
        """Writes the file atomically, and returns its path.

        Raises:
            ConfigurationError: the file can't be written, or a file that Penstock did not write is
                in the way.
        """
        path = folder / self.name
        if path.exists() and not self._is_ours(path):
            raise ConfigurationError(
                f"{path} was not written by Penstock; rename or remove it", field="source"
            )
        try:
            handle, partial = tempfile.mkstemp(dir=folder, prefix=f".{self.name}")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                Path(partial).chmod(0o644)
                Path(partial).replace(path)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}", field="source") from error
        return path

    def _is_ours(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                document = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(document, dict) and self.marks <= document.keys()
