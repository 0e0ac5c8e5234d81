"""Holds: the parts of limits that unfinished predictions have reserved, until they are settled.

A hold is created with the record of its prediction, by the same script, and outlives the instance
that created it. The process that ends the record makes its hold due (record_budget.lua). Any
instance takes due holds and settles them by what the record says. Settling removes the hold in the
script that counts (api/limits/take.lua), so it happens once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import UndecodableMessage
from shared.stores.record_state import Record, record_from_fields
from shared.stores.redis_client import Commands, load_script

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""The time for which other instances leave a due hold to the one that took it."""
VOID_S = 600
"""For so long a hold that was given up can't be created any more."""
_CREATED = load_script("shared/stores/hold_created.lua")
_DUE = load_script("shared/stores/holds_due.lua")


class DueHold(NamedTuple):
    """A hold to settle."""

    record_id: str
    data: bytes
    """The hold as it was created."""
    record: Record | None
    """Without its document. None: it is gone, or can't be read."""


def hold_keys(prefix: str) -> tuple[str, str]:
    """The keys of all holds, and of the times at which they are due."""
    return f"{prefix}predictions:holds", f"{prefix}predictions:held"


class Holds:
    """All holds in one Redis.

    Args:
        commands: reach Redis.
        prefix: starts every key.
    """

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._keys = hold_keys(prefix)
        self._record_prefix = f"{prefix}record:"
        self._void_prefix = f"{prefix}predictions:void:"

    async def due(self, most: int) -> list[DueHold]:
        """Takes holds whose records are over, or that should be over by now.

        Others get them LOOK_AGAIN_S later, if they are still there.

        Raises:
            Unavailable: Redis did not answer.
        """
        args = (time.time(), most, LOOK_AGAIN_S)
        due = await self._commands.run_script(_DUE, self._keys, *args)
        return [
            DueHold(key.decode().removeprefix(self._record_prefix), data, _record_of(fields))
            for key, data, fields in due
        ]

    async def are_held(self, record_ids: Sequence[str]) -> list[bool]:
        """Returns whether the records have holds that are not settled.

        Raises:
            Unavailable: Redis did not answer.
        """
        names = [self._record_prefix + one for one in record_ids]
        scores = await self._commands.run("ZMSCORE", self._keys[1], *names)
        return [one is not None for one in scores]

    async def was_created(self, record_id: str, data: bytes) -> bool:
        """Returns whether a record was created with this hold, which may be settled by now.

        If it was not, it will not be.

        Raises:
            Unavailable: Redis did not answer.
        """
        digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        keys = (self._record_prefix + record_id, f"{self._void_prefix}{digest}")
        return bool(await self._commands.run_script(_CREATED, keys, digest, VOID_S))


def _record_of(fields: Sequence[bytes]) -> Record | None:
    known = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        return record_from_fields(known) if known else None
    except UndecodableMessage:
        log.error("a reply can't be read, so its prediction counts as reserved")
        return None
