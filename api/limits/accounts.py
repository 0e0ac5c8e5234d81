"""The accounts of an instance: the counters of a caller and a model.

Those are the counters of its tenant, of its key, and of the requested model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from api.limits.counters import Counter, MonthCounter, SlotCounter, WindowCounter
from api.limits.messages import BUDGET_UNIT
from api.limits.store import MAX_TOTALS, Answer, Ask, Totals
from shared.tasks.base import Unit
from shared.tenants.plan import Caller, Limits, Plan, Rates

MAX_ACCOUNTS = 8192
"""Maximum number of accounts (caller and model) kept. The oldest is created again on demand."""


@dataclass(slots=True)
class Account:
    """The counters for one caller and model."""

    tenant: str
    plan: Plan
    key_limits: Limits | None
    counters: list[Counter]
    counts_work: bool = False
    """True if the work of a request counts toward a limit."""
    has_budget: bool = False
    """True if its cost counts toward a budget."""
    asking: asyncio.Future[None] | None = field(default=None, compare=False)
    """The round trip to Redis that is under way."""


class Accounts:
    """All accounts and counters of this instance. A counter belongs to any number of accounts."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str, str, float], Account] = {}
        self._counters: dict[tuple[str, float], Counter] = {}
        self._totals: dict[str, dict[float, float]] = {}
        self._has_all_totals = False
        self._totals_at_s = 0.0

    def of(self, caller: Caller, model: str, unit: Unit, month: float = 0) -> Account:
        """Returns the account of a caller for a model whose work is counted in `unit`.

        Args:
            caller: who asks.
            model: what for.
            unit: of its work.
            month: in which the request arrived, as `month_of` counts. 0: the current one.
        """
        name = (caller.tenant, caller.key_id, model, month)
        account = self._accounts.get(name)
        if account is None or not (
            account.plan is caller.plan and account.key_limits is caller.key_limits
        ):
            self._accounts.pop(name, None)
            account = self._accounts[name] = self._made(caller, model, unit, month)
            if len(self._accounts) > MAX_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
        return account

    def note(self, ask: Ask, answer: Answer, sent_s: float) -> None:
        """Records an answer to an ask that needed nothing, if its limit is known here."""
        counter = self._counters.get((ask.key, ask.month))
        if counter is not None:
            counter.accept(ask, answer, sent_s, need=0)

    def learn(self, totals: Totals, at_s: float) -> None:
        """Records the amounts used of budgets, including those of other instances' callers.

        Args:
            totals: of the budgets that changed since the last ones.
            at_s: when they were requested.
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
        """Updates a counter with the known usage of its budget."""
        used = self._totals.get(counter.key)
        if used is not None:
            month = counter.month or max(used)
            counter.learn(used.get(month, 0.0), self._totals_at_s)
        elif self._has_all_totals and not counter.is_known:
            counter.learn(0.0, self._totals_at_s)

    def forget(self, since_s: float) -> None:
        """Forgets counters that have nothing to give back and were not used since then."""
        kept = {
            key: counter
            for key, counter in self._counters.items()
            if counter.touched_s >= since_s or not counter.is_idle
        }
        if len(kept) < len(self._counters):
            self._counters = kept
            self._accounts.clear()

    def _made(self, caller: Caller, model: str, unit: Unit, month: float) -> Account:
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
        units = {one.unit for one in counters}
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
