"""An instance's accounts, and the Redis store that counts usage across all instances.

An account groups the counters that apply to one caller and model: the tenant's, the key's, and the
requested model's.

In Redis, a single script takes amounts from several limits. The script (take.lua) defines how
windows, months, and slots are counted. Only Redis's clock is used, so instances' clocks don't need
to agree.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

import msgspec
import prometheus_client

from api.limits.counters import (
    SLOTS_S,
    Answer,
    Ask,
    Counter,
    MonthCounter,
    SlotCounter,
    Standing,
    WindowCounter,
)
from api.limits.messages import BUDGET_UNIT
from shared.errors import PenstockError, Unavailable
from shared.models.tasks.base import Unit
from shared.stores.holds import hold_keys
from shared.stores.redis_client import KEY_PREFIX, RedisLink, RedisStore, Script, load_script
from shared.tenants.directory import BudgetHolder
from shared.tenants.plan import Caller, Limits, Plan, Rates

MAX_ACCOUNTS = 8192
"""Maximum number of accounts (one per caller and model) kept in memory. Dropped accounts are
recreated as needed.
"""

ERRORS = prometheus_client.Counter(
    "penstock_limits_errors_total",
    "Failed round trips to Redis about limits, by operation.",
    ["operation"],
)
UP = prometheus_client.Gauge(
    "penstock_limits_redis_up",
    "1 while Redis is being asked about limits, 0 while the breaker is open.",
)
MAX_TOTALS = 16_384
"""Maximum number of budgets an instance tracks, in addition to the budgets it serves."""
CALLS_S = 24 * 3600
"""How long Redis remembers an instance's counted calls and a group's counted operations after the
last one.
"""
ENDED_GROUP_S = 3600
"""How long Redis remembers a finished group's counted operations.

Another instance may still be settling them.
"""
TOTALS_KEPT_MS = 62 * 24 * 3600 * 1000
CLOCK = "api/limits/now.lua"
MAX_COMPARED = 64
"""Maximum number of budgets per call to the script that compares budgets with their rows."""
MARKS_LOCK_MS = 180_000
"""Lease duration for the instance that maintains the marks. If that instance dies, others wait for
the lease to expire.
"""
_RENEW = load_script("shared/stores/lease_renew.lua")
_RELEASE = load_script("shared/stores/lease_release.lua")

_answers = msgspec.json.Decoder(list[Answer])


@dataclass(slots=True)
class Account:
    """The counters for one caller and model."""

    tenant: str
    plan: Plan
    key_limits: Limits | None
    counters: list[Counter]
    counts_work: bool = False
    """True if a request's work counts toward a limit."""
    has_budget: bool = False
    """True if its cost counts toward a budget."""
    asking: asyncio.Future[None] | None = field(default=None, compare=False)
    """The current round trip to Redis."""


class Accounts:
    """This instance's accounts and counters. Accounts share counters."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str, str, float], Account] = {}
        self._counters: dict[tuple[str, float], Counter] = {}
        self._totals: dict[str, dict[float, float]] = {}
        self._has_all_totals = False
        self._totals_at_s = 0.0

    def of(self, caller: Caller, model: str, unit: Unit, month: float = 0) -> Account:
        """Returns a caller's account for a model whose work is counted in `unit`.

        Args:
            month: month in which the request arrived, as counted by `month_of`. 0 means the current
                month.
        """
        name = (caller.tenant, caller.key_id, model, month)
        account = self._accounts.get(name)
        if account is None or not (
            account.plan is caller.plan and account.key_limits is caller.key_limits
        ):
            self._accounts.pop(name, None)
            account = self._accounts[name] = self._make_account(caller, model, unit, month)
            if len(self._accounts) > MAX_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
        return account

    def note(self, ask: Ask, answer: Answer, sent_s: float) -> None:
        """Records the response to an ask that took nothing, if this instance knows the limit."""
        counter = self._counters.get((ask.key, ask.month))
        if counter is not None:
            counter.accept(ask, answer, sent_s, need=0)

    def learn(self, totals: Totals, at_s: float) -> None:
        """Records amounts spent from budgets, including budgets used only on other instances.

        Args:
            totals: totals for the budgets that changed since the last call.
        """
        is_first = not self._totals_at_s
        self._has_all_totals = totals.is_whole and (is_first or self._has_all_totals)
        self._totals_at_s = at_s
        for key, used in totals.by_key.items():
            self._totals.pop(key, None)
            self._totals[key] = used
        while len(self._totals) > MAX_TOTALS:
            del self._totals[next(iter(self._totals))]
            self._has_all_totals = False
        for counter in self._counters.values():
            if isinstance(counter, MonthCounter):
                self._update(counter)

    def _update(self, counter: MonthCounter) -> None:
        """Updates a counter with its budget's known usage."""
        used = self._totals.get(counter.key)
        if used is not None:
            month = counter.month or max(used)
            counter.learn(used.get(month, 0.0), self._totals_at_s)
        elif self._has_all_totals and not counter.is_known:
            counter.learn(0.0, self._totals_at_s)

    def forget(self, since_s: float) -> None:
        """Forgets counters that hold nothing and have not been used since then."""
        recent_counters = {
            key: counter
            for key, counter in self._counters.items()
            if counter.touched_s >= since_s or not counter.is_idle
        }
        if len(recent_counters) < len(self._counters):
            self._counters = recent_counters
            self._accounts.clear()

    def _make_account(self, caller: Caller, model: str, unit: Unit, month: float) -> Account:
        plan, tenant = caller.plan, caller.tenant
        counters = list(self._of_limits(plan, unit, f"t:{tenant}", f"tenant {tenant!r}", month))
        if caller.key_limits is not None:
            key = f"k:{tenant}:{caller.key_id}"
            subject = f"key {caller.key_id!r}"
            own = list(self._of_limits(caller.key_limits, unit, key, subject, month))
            for counter in own:
                if isinstance(counter, MonthCounter):
                    counter.key_id = caller.key_id
            counters += own
        if model in plan.per_model:
            subject = f"tenant {tenant!r} with {model}"
            counters += self._of_rates(plan.per_model[model], unit, f"m:{model}:{tenant}", subject)
        for counter in counters:
            if isinstance(counter, MonthCounter):
                counter.is_open = plan.on_limit_store_outage == "allow"
        units = {counter.unit for counter in counters}
        return Account(
            tenant, plan, caller.key_limits, counters, unit in units, BUDGET_UNIT in units
        )

    def _of_limits(
        self, limits: Limits, unit: Unit, key: str, subject: str, month: float
    ) -> Iterator[Counter]:
        yield from self._of_rates(limits, unit, key, subject)
        if limits.max_in_flight is not None:
            yield self._counter(
                SlotCounter,
                f"{key}:items",
                limits.max_in_flight,
                "items",
                "items in flight",
                subject,
            )
        if limits.budget_usd_per_month is not None:
            budget = limits.budget_usd_per_month
            words = "US dollars per month"
            yield self._counter(
                MonthCounter, f"{key}:{BUDGET_UNIT}", budget, BUDGET_UNIT, words, subject, month
            )

    def _of_rates(self, rates: Rates, unit: Unit, key: str, subject: str) -> Iterator[Counter]:
        of_unit = getattr(rates, f"{unit}_per_min")
        for name, limit in (("requests", rates.requests_per_min), (unit, of_unit)):
            if limit is not None:
                words = f"{name.replace('_', '-')} per minute"
                yield self._counter(WindowCounter, f"{key}:{name}", limit, name, words, subject)

    def _counter(
        self,
        kind: type[Counter],
        key: str,
        limit: float,
        unit: str,
        words: str,
        subject: str,
        month: float = 0,
    ) -> Counter:
        counter = self._counters.get((key, month))
        if counter is None:
            counter = kind(key, limit, unit, f"{words} of {subject}")
            self._counters[key, month] = counter
            if isinstance(counter, MonthCounter):
                counter.month = month
                self._update(counter)
        counter.limit = limit
        return counter


class AnswerLost(Unavailable):
    """Redis may have counted a call. `LimitStore.resolve` uses the call's number to find out."""

    def __init__(self, call: int, error: Unavailable) -> None:
        super().__init__(error.message, public=error.public_message)
        self.call = call


class Totals(NamedTuple):
    """Amounts spent from budgets."""

    by_key: dict[str, dict[float, float]]
    """US dollars per month, for the latest month and the one before it."""
    at_ms: int
    """By Redis's clock."""
    is_whole: bool
    """True if the totals include all changes."""


class RowsAsk(NamedTuple):
    """Compares one month of a budget with its rows and adds the missing amount (rows.lua)."""

    name: str
    """The budget's counter: `t:TENANT:usd`, or `k:TENANT:KEY_ID:usd`."""
    month: int
    """Months since January of year 0, as counted by `month_of`."""
    rows: float = -1.0
    """Total, in US dollars, of the rows for all requests completed before an earlier reading. If
    negative, only reads.
    """
    seen: float = 0.0
    """`used` minus `raised` at that reading."""
    lowers: bool = False
    """True to also subtract any excess over the rows if no request in flight has reserved any of
    the budget.
    """


class BudgetReading(msgspec.Struct, frozen=True):
    """One month of a budget in Redis. All amounts are in US dollars."""

    at_ms: float
    """The time of the reading, by Redis's clock."""
    used: float
    """The amount used or reserved by all instances."""
    raised: float
    """The part of `used` that was added from rows."""
    held: float
    """The part of `used` that requests in flight may return."""
    added: float
    """The amount added by this call. Negative if an amount was subtracted."""


def budget_name(holder: BudgetHolder) -> str:
    tenant, key_id = holder
    return f"k:{tenant}:{key_id}:{BUDGET_UNIT}" if key_id else f"t:{tenant}:{BUDGET_UNIT}"


def scripts(clock: str = CLOCK) -> tuple[Script, Script, Script, Script, Script]:
    """Returns the scripts for taking, registering, totals, comparing with rows, and the age."""
    return (
        load_script(clock, "api/limits/months.lua", "api/limits/take.lua"),
        load_script(clock, "api/limits/register.lua"),
        load_script(clock, "api/limits/totals.lua"),
        load_script(clock, "api/limits/months.lua", "api/limits/rows.lua"),
        load_script(clock, "api/limits/age.lua"),
    )


_readings = msgspec.json.Decoder(list[BudgetReading])


class LimitStore(RedisStore):
    """The counts in one Redis server.

    An async context manager that opens quickly even without Redis.

    Args:
        redis_url: `redis://`, `rediss://`, or `unix://` URL, the same for all instances.
        timeout_s: time limit for one round trip.
        clock: script file that reads Redis's time. Replaced by tests.
    """

    def __init__(
        self,
        redis_url: str,
        instance: str,
        *,
        timeout_s: float = 0.1,
        clock: str = CLOCK,
    ) -> None:
        super().__init__(
            RedisLink(
                "limits",
                redis_url,
                timeout_s=timeout_s,
                up=UP,
                errors=ERRORS,
                field="records_url",
            )
        )
        self._commands = self._link.commands("the limit store")
        self._take, self._register, self._totals, self._rows, self._age = scripts(clock)
        self._instance = instance
        self._prefix = f"{KEY_PREFIX}limits:"
        self._hold_keys = hold_keys(KEY_PREFIX)
        self._budgets_key = f"{self._prefix}budgets"
        self._marks_key, self._lock_key = f"{self._prefix}marks", f"{self._prefix}marks_lock"
        self._record_prefix = f"{KEY_PREFIX}record:"
        # Two processes may use the same ID in succession. Their calls must remain distinct.
        self.process = uuid4().hex
        """Distinguishes this process from other processes in the same instance."""
        self._calls_key = f"{self._prefix}calls:{instance}:{self.process}"
        self._calls = itertools.count(1)
        self._unanswered: dict[int, None] = {}
        """Numbers of pending calls, lowest first."""

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        """Takes the amounts in all the asks, or nothing if any amount does not fit.

        Raises:
            AnswerLost: Redis did not respond, but may have counted the asks. Also raised if Redis
                could not be notified that an operation has finished.
            Unavailable: Redis was not called, because it has not responded for a while.
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
        """Returns the amounts granted by a call whose response was lost.

        If the call was not counted, the amounts it returned are counted now, and nothing is taken.
        If a copy of the call arrives later, it has no effect.

        Args:
            asks: the call's asks, except any for slots.

        Raises:
            Unavailable: Redis did not respond. Try again.
        """
        late = [msgspec.structs.replace(ask, need=0, extra=0, held=-1) for ask in asks]
        answers = await self._run(late, "", call)
        self.forget(call)
        return answers

    def forget(self, call: int) -> None:
        """Abandons a call. If the call has not been counted yet, it never will be."""
        self._unanswered.pop(call, None)

    async def settle(self, record_id: str, asks: Sequence[Ask]) -> list[Answer]:
        """Returns the unused part of a prediction's hold to the limits and removes the hold.

        Does nothing if the hold has already been settled.

        Args:
            asks: asks that have no need, only amounts to return.

        Raises:
            Unavailable: Redis did not respond, but may have settled it.
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
            raise PenstockError(f"{len(answers)} answers for {len(asks)} requests; this is a bug")
        return answers

    async def end_group(self, group: str) -> None:
        """Marks a group as finished: its operations will not be started again.

        Raises:
            Unavailable: Redis did not respond. Redis remembers the operations for CALLS_S.
        """
        await self._commands.run("EXPIRE", self._group_key(group), ENDED_GROUP_S)

    def _group_key(self, group: str) -> str:
        return f"{self._prefix}operations:{group}"

    async def register(self) -> Standing:
        """Registers this instance for SLOTS_S, and returns its position among all instances."""
        key = f"{self._prefix}instances"
        rank, instances = await self._commands.run_script(
            self._register, [key], self._instance, SLOTS_S * 1000
        )
        return Standing(int(rank), int(instances))

    async def totals(self, since_ms: float) -> Totals:
        """Returns totals for the budgets that changed since a given time on Redis's clock."""
        args = (since_ms, MAX_TOTALS, f"{self._prefix}month:", TOTALS_KEPT_MS)
        now_ms, changed, settled = await self._commands.run_script(
            self._totals, [self._budgets_key], *args
        )
        totals = {}
        for key, month, used, before in settled:
            newest = float(month)
            totals[key.decode()] = {newest: float(used), newest - 1: float(before)}
        return Totals(totals, int(now_ms), is_whole=int(changed) <= MAX_TOTALS)

    async def compare(self, asks: Sequence[RowsAsk]) -> list[BudgetReading]:
        """Adds the amounts that are in the budgets' rows but missing from Redis.

        Returns the resulting budgets.

        Raises:
            Unavailable: Redis did not respond, but may have added some. Try again.
        """
        readings = list[BudgetReading]()
        for start in range(0, len(asks), MAX_COMPARED):
            part = asks[start : start + MAX_COMPARED]
            keys = [f"{self._prefix}month:{ask.name}" for ask in part]
            encoded = msgspec.json.encode([ask._asdict() for ask in part])
            outcome = await self._commands.run_script(
                self._rows, [*keys, self._budgets_key], encoded
            )
            readings += _readings.decode(outcome)
        return readings

    async def read_age_s(self) -> float:
        """Returns how long this Redis has been counting. 0 if it is new or has lost its data."""
        age_ms = await self._commands.run_script(self._age, [f"{self._prefix}since"])
        return int(age_ms) / 1000

    async def lock_marks(self) -> bool:
        """Returns whether this instance may maintain the marks now. Release with `unlock_marks`.

        An instance that already holds the lock gets it again, because the response to an earlier
        call may have been lost.
        """
        args = (self.process, MARKS_LOCK_MS)
        return bool(await self._commands.run_script(_RENEW, [self._lock_key], *args))

    async def unlock_marks(self) -> None:
        """Allows other instances to maintain the marks.

        Raises:
            Unavailable: Redis did not respond. The lock expires after MARKS_LOCK_MS.
        """
        await self._commands.run_script(_RELEASE, [self._lock_key], self.process)

    async def marks(self) -> dict[str, bytes]:
        """Returns each counted budget's mark, keyed by counter name."""
        marks = await self._commands.run("HGETALL", self._marks_key)
        return {name.decode(): mark for name, mark in marks.items()}

    async def put_marks(self, marks: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Stores marks, keyed by counter name, and deletes others. The remaining marks stay.

        Args:
            removed: names of the counters whose marks are deleted before new ones are stored.

        Raises:
            Unavailable: Redis did not respond. Redis may have deleted marks, or completed the whole
                change.
        """
        if removed_fields := list(removed):
            await self._commands.run("HDEL", self._marks_key, *removed_fields)
        if pairs := [word for pair in marks.items() for word in pair]:
            await self._commands.run("HSET", self._marks_key, *pairs)

    async def leave(self) -> None:
        """Unregisters this instance.

        Raises:
            Unavailable: Redis did not respond. The registration expires after SLOTS_S.
        """
        await self._commands.run("ZREM", f"{self._prefix}instances", self._instance)

    async def claim_warning(self, key: str, period: float, share: float) -> bool:
        """Claims the warning about this share of a month's budget.

        Returns whether this caller is the first to claim it.

        Raises:
            Unavailable: Redis did not respond, but may have recorded the warning.
        """
        field = _format_warning_field(period, share)
        return bool(await self._commands.run("HSETNX", f"{self._prefix}month:{key}", field, "1"))

    async def unclaim_warning(self, key: str, period: float, share: float) -> None:
        """Removes a claim, because the warning was not sent.

        Raises:
            Unavailable: Redis did not respond. In that case, the warning is never sent.
        """
        await self._commands.run(
            "HDEL", f"{self._prefix}month:{key}", _format_warning_field(period, share)
        )


def _format_warning_field(period: float, share: float) -> str:
    return f"warned:{period:.0f}:{share}"
