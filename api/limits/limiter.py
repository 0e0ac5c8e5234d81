"""Decides whether a request is within the limits of its tenant, of its key and of its model.

A request reserves what it will probably use of every limit at once, or is refused. Work and cost
are known only when it ends: then the reservation is settled, and what was not used goes back.
Callers without limits never come here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from api.limits.accounts import Account, Accounts
from api.limits.budget_warnings import BudgetWarnings
from api.limits.counters import LEASE_S, Counter, MonthCounter
from api.limits.shown import Need, headers_of, refusal
from api.limits.store import SLOTS_S, Answer, Ask, Kind, LimitStore, Standing
from shared.errors import Unavailable
from shared.tasks.base import Unit
from shared.tenants.plan import Caller

REGISTER_S = SLOTS_S / 3
MOST_ASKS = 64
"""Limits in one call of the script that gives back."""
TOTALS_OVERLAP_MS = 1000
IDLE_S = 300.0
CLOSE_LIMIT_S = 0.5


class RequestDemand:
    """What a request will probably use, or has used.

    Args:
        unit: what its work is counted in.
        items: how many of them are in flight.
        work: tokens or pixel-steps. Parts count as whole.
        cost_usd: what it is charged.
    """

    def __init__(self, unit: Unit, *, items: int, work: float, cost_usd: float) -> None:
        self._amounts = {"requests": 1.0, "items": items, unit: math.ceil(work), "usd": cost_usd}

    def of(self, counter: Counter) -> float:
        """What it needs of one limit."""
        return self.amount(counter.unit)

    def amount(self, unit: str) -> float:
        """What it needs of limits in this unit."""
        return self._amounts[unit]


class Taking(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request has taken of one limit, as a hold keeps it. The fields are those of an Ask."""

    kind: Kind
    key: str
    unit: str
    limit: float
    amount: float
    period: float
    month: float = 0

    def settled(self, used: float) -> Ask:
        """Gives back all but `used`."""
        returns = [(self.period, self.amount - used)]
        return Ask(self.key, self.kind, self.limit, 0, returns=returns, month=self.month)


class Limiter:
    """The limits of all callers, in this instance. An async context manager.

    Args:
        store: counts for all instances. The limiter opens and closes it.
        warnings: tells tenants how much of their budgets is spent. None: nobody does.
        instances: how many instances to reckon with until Redis has said it.
        clock: returns monotonic seconds. Tests replace it.
    """

    def __init__(
        self,
        store: LimitStore,
        warnings: BudgetWarnings | None = None,
        *,
        instances: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._warnings = warnings
        self._clock = clock
        self._standing = Standing(instances - 1, instances)
        self._accounts = Accounts()
        self._totals_since_ms = 0
        self._touched: set[Counter] = set()
        self._is_touched = asyncio.Event()
        self._takings: set[asyncio.Task[list[Answer]]] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Who waits for what is reserved of a budget, by its key, the longest first."""

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self.give_back(math.inf)
                await self.store.leave()
        await self.store.__aexit__(kind, error, trace)

    def account(self, caller: Caller, model: str, unit: Unit, month: float = 0) -> Account:
        """What counts for a caller, a model whose work is counted in `unit`, and a month.

        The month is that in which the request arrived, as `month_of` counts. 0: the current one.
        """
        return self._accounts.of(caller, model, unit, month)

    def headers(self, account: Account) -> dict[str, str]:
        """The `x-ratelimit-*` headers of an answer."""
        return headers_of(account.counters, self._clock())

    async def reserve(self, account: Account, demand: RequestDemand) -> Reservation:
        """Reserves what a request will probably use of all limits, or of none.

        Raises:
            RateLimited: a limit is reached. BudgetExceeded: it is the budget of the month.
            Unavailable: nobody knows what is left of the budget, and the plan says to refuse then.
        """
        reservation = Reservation(self)
        needs = [Need(counter, demand.of(counter)) for counter in account.counters]
        try:
            lacking = self._take(reservation, needs)
            if lacking and account.asking is not None:
                # The answer may have enough for this request too.
                await asyncio.wait([account.asking])
                lacking = self._take(reservation, lacking)
            if lacking:
                await self._ask(reservation, account, lacking)
        except BaseException:
            reservation.cancel()
            raise
        return reservation

    def _take(self, reservation: Reservation, needs: Sequence[Need]) -> list[Need]:
        """Takes from leases. Returns what Redis must be asked for."""
        now_s, lacking = self._clock(), []
        for need in needs:
            period = need.counter.take(need.amount, now_s)
            if period is None:
                lacking.append(need)
            else:
                reservation.note(need, period)
        hopeless = [
            need
            for need in lacking
            if need.amount > need.counter.limit or need.counter.is_blocked(need.amount, now_s)
        ]
        if hopeless:
            raise refusal(hopeless, now_s)
        return lacking

    async def _ask(
        self, reservation: Reservation, account: Account, lacking: Sequence[Need]
    ) -> None:
        """Asks Redis for all that is lacking at once, and takes alone if it does not answer."""
        sent_s = self._clock()
        asks = [counter.ask(amount, sent_s) for counter, amount in lacking]
        asking = account.asking = asyncio.get_running_loop().create_future()
        taking = asyncio.create_task(self.store.take(asks))
        self._takings.add(taking)
        taking.add_done_callback(self._takings.discard)
        try:
            answers = await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._leave_behind(taking, lacking, asks, sent_s)
            raise
        except BaseException as error:
            for (counter, amount), ask in zip(lacking, asks, strict=True):
                counter.abandon(ask, amount)
            if not isinstance(error, Unavailable):
                raise
            self._take_alone(reservation, lacking)
            return
        finally:
            asking.set_result(None)
            if account.asking is asking:
                account.asking = None
        for (counter, amount), ask, answer in zip(lacking, asks, answers, strict=True):
            counter.accept(ask, answer, sent_s, need=amount)
        self.touch(counter for counter, _ in lacking)
        self._warn(account, lacking, answers)
        refused = [need for need, answer in zip(lacking, answers, strict=True) if not answer.fits]
        if refused:
            raise refusal(refused, self._clock())
        for need, answer in zip(lacking, answers, strict=True):
            reservation.note(need, answer.period)

    def _warn(self, account: Account, asked: Sequence[Need], answers: Sequence[Answer]) -> None:
        """Tells the tenant of budgets that are spent up to a share of them."""
        for (counter, amount), answer in zip(asked, answers, strict=True):
            if self._warnings is not None and isinstance(counter, MonthCounter):
                is_refused = not answer.fits and counter.is_spent(amount)
                self._warnings.check(counter, account.plan, account.tenant, is_refused=is_refused)

    def _leave_behind(
        self,
        taking: asyncio.Task[list[Answer]],
        lacking: Sequence[Need],
        asks: Sequence[Ask],
        sent_s: float,
    ) -> None:
        """Its request is canceled. Redis may take it all the same: then it comes back."""
        late = list[tuple[Need, Ask]]()
        for need, ask in zip(lacking, asks, strict=True):
            if ask.kind == "slots":  # the next ask says how many are needed
                need.counter.abandon(ask, need.amount)
            else:
                late.append((need, ask))
        taking.add_done_callback(partial(self._return_late, late, asks, sent_s))

    def _return_late(
        self,
        late: Sequence[tuple[Need, Ask]],
        asks: Sequence[Ask],
        sent_s: float,
        taking: asyncio.Task[list[Answer]],
    ) -> None:
        """Gives back what Redis granted to a request that was canceled while it asked."""
        if taking.cancelled() or taking.exception() is not None:
            for need, ask in late:
                need.counter.abandon(ask, need.amount)
            return
        answers = dict(zip((ask.key for ask in asks), taking.result(), strict=True))
        for (counter, amount), ask in late:
            counter.accept(ask, answers[ask.key], sent_s, need=amount)
            if answers[ask.key].granted:
                counter.give_back(amount, answers[ask.key].period, self._clock())
        self.touch(need.counter for need, _ in late)

    def _take_alone(self, reservation: Reservation, lacking: Sequence[Need]) -> None:
        now_s = self._clock()
        for need in lacking:
            counter = need.counter
            period = counter.take_alone(need.amount, now_s, self._standing)
            if period is None and isinstance(counter, MonthCounter) and not counter.may_spend_alone:
                reason = f"{counter.subject} can't be checked now. Try again later."
                raise Unavailable(reason, public=reason)
            if period is None:
                raise refusal([need], now_s)
            reservation.note(need, period)
        self.touch(counter for counter, _ in lacking)  # Redis gets to know it as soon as it is back

    async def settle_hold(
        self, record_id: str, takings: Sequence[Taking], used: RequestDemand | None
    ) -> None:
        """Settles what a prediction has reserved, once, whichever instance created it.

        Args:
            record_id: of the prediction.
            takings: of its hold.
            used: what it has used. None: nothing is known, so it counts as reserved.

        Raises:
            Unavailable: Redis did not answer.
        """
        asks = [] if used is None else [one.settled(used.amount(one.unit)) for one in takings]
        sent_s = self._clock()
        answers = await self.store.settle(record_id, asks)
        for ask, answer in zip(asks, answers, strict=True):
            self._accounts.note(ask, answer, sent_s)
            self.wake_next(ask.key)

    def touch(self, counters: Iterable[Counter]) -> None:
        """Says that these may have something to give back soon."""
        self._touched.update(counters)
        self._is_touched.set()

    async def wait_released(self, account: Account, limit_s: float) -> bool:
        """Waits until a request ends that has reserved a part of one of the account's budgets.

        Each such end wakes one waiter, and `wake_all_next` the next one. Requests in other
        instances wake nobody, so ask again when the time is over.

        Args:
            account: of a request that was refused.
            limit_s: seconds after which it waits no longer.

        Returns:
            Whether a request of this instance ended.
        """
        woken = asyncio.get_running_loop().create_future()
        keys = [one.key for one in account.counters if isinstance(one, MonthCounter)]
        for key in keys:
            self._waiting.setdefault(key, deque()).append(woken)
        try:
            async with asyncio.timeout(limit_s):
                await woken
        except TimeoutError:
            return False
        finally:
            for key in keys:
                left = deque(one for one in self._waiting.pop(key, ()) if one is not woken)
                if left:
                    self._waiting[key] = left
        return True

    def wake_next(self, key: str) -> None:
        """Wakes who has waited longest for the budget that is counted under this key."""
        queue = self._waiting.get(key)
        while queue:
            woken = queue.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def wake_all_next(self, account: Account) -> None:
        """Wakes the next one for each budget: whoever was let in may have left room for it."""
        for counter in account.counters:
            self.wake_next(counter.key)

    def give_back_to(self, counter: Counter, amount: float, period: float) -> None:
        """Gives back what a reservation did not use."""
        counter.give_back(amount, period, self._clock())

    async def register(self) -> None:
        """Says that this instance counts, and learns how many others do, and what is spent.

        Raises:
            Unavailable: Redis did not answer.
        """
        self._standing = await self.store.register()
        sent_s = self._clock()
        totals = await self.store.totals(self._totals_since_ms)
        self._accounts.learn(totals, sent_s)
        self._totals_since_ms = totals.at_ms - TOTALS_OVERLAP_MS

    async def give_back(self, now_s: float) -> None:
        """Gives back to Redis what nobody needs at `now_s`, and renews slots.

        Raises:
            Unavailable: Redis did not answer. It is kept for the next time.
        """
        self._touched = {counter for counter in self._touched if not counter.is_idle}
        due = [counter for counter in self._touched if counter.is_due(now_s)]
        for start in range(0, len(due), MOST_ASKS):
            part = due[start : start + MOST_ASKS]
            sent_s = self._clock()
            asks = [counter.ask(0, sent_s) for counter in part]
            try:
                answers = await self.store.take(asks)
            except Unavailable:
                for counter, ask in zip(part, asks, strict=True):
                    counter.abandon(ask, 0)
                raise
            for counter, ask, answer in zip(part, asks, answers, strict=True):
                counter.accept(ask, answer, sent_s, need=0)

    async def _keep(self) -> None:
        """Registers this instance, gives back what leases leave, and forgets idle callers."""
        registered_s = -math.inf
        while True:
            with contextlib.suppress(Unavailable):
                now_s = self._clock()
                if now_s >= registered_s + REGISTER_S:
                    registered_s = now_s
                    self._accounts.forget(now_s - IDLE_S)
                    await self.register()
                await self.give_back(self._clock())
            if not self._touched:
                self._is_touched.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REGISTER_S):
                    await self._is_touched.wait()
            await asyncio.sleep(LEASE_S)


class Reservation:
    """What one request has taken. It is settled or canceled once, when the request ends."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._taken: list[tuple[Need, float]] = []
        self._handed_over: list[tuple[Need, float]] = []

    def note(self, need: Need, period: float) -> None:
        """Notes what was taken of one limit, and in which period."""
        self._taken.append((need, period))
        need.counter.hold(need.amount, period)

    def settle(self, used: RequestDemand) -> None:
        """Ends the reservation: the request used so much, and nothing is in flight any more."""
        for (counter, amount), period in self._taken:
            left = amount - (0 if counter.unit == "items" else used.of(counter))
            if left:
                self._limiter.give_back_to(counter, left, period)
        self._end()

    def takings(self) -> list[Taking]:
        """What is used up of limits, so that another instance can settle it."""
        return [
            Taking(
                counter.kind,
                counter.key,
                counter.unit,
                counter.limit,
                amount,
                period,
                counter.month if isinstance(counter, MonthCounter) else 0,
            )
            for (counter, amount), period in self._taken
            if counter.unit != "items"
        ]

    def hand_over(self) -> None:
        """Leaves the takings to whoever settles the hold. Only items stay, which are in flight.

        What was handed over may still come back until the end, so it is not spent.
        """
        self._handed_over += [taken for taken in self._taken if taken[0].counter.unit != "items"]
        self._taken = [taken for taken in self._taken if taken[0].counter.unit == "items"]

    def cancel(self) -> None:
        """Ends the reservation of a request that was not taken on: nothing counts."""
        for (counter, amount), period in self._taken:
            self._limiter.give_back_to(counter, amount, period)
        self._end()

    def leave(self, *, is_charged: bool) -> None:
        """Ends it without knowing what was used: it counts as reserved. Nothing is in flight here.

        Args:
            is_charged: whether the budget pays for it. It does not if the caller hung up.
        """
        for (counter, amount), period in self._taken:
            if counter.unit == "items" or (counter.unit == "usd" and not is_charged):
                self._limiter.give_back_to(counter, amount, period)
        self._end()

    def _end(self) -> None:
        ended = self._taken + self._handed_over
        for (counter, amount), period in ended:
            counter.release(amount, period)
            self._limiter.wake_next(counter.key)
        self._limiter.touch(need.counter for need, _ in ended)
        self._taken, self._handed_over = [], []
