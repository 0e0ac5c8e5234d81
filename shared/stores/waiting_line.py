"""The position of a prediction in the queue of its tenant and model.

Workers start a tenant's predictions by deadline, so the line is in that order. How many other
tenants have waiting is not for this tenant to know, but it shows in the pace at which the line
moves. That is measured from one look to the next. So it is known only while somebody looks.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from shared.stores.redis_client import Commands, load_script

MIN_LEFT = 1.0
"""The minimum number of predictions that left the line for an estimate."""

_POSITION = load_script("shared/stores/record_position.lua")


class QueuePosition(NamedTuple):
    """Position in the queue: `position` counts from 1."""

    position: int
    estimated_s: float | None
    """Seconds until a worker takes it, at the pace of the last half minute. None: not known."""


class WaitingLines:
    """The lines of all tenants.

    Args:
        commands: reach Redis.
        prefix: starts every key.
    """

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    def key_of(self, tenant: str, model: str) -> str:
        """The line of this tenant's predictions for this model."""
        return f"{self._prefix}waiting:{model}:{tenant}"

    def pace_key_of(self, tenant: str, model: str) -> str:
        """Returns the key that holds the pace of that line."""
        return f"{self._prefix}waiting-pace:{model}:{tenant}"

    async def position(
        self, record: str, tenant: str, model: str, deadline_s: float
    ) -> QueuePosition | None:
        """Returns the position of the prediction with this record. None if it does not wait.

        Raises:
            Unavailable: Redis did not answer.
        """
        keys = (
            f"{self._prefix}record:{record}",
            self.key_of(tenant, model),
            self.pace_key_of(tenant, model),
        )
        reply = await self._commands.run_script(_POSITION, keys, time.time(), deadline_s)
        if not reply:
            return None
        position, left, seconds = int(reply[0]), float(reply[1]), float(reply[2])
        estimated_s = round(position * seconds / left, 3) if left >= MIN_LEFT else None
        return QueuePosition(position, estimated_s)
