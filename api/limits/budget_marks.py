"""Counts spending that took place before a budget existed.

A budget's counter is the sum of its rows (docs/reference/limits.md). While a tenant or a key has no
budget, its spending is not counted. For this reason, when a budget is set mid-month, an API
instance marks the time and adds the BigQuery rows for earlier responses. Rows may arrive late, so
the mark is rechecked for a day, less and less often. Once no request in flight has reserved any of
the budget, the mark moves to that moment. This includes requests admitted by instances that did not
yet know of the budget.

The marks are in Redis, alongside the counters. If Redis loses both, all budgets are marked again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

import msgspec

from api.limits.accounts import BudgetReading, LimitStore, RowsAsk, budget_name
from api.limits.counters import month_of
from api.limits.spent import SpentQuestion, SpentReader
from shared.errors import MALFORMED, Unavailable
from shared.tenants.directory import BudgetHolder

POLL_S = 1.0
PASS_S = 10.0
"""Seconds between passes while the directory does not change."""
CHECKS_AFTER_S = (15.0, 60.0, 300.0, 1800.0, 7200.0, 28_800.0, 43_200.0)
"""Pauses between checks of a mark. On Google Cloud, a row takes about 150 s to reach BigQuery."""
RETRY_S = 60.0
"""Pause after a check fails or can't read the rows."""
SETTLE_S = 10.0
"""Age at which a new Redis server surely has all instances' reports of spending without Redis. An
instance notices within MAX_RETRY_S that Redis is back, and reports on its next round trip.
"""
log = logging.getLogger(__name__)


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a budget's counter at a point in time."""

    at_s: float
    """Unix time, by Redis's clock."""
    seen: dict[int, float]
    """For each month, the amount used at that time, minus the amount added from rows."""
    due_s: float = 0.0
    """Unix time of the next check. 0 if there are no more checks."""
    checks: int = 0


_mark_decoder = msgspec.json.Decoder(Mark)


class BudgetMarks:
    """Compares new budgets with their rows, in the background. An async context manager.

    Args:
        store: the counters for all instances. Must be open.
        budgets: returns the budgets in the directory, or None if the directory may have changed.
        clock: Unix seconds.
    """

    def __init__(
        self,
        store: LimitStore,
        budgets: Callable[[], frozenset[BudgetHolder] | None],
        spent: SpentReader,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._budgets = budgets
        self._spent = spent
        self._clock = clock
        self._passed_holders: frozenset[BudgetHolder] = frozenset()

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        passed_s = -math.inf
        while True:
            budgets, now_s, pause_s = self._budgets(), time.monotonic(), POLL_S
            is_due = bool(budgets) and now_s >= passed_s + PASS_S
            if budgets is not None and (is_due or budgets != self._passed_holders):
                try:
                    if await self.check():
                        passed_s = now_s
                except Unavailable:  # Redis is unreachable; the next pass is coming soon
                    pass
                except Exception:  # a bug must not leave budgets unmarked until a restart
                    log.exception("budgets not checked")
                    pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def check(self) -> bool:
        """Marks new budgets, and checks marks that are due.

        Returns:
            False if another instance is doing so now, if the directory may have changed, or if
            Redis is younger than SETTLE_S. Rows include amounts that instances spent without Redis,
            which would be counted twice if they were reported after a mark.
        """
        if await self._store.read_age_s() < SETTLE_S:
            return False
        # the lock is assumed to be held until Redis denies it, because the response may be lost or
        # this task may be canceled
        is_locked = True
        try:
            is_locked = await self._store.lock_marks()
            # Read under the lock, because a stale directory could cause another instance's marks to
            # be removed.
            budgets = self._budgets() if is_locked else None
            if budgets is None:
                return False
            await self._check({budget_name(budget): budget for budget in budgets})
        finally:
            if is_locked:
                # Must not replace the error that stopped this check, especially a cancellation.
                with suppress(Unavailable):
                    await self._store.unlock_marks()
        self._passed_holders = budgets
        return True

    async def _check(self, budgets: Mapping[str, BudgetHolder]) -> None:
        now_s, stored = self._clock(), await self._store.marks()
        marks = _decode_marks(stored)
        fresh = await self._mark_now([name for name in budgets if name not in marks], now_s)
        await self._put(fresh, [name for name in stored if name not in budgets])
        due = {
            name: mark
            for name, mark in (marks | fresh).items()
            if name in budgets and 0 < mark.due_s <= now_s
        }
        if due:
            await self._put(await self._check_due(budgets, due, now_s))

    async def _mark_now(self, names: Sequence[str], now_s: float) -> dict[str, Mark]:
        """Returns marks for the current time, due immediately."""
        month = int(month_of(now_s))
        asks = [
            RowsAsk(name, compared_month) for name in names for compared_month in (month, month - 1)
        ]
        readings = await self._compare(asks)
        return {name: _mark(own, due_s=now_s, checks=0) for name, own in readings.items()}

    async def _compare(self, asks: Sequence[RowsAsk]) -> dict[str, dict[int, BudgetReading]]:
        """Returns the readings, keyed by budget and month."""
        readings = defaultdict[str, dict[int, BudgetReading]](dict)
        for ask, reading in zip(asks, await self._store.compare(asks), strict=True):
            readings[ask.name][ask.month] = reading
        return readings

    async def _check_due(
        self, budgets: Mapping[str, BudgetHolder], due: Mapping[str, Mark], now_s: float
    ) -> dict[str, Mark]:
        """Adds missing amounts from rows. Returns the new marks."""
        month = int(month_of(now_s))
        questions = [SpentQuestion(budgets[name], mark.at_s) for name, mark in due.items()]
        try:
            sums = await asyncio.to_thread(self._spent.read, month, questions)
        except Unavailable as error:
            log.warning("budgets not compared with their rows", extra={"reason": error.message})
            later_s = now_s + RETRY_S
            return {
                name: msgspec.structs.replace(mark, due_s=later_s) for name, mark in due.items()
            }
        asks = [
            RowsAsk(name, month - back, usd, mark.seen[month - back])
            for (name, mark), spent in zip(due.items(), sums, strict=True)
            for back, usd in enumerate(spent)
            if month - back in mark.seen
        ]
        readings = await self._compare(asks)
        added_usd = sum(reading.added for own in readings.values() for reading in own.values())
        log.info("budgets compared", extra={"budgets": len(due), "added_usd": added_usd})
        return {name: _next_mark(mark, readings[name], now_s) for name, mark in due.items()}

    async def _put(self, marks: Mapping[str, Mark], removed: Sequence[str] = ()) -> None:
        encoded = {name: msgspec.json.encode(mark) for name, mark in marks.items()}
        await self._store.put_marks(encoded, removed)


def _decode_marks(stored: Mapping[str, bytes]) -> dict[str, Mark]:
    """Returns the marks without damaged ones, whose budgets are then marked again."""
    marks = dict[str, Mark]()
    for name, data in stored.items():
        try:
            marks[name] = _mark_decoder.decode(data)
        except MALFORMED as error:
            log.error("budget's mark not read", extra={"budget": name, "reason": str(error)})
    return marks


def _mark(readings: Mapping[int, BudgetReading], *, due_s: float, checks: int) -> Mark:
    at_s = min((reading.at_ms for reading in readings.values()), default=0.0) / 1000
    seen = {month: reading.used - reading.raised for month, reading in readings.items()}
    return Mark(at_s, seen, due_s, checks)


def _next_mark(mark: Mark, readings: Mapping[int, BudgetReading], now_s: float) -> Mark:
    """Returns the updated mark after a check.

    The mark moves to the current time if none of the budget is reserved.
    """
    is_last = mark.checks >= len(CHECKS_AFTER_S)
    due_s = 0.0 if is_last else now_s + CHECKS_AFTER_S[mark.checks]
    if any(reading.held > 0 for reading in readings.values()):
        return msgspec.structs.replace(mark, due_s=due_s, checks=mark.checks + 1)
    return _mark(readings, due_s=due_s, checks=mark.checks + 1)
