"""The queues of predictions waiting for a worker, one per tenant and model.

Workers start a tenant's predictions by deadline, so its queue is in that order. A tenant must not
learn how many other tenants are waiting, but their load is reflected in this queue's speed. The
speed is measured between reads, so it is known only while the queue is being read.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script

MIN_LEFT = 1.0
"""Minimum number of predictions that must have left the queue before a wait is estimated."""

_POSITION = load_script("shared/stores/record_position.lua")


class WaitingLines:
    """All tenants' queues."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._redis = redis
        self._commands = redis.small_commands

    async def position(
        self, record: str, tenant: str, model: str, deadline_s: float
    ) -> QueuePosition | None:
        """Returns the position of this record's prediction. None if it is not waiting."""
        keys = (self._redis.record_key(record), *line_keys(self._redis.prefix, tenant, model))
        reply = await self._commands.run_script(_POSITION, keys, time.time(), deadline_s)
        if not reply:
            return None
        position, departures, seconds = int(reply[0]), float(reply[1]), float(reply[2])
        estimated_s = round(position * seconds / departures, 3) if departures >= MIN_LEFT else None
        return QueuePosition(position, estimated_s)


class QueuePosition(NamedTuple):
    """Position in the queue. `position` counts from 1."""

    position: int
    estimated_s: float | None
    """Seconds until a worker takes the prediction, based on the last half minute. None if unknown.
    """


def line_keys(prefix: str, tenant: str, model: str) -> tuple[str, str]:
    """Returns two keys: a tenant's queue for a model, and the speed of that queue."""
    return f"{prefix}waiting:{model}:{tenant}", f"{prefix}waiting-pace:{model}:{tenant}"
