"""Stores for the key directory: the interface that files and Redis implement.

Calls raise Unavailable if the store is unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from shared.errors import PenstockError, Unavailable

MAX_AUDIT_EVENTS = 10_000
"""Maximum number of audit events that a store keeps."""


HOW_TO_START = "run `penstock keys init` to create a key directory"


class NoDirectory(Unavailable):
    """The key directory does not exist."""


class KeysReadOnly(PenstockError):
    """Keys can't be changed here."""

    code = "keys_read_only"
    public_by_default = None


class StoredDocument(NamedTuple):
    """The directory as stored."""

    version: str
    """Changes whenever the data does."""
    data: bytes


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One administrative action. Contains no secrets."""

    at_s: float
    """Unix time."""
    actor: str
    """`key <id>`, or `user <name>` for the command line."""
    address: str
    """The caller's network address, or the host name if the command line was used."""
    action: str
    """The action, such as `key.create`."""
    target: str
    """The key ID, tenant, or plan."""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class LoggedEvent(NamedTuple):
    """An audit event with its position in the log."""

    id: str
    act: AuditEvent


class KeyStore(Protocol):
    """A store for the directory. An async context manager that opens without waiting."""

    source: str
    """The store's name in messages."""
    read_only: str
    """The reason the directory can't be changed here. Empty if it can."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def read_at_start(self) -> StoredDocument | None:
        """Returns the directory if it can be read before the store is opened.

        Raises:
            ConfigurationError: the directory is required at startup and does not exist.
        """
        ...

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the directory. Returns None if the directory's version is still `version`.

        Raises:
            NoDirectory: the store does not have a directory.
        """
        ...

    async def replace(self, version: str, data: bytes, act: AuditEvent) -> bool:
        """Atomically replaces the directory and logs the action.

        Args:
            version: the version the directory must currently have. Empty if it must not exist yet.

        Returns:
            True if the directory had that version.

        Raises:
            KeysReadOnly: the directory can't be changed here.
        """
        ...

    async def audit_events(self, limit: int, before: str = "") -> list[LoggedEvent]:
        """Returns the audit events before `before`, newest first.

        If `before` is empty, starts with the newest.
        """
        ...

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Records when keys were last used (Unix seconds), keyed by ID.

        Earlier times have no effect.
        """
        ...

    async def uses(self) -> dict[str, int]:
        """Returns when keys were last used (Unix seconds), keyed by ID. Empty if not recorded."""
        ...
