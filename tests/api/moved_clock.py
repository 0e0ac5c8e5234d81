"""A clock that a test moves: of this process, and of Redis if it counts limits."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import redis

from api.limits.store import LimitStore

SCRIPT = "tests/api/moved_clock.lua"


class MovedClock:
    """Moves `time.time`, and the time of the limits in one Redis, until `patch` is undone."""

    def __init__(self, redis_url: str, patch: pytest.MonkeyPatch) -> None:
        self._client = redis.Redis.from_url(redis_url)
        self._usual = time.time
        self._ahead_s = 0.0
        patch.setattr(time, "time", lambda: self._usual() + self._ahead_s)
        patch.setitem(LimitStore.__init__.__kwdefaults__ or {}, "clock", SCRIPT)

    def move(self, ahead_s: float) -> None:
        """Sets by how much it is ahead."""
        self._ahead_s = ahead_s
        self._client.set("test:ahead_ms", round(ahead_s * 1000))

    def move_to_turn(self, left_s: float) -> None:
        """Moves it to so long before the end of this month (UTC). Negative: after that."""
        now = datetime.fromtimestamp(self._usual(), UTC)
        turn = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        self.move(turn.timestamp() - left_s - self._usual())

    def close(self) -> None:
        """Closes its connection."""
        self._client.close()
