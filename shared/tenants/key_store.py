"""Stores of the directory of keys: the interface that a file and Redis have in common.

Calls raise Unavailable if the store is unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from shared.errors import PenstockError, Unavailable

MAX_AUDIT_EVENTS = 10_000
"""Acts of administration that a store keeps."""


HOW_TO_START = "`penstock keys init` creates a directory of keys"


class NoDirectory(Unavailable):
    """There is no directory of keys."""


class KeysReadOnly(PenstockError):
    """Keys can't be changed here."""

    code = "keys_read_only"
    public_by_default = None


class StoredDocument(NamedTuple):
    """The directory as a store has it."""

    version: str
    """Changes with the data."""
    data: bytes


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One act of administration. It has no secrets."""

    at_s: float
    """Unix time."""
    actor: str
    """`key <id>`, or `user <name>` of the command line."""
    address: str
    """The network address of the caller, or the name of the machine of the command line."""
    action: str
    """The action, such as `key.create`."""
    target: str
    """The key id, tenant or plan."""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class LoggedEvent(NamedTuple):
    """An act with its place in the log."""

    id: str
    act: AuditEvent


class KeyStore(Protocol):
    """One store of the directory. An async context manager that opens without waiting."""

    source: str
    """Its name in messages."""
    read_only: str
    """Why it can't be changed here. Empty if it can."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def read_at_start(self) -> StoredDocument | None:
        """The directory, if it can be read before the store is opened.

        Raises:
            ConfigurationError: it is needed at the start and is not there.
        """
        ...

    async def read(self, version: str = "") -> StoredDocument | None:
        """Reads the directory. Returns None if it still has this version.

        Raises:
            NoDirectory: the store has none.
        """
        ...

    async def replace(self, version: str, data: bytes, act: AuditEvent) -> bool:
        """Replaces the directory and notes the act, both or neither.

        Args:
            version: the one that it must still have. Empty: there must be none yet.

        Returns:
            Whether it had that version.

        Raises:
            KeysReadOnly: it can't be changed here.
        """
        ...

    async def audit_events(self, limit: int, before: str = "") -> list[LoggedEvent]:
        """The audit events before this one, newest first. Empty `before`: from the newest."""
        ...

    async def note_uses(self, used_s: Mapping[str, int]) -> None:
        """Notes when keys were last used, by id in Unix seconds. Earlier times change nothing."""
        ...

    async def uses(self) -> dict[str, int]:
        """When keys were last used, by id in Unix seconds. Empty if it is not kept."""
        ...
