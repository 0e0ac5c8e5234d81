"""A clock that a test moves: for this process, and for Redis if it counts limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from api.http.auth import ApiKeys
from api.inputs.storage import Storage
from api.limits.accounts import LimitStore
from api.limits.budget_marks import BudgetMarks
from shared.stores.cache import ResultCache
from shared.stores.objects import UrlSigner

SCRIPT = "tests/api/moved_clock.lua"
CLOCKED = (ApiKeys, BudgetMarks, ResultCache, Storage, UrlSigner)
"""Classes that take `time.time` as a default argument, so a patch doesn't reach them."""


class MovedClock:
    """Moves `time.time`, and one Redis instance's time for limits, until `patch` is undone."""

    def __init__(self, redis_url: str, patch: pytest.MonkeyPatch) -> None:
        self._client = redis.Redis.from_url(redis_url)
        self._usual = time.time
        self._ahead_s = 0.0
        moved: Callable[[], float] = lambda: self._usual() + self._ahead_s  # noqa: E731
        for one in CLOCKED:
            _default_clock(patch, one.__init__, self._usual, moved)
        patch.setattr(time, "time", moved)
        patch.setitem(LimitStore.__init__.__kwdefaults__ or {}, "clock", SCRIPT)

    def move(self, ahead_s: float) -> None:
        """Sets how far ahead the clock is."""
        self._ahead_s = ahead_s
        self._client.set("test:ahead_ms", round(ahead_s * 1000))

    def move_on(self, seconds: float) -> None:
        """Moves the clock by an offset from its current time."""
        self.move(self._ahead_s + seconds)

    def move_to_turn(self, left_s: float) -> None:
        """Moves the clock to the given time before the end of the current month (UTC).

        Negative values mean after the end.
        """
        now = datetime.fromtimestamp(self._usual(), UTC)
        turn = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        self.move(turn.timestamp() - left_s - self._usual())

    def close(self) -> None:
        self._client.close()


def _default_clock(patch: pytest.MonkeyPatch, function: Any, usual: object, moved: object) -> None:
    """Makes `function` use `moved` by default instead of `usual`."""
    by_place, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    assert usual in (*by_place, *by_name.values()), f"{function.__qualname__} has no clock"
    patch.setattr(
        function, "__defaults__", tuple(moved if one is usual else one for one in by_place)
    )
    for name in [name for name, one in by_name.items() if one is usual]:
        patch.setitem(by_name, name, moved)
