"""Canary state in Redis, shared by API instances and workers.

Workers count item outcomes and report that they are up. API instances count compared results,
evaluate canaries, and roll them back. Every key includes the canary's revision, so a new revision
starts from zero. Counts are kept per minute, so a canary is judged on the last WINDOW_S seconds.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import Counter as MetricCounter
from prometheus_client import Gauge

from shared.canary.verdict import CanaryCounts
from shared.models.catalog import Revision
from shared.stores.redis_client import KEY_PREFIX, RedisLink, RedisStore, load_script

WINDOW_S = 600
MINUTE_S = 60
ALIVE_S = 5.0
"""How long a canary keeps receiving requests after one of its workers was last seen alive."""
KEEP_S = 30 * 86_400
"""How long a canary stays rolled back, unless resumed."""
JUDGE_EVERY_S = 0.9

ERRORS = MetricCounter(
    "penstock_canary_redis_errors_total",
    "Failed round trips to Redis about canaries, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_canary_redis_up",
    "1 while Redis is being asked about canaries, 0 while the breaker is open.",
)
_COUNT = load_script("shared/canary/count.lua")
_TAKE_BACK = load_script("shared/canary/take_back.lua")


class CanaryState(NamedTuple):
    """A canary's state, which determines whether it receives requests."""

    is_alive: bool
    """True if one of its workers is alive."""
    taken_back: str = ""
    """The reason the canary no longer receives requests. Empty if it was not rolled back."""

    @property
    def is_serving(self) -> bool:
        return self.is_alive and not self.taken_back


class CanaryStore(RedisStore):
    """All canaries' state and counts: an async context manager that opens even without Redis.

    Args:
        retry_s: upper bound of the first pause before a background retry.
    """

    def __init__(self, redis_url: str, *, retry_s: float = 0.25) -> None:
        link = RedisLink(
            "canaries", redis_url, retry_s=retry_s, up=UP, errors=ERRORS, field="records_url"
        )
        super().__init__(link)
        self._commands = link.commands("the canary store")

    def _key(self, canary: Revision, kind: str) -> str:
        return f"{KEY_PREFIX}canary:{canary.public_name}:{canary.revision}:{kind}"

    async def state(self, canary: Revision) -> CanaryState:
        alive, reason = await asyncio.gather(
            self._commands.run("EXISTS", self._key(canary, "alive")),
            self._commands.run("HGET", self._key(canary, "taken-back"), "reason"),
        )
        return CanaryState(bool(alive), reason.decode() if reason else "")

    async def say_alive(self, canary: Revision) -> None:
        """Records that a worker of the canary is alive, for ALIVE_S."""
        await self._commands.run("SET", self._key(canary, "alive"), 1, "PX", int(ALIVE_S * 1000))

    async def take_back(self, canary: Revision, reason: str) -> bool:
        """Rolls a canary back.

        Only the first reason is kept. Returns whether this call was the first.
        """
        key = self._key(canary, "taken-back")
        return bool(await self._commands.run_script(_TAKE_BACK, [key], reason, time.time(), KEEP_S))

    async def resume(self, canary: Revision) -> None:
        """Restores a canary's share and clears its counts."""
        keys = [self._key(canary, "taken-back"), *self._minutes(canary)]
        await self._commands.run("DEL", *keys)

    async def may_judge(self, canary: Revision) -> bool:
        """Returns whether it is this process's turn to evaluate the canary.

        Only one process does this in any given second.
        """
        words = ("NX", "PX", int(JUDGE_EVERY_S * 1000))
        return bool(await self._commands.run("SET", self._key(canary, "judged"), 1, *words))

    async def count(self, canary: Revision, counts: CanaryCounts) -> None:
        """Adds to this minute's counts.

        Raises:
            Unavailable: Redis did not respond, but may have counted them.
        """
        if fields := _fields(counts):
            key = self._key(canary, f"counts:{int(time.time()) // MINUTE_S}")
            pairs = [part for pair in fields.items() for part in pair]
            await self._commands.run_script(_COUNT, [key], WINDOW_S + 2 * MINUTE_S, *pairs)

    async def counts(self, canary: Revision) -> CanaryCounts:
        """Returns the counts for the last WINDOW_S seconds."""
        counts_of_sides = await asyncio.gather(
            *(self._commands.run("HGETALL", key) for key in self._minutes(canary))
        )
        total = CanaryCounts()
        for fields in counts_of_sides:
            _add(total, fields)
        return total

    def _minutes(self, canary: Revision) -> list[str]:
        now = int(time.time()) // MINUTE_S
        # One minute ahead, in case other clocks are ahead of ours.
        ages = range(-1, WINDOW_S // MINUTE_S)
        return [self._key(canary, f"counts:{now - age}") for age in ages]


def _fields(counts: CanaryCounts) -> dict[str, int]:
    fields = {"compared": counts.compared, "outside": counts.outside}
    for side, side_counts in (("stable", counts.stable), ("canary", counts.canary)):
        fields |= {f"{side}:items": side_counts.items, f"{side}:failed": side_counts.failed}
        fields |= {f"{side}:{number}": count for number, count in side_counts.bins.items()}
    return {name: count for name, count in fields.items() if count}


def _add(total: CanaryCounts, fields: Mapping[bytes, bytes]) -> None:
    """Adds a minute's counts. Fields that a newer release adds are skipped."""
    sides = {"stable": total.stable, "canary": total.canary}
    for name, value in fields.items():
        match name.decode().split(":"):
            case ["compared" | "outside" as measure]:
                setattr(total, measure, getattr(total, measure) + int(value))
            case ["stable" | "canary" as side, "items" | "failed" as measure]:
                setattr(sides[side], measure, getattr(sides[side], measure) + int(value))
            case ["stable" | "canary" as side, number] if number.isdecimal():
                sides[side].bins[int(number)] += int(value)
