"""The directory of keys in a file, such as one that Secret Manager or Kubernetes mounts."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import ConfigurationError, Unavailable
from shared.tenants.key_store import StoredDocument


class KeyFile:
    """A file with the directory.

    It is read whole each time, since mounts of secrets do not keep the time of their last change.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.source = str(path)

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
            Unavailable: it can't be read.
        """
        found = await asyncio.to_thread(self._read)
        return None if found.version == version else found

    def _read(self) -> StoredDocument:
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror or error}") from error
        return StoredDocument(hashlib.sha256(data).hexdigest(), data)
