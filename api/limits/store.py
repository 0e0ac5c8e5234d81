"""Counts the usage of all instances in Redis. One script takes from several limits.

The script defines how windows, months and slots are counted (take.lua). Redis's clock decides, so
the clocks of instances need not agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias
from uuid import uuid4

import msgspec
from prometheus_client import Counter, Gauge

from shared.errors import PenstockError, Unavailable
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
CALLS_S = 24 * 3600
"""For so long after the last one Redis knows which calls of an instance it has counted, and which
operations of a group."""
ENDED_GROUP_S = 3600
"""For so long it knows those of a group that is over: somebody else may still be at them."""
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
    operation: str = ""
    """GROUP/NAME of what a next process would begin anew. All that it had reserved comes back."""
    used: float = 0.0
    """By the operation, however often it was begun."""
    owner: str = ""
    """The process that took what `returns` says without Redis. Empty: this one."""


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


class AnswerLost(Unavailable):
    """Redis may have counted a call. `LimitStore.resolve` finds out, by the call's number."""

    def __init__(self, call: int, error: Unavailable) -> None:
        super().__init__(error.message, public=error.public_message)
        self.call = call


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
        # Two processes may have the same id, one after the other. Their calls are not the same.
        self.process = uuid4().hex
        """Tells this process from others of the same instance."""
        self._calls_key = f"{self._prefix}calls:{instance}:{self.process}"
        self._calls = itertools.count(1)
        self._unanswered: dict[int, None] = {}
        """The numbers of calls, the lowest first."""

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        """Takes what all asks need, or nothing if one of them does not fit.

        Raises:
            AnswerLost: Redis did not answer. It may still have counted the asks. It also stands for
              the end of an operation of which Redis was not told.
            Unavailable: it was not asked, as it has not answered for a while.
        """
        call, was_up = next(self._calls), self.is_up
        self._unanswered[call] = None
        try:
            answers = await self._run(asks, "", call)
        except Unavailable as error:
            if was_up or any(ask.operation for ask in asks):
                raise AnswerLost(call, error) from error
            self.forget(call)
            raise
        self.forget(call)
        return answers

    async def resolve(self, call: int, asks: Sequence[Ask]) -> list[Answer]:
        """Returns what a call has granted whose answer was lost.

        If it was not counted, it counts now what came back with it and takes nothing. If a copy of
        it arrives later, that counts nothing.

        Args:
            call: its number.
            asks: those of its asks that are not about slots.

        Raises:
            Unavailable: Redis did not answer. Ask again.
        """
        late = [msgspec.structs.replace(ask, need=0, extra=0, held=-1) for ask in asks]
        answers = await self._run(late, "", call)
        self.forget(call)
        return answers

    def forget(self, call: int) -> None:
        """Gives up a call. If it was not counted yet, it never will be."""
        self._unanswered.pop(call, None)

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

    async def _run(self, asks: Sequence[Ask], settled: str, call: int = 0) -> list[Answer]:
        keys = [f"{self._prefix}{ask.kind}:{ask.key}" for ask in asks]
        group = asks[0].operation.partition("/")[0] if asks else ""
        keys += [self._budgets_key, *self._hold_keys, self._calls_key, self._group_key(group)]
        lowest = next(iter(self._unanswered), 0)
        encoded = msgspec.json.encode(asks)
        args = (self._instance, SLOTS_S * 1000, encoded, settled, call, lowest, CALLS_S * 1000)
        outcome = await self._commands.run_script(self._take, keys, *args, self.process)
        answers = _answers.decode(outcome)
        if len(answers) != len(asks):
            raise PenstockError(f"{len(answers)} answers to {len(asks)} asks; this is a bug")
        return answers

    async def end_group(self, group: str) -> None:
        """Says that no operation of a group will be begun anew.

        Raises:
            Unavailable: Redis did not answer. It knows them for CALLS_S.
        """
        await self._commands.run("EXPIRE", self._group_key(group), ENDED_GROUP_S)

    def _group_key(self, group: str) -> str:
        return f"{self._prefix}operations:{group}"

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
        now_ms, changed, settled = await self._commands.run_script(
            self._totals, [self._budgets_key], *args
        )
        totals = {}
        for key, month, used, before in settled:
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
