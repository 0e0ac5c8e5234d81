"""Counts the usage of all instances in Redis. One script takes from several limits.

The script defines how windows, months and slots are counted (take.lua). Redis's clock decides, so
the clocks of instances need not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from prometheus_client import Counter, Gauge

from shared.errors import PenstockError
from shared.stores.records import hold_keys
from shared.stores.redis_client import RedisLink, RedisStore, Script, load_script

ERRORS = Counter(
    "penstock_limits_errors_total",
    "Round trips to Redis about limits that failed, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_limits_redis_up",
    "1 while Redis is being asked about limits, 0 while the breaker is open.",
)
Kind: TypeAlias = Literal["window", "month", "slots"]
SLOTS_S = 30
"""Slots and registrations of an instance that died are free after this time."""
MAX_TOTALS = 16_384
"""Maximum number of budgets whose usage an instance knows, in addition to those that it serves."""
TOTALS_KEPT_MS = 62 * 24 * 3600 * 1000
CLOCK = "api/limits/now.lua"


class Ask(msgspec.Struct, frozen=True):
    """A request by an instance to one limit."""

    key: str
    kind: Kind
    limit: float
    need: float
    """The need of the request. 0: only to give back. For slots: the total number to hold."""
    extra: float = 0.0
    """An additional amount, if the limit is far from full."""
    returns: list[tuple[float, float]] = []
    """Periods, and the unused amounts taken in them. Negative: used in addition."""
    held: float = -1.0
    """For a budget: the part of the used amount that this instance may give back, `need` included.
    Negative: as reported before."""
    month: float = 0
    """For a budget: the month in which the request arrived. 0: the current one."""


class Answer(msgspec.Struct, frozen=True):
    """The result of one ask. If one of several does not fit, none is granted."""

    granted: float
    used: float
    """By all instances, in the current window or month."""
    period: float
    fits: bool
    retry_ms: float
    """Until there is room for `need`. 0 of a month: as soon as enough of `held` comes back."""
    reset_ms: float
    """Until nothing is used any more."""
    held: float = 0.0
    """For a month: the part of `used` that all instances may give back. The rest is spent."""


class Standing(NamedTuple):
    """The place of an instance among those that count."""

    rank: int
    instances: int


class Totals(NamedTuple):
    """Amounts used of budgets."""

    by_key: dict[str, dict[float, float]]
    """US dollars by month, of the newest month and of the one before."""
    at_ms: int
    """By Redis's clock."""
    is_whole: bool
    """True if these are all the changes."""


_answers = msgspec.json.Decoder(list[Answer])


def scripts(clock: str = CLOCK) -> tuple[Script, Script, Script]:
    """Returns the scripts that take, register and read totals, with a file for the time."""
    return (
        load_script(clock, "api/limits/take.lua"),
        load_script(clock, "api/limits/register.lua"),
        load_script(clock, "api/limits/totals.lua"),
    )


class LimitStore(RedisStore):
    """The counts in one Redis. An async context manager that opens quickly, with or without Redis.

    Args:
        redis_url: `redis://`, `rediss://` or `unix://` URL, the same for all instances.
        instance: the id of this instance.
        prefix: the prefix of every key, for several deployments on one Redis.
        timeout_s: the time limit of one round trip.
        retry_s: the first pause before Redis is tried again after a failure.
        clock: the file with Redis's time. Tests replace it.
    """

    def __init__(
        self,
        redis_url: str,
        instance: str,
        *,
        prefix: str = "penstock:",
        timeout_s: float = 0.1,
        retry_s: float = 0.25,
        clock: str = CLOCK,
    ) -> None:
        super().__init__(
            RedisLink(
                "limits",
                redis_url,
                timeout_s=timeout_s,
                retry_s=retry_s,
                up=UP,
                errors=ERRORS,
                field="records_url",
            )
        )
        self._commands = self._link.commands("the store of limits")
        self._take, self._register, self._totals = scripts(clock)
        self._instance = instance
        self._prefix = f"{prefix}limits:"
        self._hold_keys = hold_keys(prefix)
        self._budgets_key = f"{self._prefix}budgets"
        self._record_prefix = f"{prefix}record:"

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        """Takes what all asks need, or nothing if one of them does not fit.

        Raises:
            Unavailable: Redis did not answer. It may still have counted the asks.
        """
        return await self._run(asks, "")

    async def settle(self, record_id: str, asks: Sequence[Ask]) -> list[Answer]:
        """Gives back what the hold of a prediction did not use, and removes the hold.

        Nothing comes back if it was settled before.

        Args:
            record_id: of the prediction.
            asks: that need nothing, with what comes back.

        Raises:
            Unavailable: Redis did not answer. It may still have settled it.
        """
        return await self._run(asks, f"{self._record_prefix}{record_id}")

    async def _run(self, asks: Sequence[Ask], settled: str) -> list[Answer]:
        keys = [f"{self._prefix}{ask.kind}:{ask.key}" for ask in asks]
        args = (self._instance, SLOTS_S * 1000, msgspec.json.encode(asks), settled)
        keys += [self._budgets_key, *self._hold_keys]
        found = await self._commands.run_script(self._take, keys, *args)
        answers = _answers.decode(found)
        if len(answers) != len(asks):
            raise PenstockError(f"{len(answers)} answers to {len(asks)} asks; this is a bug")
        return answers

    async def register(self) -> Standing:
        """Says that this instance counts, for SLOTS_S, and returns its place among all.

        Raises:
            Unavailable: Redis did not answer.
        """
        key = f"{self._prefix}instances"
        rank, instances = await self._commands.run_script(
            self._register, [key], self._instance, SLOTS_S * 1000
        )
        return Standing(int(rank), int(instances))

    async def totals(self, since_ms: float) -> Totals:
        """Returns what was used of the budgets that changed since a time of Redis's clock.

        Raises:
            Unavailable: Redis did not answer.
        """
        args = (since_ms, MAX_TOTALS, f"{self._prefix}month:", TOTALS_KEPT_MS)
        now_ms, changed, found = await self._commands.run_script(
            self._totals, [self._budgets_key], *args
        )
        totals = {}
        for key, month, used, before in found:
            newest = float(month)
            totals[key.decode()] = {newest: float(used), newest - 1: float(before)}
        return Totals(totals, int(now_ms), is_whole=int(changed) <= MAX_TOTALS)

    async def leave(self) -> None:
        """Says that this instance counts no more.

        Raises:
            Unavailable: Redis did not answer. It counts for SLOTS_S.
        """
        await self._commands.run("ZREM", f"{self._prefix}instances", self._instance)

    async def claim_warning(self, key: str, period: float, share: float) -> bool:
        """Returns whether this caller is the first to warn about this share of a month's budget.

        Raises:
            Unavailable: Redis did not answer. It may still have recorded the warning.
        """
        field = _warned(period, share)
        return bool(await self._commands.run("HSETNX", f"{self._prefix}month:{key}", field, "1"))

    async def unclaim_warning(self, key: str, period: float, share: float) -> None:
        """Forgets a claim: the warning was not sent.

        Raises:
            Unavailable: Redis did not answer. The warning is never sent.
        """
        await self._commands.run("HDEL", f"{self._prefix}month:{key}", _warned(period, share))


def _warned(period: float, share: float) -> str:
    return f"warned:{period:.0f}:{share}"
