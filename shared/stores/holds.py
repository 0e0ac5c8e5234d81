"""Holds: the parts of limits that unfinished predictions have reserved, until they are settled.

A hold is created with the record of its prediction, by the same script, and outlives the instance
that created it. The process that ends the record makes its hold due (record_budget.lua). Any
instance takes due holds and settles them by what the record says. Settling removes the hold in the
script that counts (api/limits/take.lua), so it happens once.
"""

from __future__ import annotations

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

    async def due(self, most: int) -> list[DueHold]:
        """Takes holds whose records are over, or that should be over by now.

        Others get them LOOK_AGAIN_S later, if they are still there.

        Raises:
            Unavailable: Redis did not answer.
        """
        args = (time.time(), most, LOOK_AGAIN_S)
        found = await self._commands.run_script(_DUE, self._keys, *args)
        return [
            DueHold(key.decode().removeprefix(self._record_prefix), data, _record_of(fields))
            for key, data, fields in found
        ]

    async def are_held(self, record_ids: Sequence[str]) -> list[bool]:
        """Returns whether the records have holds that are not settled.

        Raises:
            Unavailable: Redis did not answer.
        """
        names = [self._record_prefix + one for one in record_ids]
        found = await self._commands.run("ZMSCORE", self._keys[1], *names)
        return [one is not None for one in found]

    async def read(self, record_id: str) -> bytes | None:
        """Returns the hold of a record. None: it has none that is not settled.

        Raises:
            Unavailable: Redis did not answer.
        """
        found = await self._commands.run("HGET", self._keys[0], self._record_prefix + record_id)
        return None if found is None else bytes(found)


def _record_of(fields: Sequence[bytes]) -> Record | None:
    known = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        return record_from_fields(known) if known else None
    except UndecodableMessage:
        log.error("a reply can't be read, so its prediction counts as reserved")
        return None
