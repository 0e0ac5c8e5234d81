"""Where the directory of keys is kept: what a file and Redis have in common."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol, Self


class StoredDocument(NamedTuple):
    """The directory as a store has it."""

    version: str
    """Changes with the data."""
    data: bytes


class KeyStore(Protocol):
    """One store of the directory. An async context manager that opens without waiting."""

    source: str
    """What it is called in messages."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def read_at_start(self) -> StoredDocument | None:
        """The directory, if it can be read before the store is opened.

        Raises:
            ConfigurationError: it is needed at the start and is not there.
        """
        ...

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the directory. Returns None if it still has this version.

        Raises:
            Unavailable: the store is out of reach, or has no directory.
        """
        ...
