"""The directory of keys in a file, such as one that Secret Manager or Kubernetes mounts.

The API only reads it. The command line changes it: it replaces the file as a whole, and appends the
act to FILE.audit.jsonl before. When keys were last used is not kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from shared.errors import ConfigurationError, Unavailable
from shared.tenants.key_store import (
    HOW_TO_START,
    MOST_ACTS,
    Act,
    KeysReadOnly,
    NoDirectory,
    NotedAct,
    StoredDocument,
)


class KeyFile:
    """A file with the directory.

    It is read whole each time, since mounts of secrets do not keep the time of their last change.

    Args:
        path: the file.
        is_writable: whether it may be changed here.
    """

    def __init__(self, path: Path, *, is_writable: bool = False) -> None:
        self._path = path
        self._audit = path.with_name(f"{path.name}.audit.jsonl")
        self._lock = path.with_name(f"{path.name}.lock")
        self.source = str(path)
        self.read_only = "" if is_writable else f"keys are in the file {path}, which is read only"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def read_at_start(self) -> StoredDocument:
        """Reads the file.

        Raises:
            ConfigurationError: it can't be read.
        """
        try:
            return self._read()
        except Unavailable as error:
            raise ConfigurationError(
                f"PENSTOCK_KEYS_URL: {error.message}", field="keys_url"
            ) from error

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the file. Returns None if it still has this version.

        Raises:
            NoDirectory: there is no file.
            Unavailable: it can't be read.
        """
        found = await asyncio.to_thread(self._read)
        return None if found.version == version else found

    def _read(self) -> StoredDocument:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError as error:
            raise NoDirectory(f"{self._path}: {error.strerror}; {HOW_TO_START}") from error
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror or error}") from error
        return StoredDocument(hashlib.sha256(data).hexdigest(), data)

    async def replace(self, version: str, data: bytes, act: Act) -> bool:
        """Replaces the file if it has this version. Other processes wait meanwhile.

        Raises:
            KeysReadOnly: it can't be changed here.
            Unavailable: it can't be written.
        """
        if self.read_only:
            raise KeysReadOnly(self.read_only)
        return await asyncio.to_thread(self._replace, version, data, act)

    def _replace(self, version: str, data: bytes, act: Act) -> bool:
        with self._locked():
            try:
                if version != self._read().version:
                    return False
            except NoDirectory:
                if version:
                    return False
            # An act that was noted and then failed misleads less than one that is missing.
            with self._audit.open("ab") as audit:
                audit.write(msgspec.json.encode(act) + b"\n")
                _to_disk(audit.fileno())
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as new:
                new.write(data)
                new.flush()
                _to_disk(new.fileno())
            os.replace(new.name, self._path)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror or error}") from error

    async def acts(self, limit: int, before: str = "") -> list[NotedAct]:
        """The acts before this one, newest first.

        Raises:
            Unavailable: they can't be read.
        """
        return await asyncio.to_thread(self._acts, limit, before)

    def _acts(self, limit: int, before: str) -> list[NotedAct]:
        try:
            lines = self._audit.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"{self._audit}: {error.strerror or error}") from error
        end = min(int(before.partition("-")[0]), len(lines)) if before else len(lines)
        found = range(max(0, end - min(limit, MOST_ACTS)), end)
        return [
            NotedAct(str(number), msgspec.json.decode(lines[number], type=Act))
            for number in reversed(found)
        ]

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Does nothing: the file is not the place for it."""

    async def uses(self) -> dict[str, int]:
        """Nothing is kept."""
        return {}


def _to_disk(descriptor: int) -> None:
    os.fsync(descriptor)
