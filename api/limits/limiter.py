"""Decides whether a request is within its tenant's, key's, and model's limits.

A request reserves its estimated usage from every limit at once, or is rejected. Work and cost are
known only when the request finishes. The reservation is then settled, and the unused part is
returned. Callers without limits never get here. A caller's counters are those for the tenant, the
key, and the requested model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

import msgspec

from api.limits.accounts import Account, Accounts, AnswerLost, LimitStore
from api.limits.budget_warnings import BudgetWarnings
from api.limits.counters import (
    ALONE,
    LEASE_S,
    SLOTS_S,
    Answer,
    Ask,
    Counter,
    Kind,
    MonthCounter,
    Standing,
    WindowCounter,
)
from api.limits.messages import Need, headers_of, refusal
from shared.broker.transport import Publisher
from shared.errors import Unavailable
from shared.models.tasks.base import Unit
from shared.process.concurrency import BackgroundTask
from shared.tenants.plan import Caller

REGISTER_S = SLOTS_S / 3
MAX_ASKS = 64
"""Maximum number of limits per call to the script that returns amounts."""
MAX_LOST = 16_384
"""Maximum number of remembered calls that Redis may or may not have counted.

Amounts taken by older calls remain counted.
"""
TOTALS_OVERLAP_MS = 1000
IDLE_S = 300.0
CLOSE_LIMIT_S = 0.5


class RequestDemand:
    """A request's estimated or actual usage.

    Args:
        items: number of items that will be in flight.
        work: work in the model's unit, rounded up.
    """

    def __init__(self, unit: Unit, *, items: int, work: float, cost_usd: float) -> None:
        self._amounts = {unit: math.ceil(work), "requests": 1.0, "items": items, "usd": cost_usd}

    def of(self, counter: Counter) -> float:
        """Returns how much of one limit the request needs."""
        return self.amount(counter.unit)

    def amount(self, unit: str) -> float:
        """Returns how much of the limits in this unit the request needs."""
        return self._amounts[unit]


class Taking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The amount a request took from one limit, as stored in a hold. See Ask for the fields."""

    kind: Kind
    key: str
    unit: str
    limit: float
    amount: float
    period: float
    month: float = 0
    owner: str = ""
    """The process that took the amount without Redis."""
    before: float = 0
    """The amount taken by the request's preparation, which is not returned."""

    def build_settlement(self, used: float) -> Ask:
        """Returns the ask that returns everything except `used`."""
        returns = [(self.period, self.amount - max(0.0, used - self.before))]
        return Ask(
            self.key,
            self.kind,
            self.limit,
            0,
            returns=returns,
            month=self.month,
            owner=self.owner,
        )


class Limiter:
    """All callers' limits in this instance. An async context manager.

    Args:
        store: counts for all instances. Opened and closed by the limiter.
        warnings: warns tenants about spent budgets. None disables warnings.
        instances: number of instances to assume until Redis reports the number.
        clock: monotonic seconds. Replaced by tests.
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
        self._touched_counters: dict[Counter, None] = {}
        self._lost: dict[int, list[tuple[Counter, Ask]]] = {}
        """By call number, oldest first."""
        self._is_touched = asyncio.Event()
        self._takings: set[asyncio.Task[list[Answer]]] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests waiting for a budget's reserved part, keyed by the budget, longest wait first.
        """
        self._keep_task = BackgroundTask("keeping counts of limits", self._keep)

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        self._keep_task.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._keep_task.stop()
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(*self._takings, return_exceptions=True)
                await self.give_back(math.inf)
                await self.store.leave()
        await self.store.__aexit__(*exc)

    def account(self, caller: Caller, model: str, unit: Unit, month: float = 0) -> Account:
        """Returns the counters for a caller, a month, and a model whose work is counted in `unit`.

        `month` is the month in which the request arrived, as counted by `month_of`. 0 means the
        current month.
        """
        return self._accounts.of(caller, model, unit, month)

    def headers(self, account: Account) -> dict[str, str]:
        """Returns a response's `x-ratelimit-*` headers."""
        return headers_of(account.counters, self._clock())

    async def reserve(
        self, account: Account, demand: RequestDemand, before: Reservation | None = None
    ) -> Reservation:
        """Reserves a request's estimated usage from all limits, or from none.

        Args:
            account: counters for the request's caller and model.
            demand: the usage that the request will have in total.
            before: the part already taken by the request's preparation, if any.

        Raises:
            RateLimited: a limit is reached. BudgetExceeded: the monthly budget is spent.
            Unavailable: the remaining budget is unknown, and the plan rejects requests in that
                case.
        """
        self._check_size(account, demand)
        reservation = Reservation(self, before)
        needs = [
            need
            for counter in account.counters
            if (need := reservation.missing_of(counter, demand)) is not None
        ]
        return await self._reserve(reservation, account, needs)

    def reserve_nothing(self, account: Account) -> Reservation:
        """Returns an empty reservation, used to settle work that has already been computed.

        Budgets count the settled amounts even if there is no room for them.
        """
        reservation = Reservation(self)
        for counter in account.counters:
            if isinstance(counter, MonthCounter):
                reservation.note(Need(counter, 0), counter.month)
        return reservation

    async def reserve_rates(self, account: Account, demand: RequestDemand) -> Reservation:
        """Takes `demand` from all per-minute limits, or from none. Other limits are not checked."""
        needs = [
            Need(counter, demand.of(counter))
            for counter in account.counters
            if isinstance(counter, WindowCounter)
        ]
        self._check_size(account, demand)
        return await self._reserve(Reservation(self), account, needs)

    def _check_size(self, account: Account, demand: RequestDemand) -> None:
        """Rejects a request that can never fit within a limit, regardless of its preparation."""
        whole = [Need(counter, demand.of(counter)) for counter in account.counters]
        if too_large := [need for need in whole if need.amount > need.counter.limit]:
            raise refusal(too_large, self._clock())

    async def _reserve(
        self, reservation: Reservation, account: Account, needs: Sequence[Need]
    ) -> Reservation:
        try:
            missing = self._take(reservation, needs)
            if missing and account.asking is not None:
                # The response may include enough for this request as well.
                await asyncio.wait([account.asking])
                missing = self._take(reservation, missing)
            if missing:
                await self._ask(reservation, account, missing)
        except BaseException:
            reservation.cancel()
            raise
        return reservation

    def _take(self, reservation: Reservation, needs: Sequence[Need]) -> list[Need]:
        """Takes amounts from leases. Returns the needs that only Redis can grant."""
        now_s, missing = self._clock(), []
        for need in needs:
            period = need.counter.take(need.amount, now_s)
            if period is None:
                missing.append(need)
            else:
                reservation.note(need, period)
        if hopeless := [need for need in missing if need.counter.is_blocked(need.amount, now_s)]:
            raise refusal(hopeless, now_s)
        return missing

    async def _ask(
        self, reservation: Reservation, account: Account, missing: Sequence[Need]
    ) -> None:
        """Asks Redis for all missing amounts at once.

        If Redis does not respond, takes them locally.
        """
        sent_s = self._clock()
        asks = [counter.ask(amount, sent_s) for counter, amount in missing]
        asking = account.asking = asyncio.get_running_loop().create_future()
        taking = asyncio.create_task(self.store.take(asks))
        self._takings.add(taking)
        taking.add_done_callback(self._takings.discard)
        try:
            answers = await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._leave_behind(taking, missing, asks, sent_s)
            raise
        except BaseException as error:
            self._abandon(error, missing, asks)
            if not isinstance(error, Unavailable):
                raise
            self._take_alone(reservation, missing)
            return
        finally:
            asking.set_result(None)
            if account.asking is asking:
                account.asking = None
        for (counter, amount), ask, answer in zip(missing, asks, answers, strict=True):
            counter.accept(ask, answer, sent_s, need=amount)
        self.touch(counter for counter, _ in missing)
        self._warn(account, missing, answers)
        refused = [need for need, answer in zip(missing, answers, strict=True) if not answer.fits]
        if refused:
            raise refusal(refused, self._clock())
        for need, answer in zip(missing, answers, strict=True):
            reservation.note(need, answer.period)

    def _warn(self, account: Account, needs: Sequence[Need], answers: Sequence[Answer]) -> None:
        """Warns the tenant about budgets whose spending has reached one of the shares."""
        for (counter, amount), answer in zip(needs, answers, strict=True):
            if self._warnings is not None and isinstance(counter, MonthCounter):
                is_refused = not answer.fits and counter.is_spent(amount)
                self._warnings.check(counter, account.plan, account.tenant, is_refused=is_refused)

    def _leave_behind(
        self,
        taking: asyncio.Task[list[Answer]],
        missing: Sequence[Need],
        asks: Sequence[Ask],
        sent_s: float,
    ) -> None:
        """Handles a canceled request: if Redis grants the amounts anyway, returns them."""
        late = list[tuple[Need, Ask]]()
        for need, ask in zip(missing, asks, strict=True):
            if ask.kind == "slots":  # the next ask contains the number needed
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
        """Returns amounts that Redis granted to a request that was canceled while it waited."""
        error = None if taking.cancelled() else taking.exception()
        if taking.cancelled() or error is not None:
            self._abandon(error, [need for need, _ in late], [ask for _, ask in late])
            return
        answers = dict(zip((ask.key for ask in asks), taking.result(), strict=True))
        for (counter, amount), ask in late:
            counter.accept(ask, answers[ask.key], sent_s, need=amount)
            if answers[ask.key].granted:
                counter.give_back(amount, answers[ask.key].period, self._clock())
        self.touch(need.counter for need, _ in late)

    def _abandon(
        self, error: BaseException | None, needs: Sequence[Need], asks: Sequence[Ask]
    ) -> None:
        """Records that Redis did not respond.

        Amounts that Redis may have counted are resolved later.
        """
        is_lost = isinstance(error, AnswerLost)
        for (counter, amount), ask in zip(needs, asks, strict=True):
            counter.abandon(ask, amount, is_lost=is_lost)
        if isinstance(error, AnswerLost):
            counters = [need.counter for need in needs]
            self._note_lost(error.call, list(zip(counters, asks, strict=True)))

    def _note_lost(self, call: int, asks: Sequence[tuple[Counter, Ask]]) -> None:
        """Records a call that Redis may have counted. The next ask counts slots again."""
        if lost := [(counter, ask) for counter, ask in asks if ask.kind != "slots"]:
            self._lost[call] = lost
            self._is_touched.set()
        else:
            self.store.forget(call)
        while len(self._lost) > MAX_LOST:
            oldest = next(iter(self._lost))
            del self._lost[oldest]
            self.store.forget(oldest)

    async def _resolve(self) -> None:
        """Determines which amounts were counted for calls whose responses were lost.

        Raises:
            Unavailable: Redis did not respond. The remaining calls are resolved next time.
        """
        while self._lost:
            calls = list(itertools.islice(self._lost, MAX_ASKS))
            await asyncio.gather(*(self._resolve_call(call) for call in calls))

    async def _resolve_call(self, call: int) -> None:
        lost_asks = self._lost.pop(call, None)
        if lost_asks is None:
            return
        try:
            answers = await self.store.resolve(call, [ask for _, ask in lost_asks])
        except BaseException:
            self._lost[call] = lost_asks
            raise
        for (counter, ask), answer in zip(lost_asks, answers, strict=True):
            counter.resolve(ask, answer, self._clock())
        self.touch(counter for counter, _ in lost_asks)

    def _take_alone(self, reservation: Reservation, missing: Sequence[Need]) -> None:
        now_s = self._clock()
        for need in missing:
            counter = need.counter
            period = counter.take_alone(need.amount, now_s, self._standing)
            if period is None and isinstance(counter, MonthCounter) and not counter.may_spend_alone:
                reason = f"{counter.subject} can't be checked now. Try again later."
                raise Unavailable(reason, public=reason)
            if period is None:
                raise refusal([need], now_s)
            reservation.note(need, period)
        self.touch(counter for counter, _ in missing)  # Redis is notified as soon as it is back up

    async def settle_hold(
        self, record_id: str, takings: Sequence[Taking], used: RequestDemand | None
    ) -> None:
        """Settles a prediction's reservations exactly once, no matter which instance created it.

        Args:
            used: actual usage. If None, the usage is unknown, so the reserved amounts are counted.
        """
        asks = (
            []
            if used is None
            else [taking.build_settlement(used.amount(taking.unit)) for taking in takings]
        )
        sent_s = self._clock()
        answers = await self.store.settle(record_id, asks)
        for ask, answer in zip(asks, answers, strict=True):
            self._accounts.note(ask, answer, sent_s)
            self.wake_next(ask.key)

    def settle_operation(self, asks: Sequence[tuple[Counter, Ask]]) -> None:
        """Reports an operation's usage to Redis, now or as soon as Redis is reachable.

        Args:
            asks: the operation's budgets, each with an ask that has no need.
        """
        settling = asyncio.create_task(self._settle_operation(asks))
        self._takings.add(settling)
        settling.add_done_callback(self._takings.discard)

    async def _settle_operation(self, settled_asks: Sequence[tuple[Counter, Ask]]) -> list[Answer]:
        asks, sent_s = [ask for _, ask in settled_asks], self._clock()
        try:
            answers = await self.store.take(asks)
        except AnswerLost as error:
            self._note_lost(error.call, settled_asks)
            return []
        for (counter, ask), answer in zip(settled_asks, answers, strict=True):
            counter.accept(ask, answer, sent_s, need=0)
        return answers

    async def end_operations(self, group: str) -> None:
        """Marks a group's operations as finished, so that Redis can forget them."""
        with contextlib.suppress(Unavailable):
            await self.store.end_group(group)

    def touch(self, counters: Iterable[Counter]) -> None:
        """Marks counters that may have amounts to return soon."""
        self._touched_counters.update(dict.fromkeys(counters))
        self._is_touched.set()

    async def wait_released(self, account: Account, limit_s: float) -> bool:
        """Waits for a request that reserved part of one of the account's budgets to finish.

        Each finished request wakes one waiter, and `wake_all_next` wakes the next. Requests on
        other instances do not wake waiters, so try again when the time is up.

        Args:
            account: the account under which the request was rejected.
            limit_s: maximum seconds to wait.

        Returns:
            True if a request on this instance finished.
        """
        woken = asyncio.get_running_loop().create_future()
        keys = [counter.key for counter in account.counters if isinstance(counter, MonthCounter)]
        for key in keys:
            self._waiting.setdefault(key, deque()).append(woken)
        try:
            async with asyncio.timeout(limit_s):
                await woken
        except TimeoutError:
            return False
        finally:
            for key in keys:
                waiters = deque(
                    waiter for waiter in self._waiting.pop(key, ()) if waiter is not woken
                )
                if waiters:
                    self._waiting[key] = waiters
        return True

    def wake_next(self, key: str) -> None:
        """Wakes the request that has waited longest for the budget counted under this key."""
        queue = self._waiting.get(key)
        while queue:
            woken = queue.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def wake_all_next(self, account: Account) -> None:
        """Wakes each budget's next waiter, because the admitted request may have left room."""
        for counter in account.counters:
            self.wake_next(counter.key)

    def give_back_to(self, counter: Counter, amount: float, period: float) -> None:
        """Returns a reservation's unused amount to its limit."""
        counter.give_back(amount, period, self._clock())

    async def register(self) -> None:
        """Registers this instance, and reads the number of instances and the amounts spent."""
        self._standing = await self.store.register()
        sent_s = self._clock()
        totals = await self.store.totals(self._totals_since_ms)
        self._accounts.learn(totals, sent_s)
        self._totals_since_ms = totals.at_ms - TOTALS_OVERLAP_MS

    async def give_back(self, now_s: float) -> None:
        """Returns amounts not needed at `now_s` to Redis, and renews slots.

        Raises:
            Unavailable: Redis did not respond. The amounts are kept for the next attempt.
        """
        await self._resolve()
        self._touched_counters = dict.fromkeys(
            counter for counter in self._touched_counters if not counter.is_idle
        )
        due = [counter for counter in self._touched_counters if counter.is_due(now_s)]
        for start in range(0, len(due), MAX_ASKS):
            part = due[start : start + MAX_ASKS]
            sent_s = self._clock()
            asks = [counter.ask(0, sent_s) for counter in part]
            try:
                answers = await self.store.take(asks)
            except Unavailable as error:
                self._abandon(error, [Need(counter, 0) for counter in part], asks)
                raise
            for counter, ask, answer in zip(part, asks, answers, strict=True):
                counter.accept(ask, answer, sent_s, need=0)

    async def _keep(self) -> None:
        """Registers this instance, returns the rest of expired leases, and forgets idle callers."""
        registered_s = -math.inf
        while True:
            with contextlib.suppress(Unavailable):
                now_s = self._clock()
                if now_s >= registered_s + REGISTER_S:
                    registered_s = now_s
                    self._accounts.forget(now_s - IDLE_S)
                    await self.register()
                await self.give_back(self._clock())
            if not self._touched_counters and not self._lost:
                self._is_touched.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REGISTER_S):
                    await self._is_touched.wait()
            await asyncio.sleep(LEASE_S)


class Reservation:
    """The amounts one request has taken. Settled or canceled exactly once, when the request ends.

    Args:
        before: amounts taken by the request's preparation. They remain counted no matter how the
            reservation ends.
    """

    def __init__(self, limiter: Limiter, before: Reservation | None = None) -> None:
        self._limiter = limiter
        needs_taken = () if before is None else before._needs_taken
        self._before = {need.counter: (need.amount, period) for need, period in needs_taken}
        self._needs_taken: list[tuple[Need, float]] = []
        self._handed_over: list[tuple[Need, float]] = []

    def missing_of(self, counter: Counter, demand: RequestDemand) -> Need | None:
        """Returns the amount still to be taken from a limit.

        None if the preparation took enough.
        """
        amount, period = self._before.get(counter, (0.0, 0.0))
        missing = demand.of(counter) - amount
        if amount and missing <= 0:
            self.note(Need(counter, 0), period)
            return None
        return Need(counter, missing)

    def _measure_excess(self, counter: Counter, used: RequestDemand) -> float:
        """Returns how much of `used` exceeds the amount taken by the preparation."""
        amount, _ = self._before.get(counter, (0.0, 0.0))
        return max(0.0, used.of(counter) - amount)

    def note(self, need: Need, period: float) -> None:
        """Records the amount taken from one limit, and its period."""
        self._needs_taken.append((need, period))
        need.counter.hold(need.amount, period)

    def settle(self, used: RequestDemand, operation: str = "") -> None:
        """Ends the reservation with the actual usage. Nothing remains in flight.

        Args:
            operation: GROUP/NAME of a request that another process may repeat if this one dies. The
                request's budgets count it only once. Empty if the request is never repeated.
        """
        budgets = list[tuple[Counter, Ask]]()
        for (counter, amount), period in self._needs_taken:
            if operation and isinstance(counter, MonthCounter):
                ask = counter.settling(amount, period, used.of(counter), operation)
                budgets.append((counter, ask))
                continue
            surplus = amount - (
                0 if counter.unit == "items" else self._measure_excess(counter, used)
            )
            if surplus:
                self._limiter.give_back_to(counter, surplus, period)
        if budgets:
            self._limiter.settle_operation(budgets)
        self._end()

    def takings(self) -> list[Taking]:
        """Returns the amounts taken from limits, so that another instance can settle them."""
        return [
            Taking(
                counter.kind,
                counter.key,
                counter.unit,
                counter.limit,
                amount,
                period,
                counter.month if isinstance(counter, MonthCounter) else 0,
                self._limiter.store.process if period == ALONE else "",
                self._before.get(counter, (0.0, 0.0))[0],
            )
            for (counter, amount), period in self._needs_taken
            if counter.unit != "items"
        ]

    def hand_over(self) -> None:
        """Leaves the amounts for whichever instance settles the hold. Only items in flight remain.

        Amounts that are handed over may still be returned, so they are not spent.
        """
        self._handed_over += [pair for pair in self._needs_taken if pair[0].counter.unit != "items"]
        self._needs_taken = [pair for pair in self._needs_taken if pair[0].counter.unit == "items"]

    def cancel(self) -> None:
        """Ends a rejected request's reservation without counting anything."""
        for (counter, amount), period in self._needs_taken:
            self._limiter.give_back_to(counter, amount, period)
        self._end()

    def leave(self, *, is_charged: bool) -> None:
        """Ends the reservation with unknown usage, so the reserved amounts are counted.

        Nothing remains in flight here.

        Args:
            is_charged: True if the budget pays for the request, False if the caller hung up.
        """
        for (counter, amount), period in self._needs_taken:
            if counter.unit == "items" or (counter.unit == "usd" and not is_charged):
                self._limiter.give_back_to(counter, amount, period)
        self._end()

    def _end(self) -> None:
        ended = self._needs_taken + self._handed_over
        for (counter, amount), period in ended:
            counter.release(amount, period)
            self._limiter.wake_next(counter.key)
        self._limiter.touch(need.counter for need, _ in ended)
        self._needs_taken, self._handed_over = [], []


async def open_limiter(
    stack: AsyncExitStack, redis_url: str, publisher: Publisher, instance: str, *, instances: int
) -> Limiter:
    """Opens a limiter, which `stack` closes.

    Args:
        redis_url: URL of the Redis server in which all instances count.
        publisher: sends warnings. It must outlive the limiter.
        instances: number of instances to assume until Redis reports the number. 0 means only this
            instance.
    """
    store = LimitStore(redis_url, instance)
    warnings = BudgetWarnings(store, publisher)
    limiter = Limiter(store, warnings, instances=max(1, instances))
    await stack.enter_async_context(limiter)
    await stack.enter_async_context(warnings)
    return limiter
