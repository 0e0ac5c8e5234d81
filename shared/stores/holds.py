"""Prediction holds: the portions of limits that each prediction reserves until it is settled.

A hold is created together with its record, by the same script, and outlives the instance that
created it. The process that ends the record makes its hold due (record_budget.lua). Any instance
may take due holds and settle them based on the record. The script that counts a hold
(api/limits/take.lua) also removes it, so each hold is settled only once.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import UndecodableMessage
from shared.stores.record_state import Record, record_from_fields
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script

LOOK_AGAIN_S = 1.0
"""How long a due hold is reserved for the instance that took it."""
VOID_S = 600
"""How long an abandoned hold stays marked as void, so that it can't be created."""
_CREATED = load_script("shared/stores/hold_created.lua")
_DUE = load_script("shared/stores/holds_due.lua")

log = logging.getLogger(__name__)


class Holds:
    """All holds in one Redis instance."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._commands = redis.small_commands
        self._keys = hold_keys(redis.prefix)
        self._record_prefix = redis.record_key("")
        self._void_prefix = f"{redis.predictions_key}:void:"

    async def due(self, limit: int) -> list[DueHold]:
        """Takes holds whose records have ended or should have ended by now.

        Other instances can take them LOOK_AGAIN_S later if they still exist.
        """
        args = (time.time(), limit, LOOK_AGAIN_S)
        due = await self._commands.run_script(_DUE, self._keys, *args)
        return [
            DueHold(key.decode().removeprefix(self._record_prefix), data, _record_of(fields))
            for key, data, fields in due
        ]

    async def are_held(self, record_ids: Sequence[str]) -> list[bool]:
        """Returns whether the records have unsettled holds."""
        names = [self._record_prefix + record_id for record_id in record_ids]
        scores = await self._commands.run("ZMSCORE", self._keys[1], *names)
        return [score is not None for score in scores]

    async def was_created(self, record_id: str, data: bytes) -> bool:
        """Returns whether a record was created with this hold, even if it has since been settled.

        If not, the record can no longer be created.
        """
        digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        keys = (self._record_prefix + record_id, f"{self._void_prefix}{digest}")
        return bool(await self._commands.run_script(_CREATED, keys, digest, VOID_S))


class DueHold(NamedTuple):
    """A hold to settle."""

    record_id: str
    data: bytes
    """The hold as created."""
    record: Record | None
    """The record without its document. None if it no longer exists or can't be read."""


def hold_keys(prefix: str) -> tuple[str, str]:
    """Returns the keys for all holds and for their due times."""
    return f"{prefix}predictions:holds", f"{prefix}predictions:held"


def _record_of(fields: Sequence[bytes]) -> Record | None:
    known = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    try:
        return record_from_fields(known) if known else None
    except UndecodableMessage:
        log.error("a reply can't be read, so its prediction counts as reserved")
        return None
