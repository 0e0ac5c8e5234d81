"""The state of each limit in this instance, including amounts leased for upcoming requests.

Plain data without I/O. If a limit is far from full and requests are arriving rapidly, an instance
takes slightly more of the limit than a request needs: a lease. For LEASE_S, requests use the lease
without a round trip to Redis. The rest is then returned. An amount that was taken but not needed
goes into the lease, or back to the period in which it was taken. Items in flight hold slots.

While Redis is unreachable, each instance admits its share of the limit: the limit divided by the
number of registered instances, so together they never exceed the limit. For a budget, each instance
admits a share of the remaining amount. If the remaining amount is unknown, the plan decides whether
requests are admitted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from datetime import UTC, datetime
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

Kind: TypeAlias = Literal["window", "month", "slots"]
SLOTS_S = 30
"""How long before a dead instance's slots and registrations are freed."""
LEASE_S = 0.25
"""See LEASE_BUCKETS in take.lua: a window includes amounts taken in it that are still usable."""
BLOCK_S = 0.25
"""How long a rejection is repeated without querying Redis again."""
RECENT_S = 1.0
"""A new lease is taken if the last one ended less than this long ago."""
MINUTE_S = 60.0
ROUNDING_USD = 1e-9
"""Tolerance for sums of doubles, as in take.lua."""
ALONE = -1.0
"""The period recorded for amounts taken while Redis was unreachable."""


class Ask(msgspec.Struct, frozen=True):
    """An instance's request to a single limit."""

    key: str
    kind: Kind
    limit: float
    need: float
    """The amount to take. 0 means to only return amounts. For slots: the total number to hold."""
    extra: float = 0.0
    """An additional amount, if the limit is far from full."""
    returns: list[tuple[float, float]] = []
    """Periods, and the unused amounts taken in them. Negative amounts are additional usage."""
    held: float = -1.0
    """For a budget: the part of the used amount that this instance may return, including `need`.

    Negative means unchanged since the last report.
    """
    month: float = 0
    """For a budget: the month in which the request arrived. 0 means the current month."""
    operation: str = ""
    """GROUP/NAME of work that another process would restart.

    All of the work's reservations are returned.
    """
    used: float = 0.0
    """Amount the operation used, no matter how many times it was started."""
    owner: str = ""
    """The process that took `returns` without Redis. Empty for this process."""


class Answer(msgspec.Struct, frozen=True):
    """The result of a single ask. If one of several asks does not fit, none are granted."""

    granted: float
    used: float
    """Amount used by all instances in the current window or month."""
    period: float
    fits: bool
    retry_ms: float
    """Milliseconds until there is room for `need`. For a month, 0 means as soon as enough of `held`
    is returned.
    """
    reset_ms: float
    """Milliseconds until nothing counts as used."""
    held: float = 0.0
    """For a month: the part of `used` that instances may still return. The rest is spent."""


class Standing(NamedTuple):
    """An instance's position among all registered instances."""

    rank: int
    instances: int


class Counter(ABC):
    """One limit, as known to this instance.

    Args:
        key: counter name, which is also used in Redis.
        unit: what is counted: requests, tokens, pixel_steps, work, items, or usd.
        subject: what is limited, as described to callers.
    """

    kind: ClassVar[Kind]

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        self.key = key
        self.limit = limit
        self.unit = unit
        self.subject = subject
        self.used = 0.0
        """Amount used by all instances as of the last Redis response."""
        self.touched_s = 0.0
        self._reset_at_s = 0.0
        self._blocked_need = math.inf
        self._blocked_until_s = 0.0
        self._room_at_s = 0.0

    @abstractmethod
    def take(self, need: float, now_s: float) -> float | None:
        """Takes `need` from the amount held by this instance.

        Returns the amount's period, or None if Redis must decide.
        """

    @abstractmethod
    def take_alone(self, need: float, now_s: float, standing: Standing) -> float | None:
        """Takes `need` while Redis is unreachable.

        Returns the amount's period, or None if `need` is too large.
        """

    @abstractmethod
    def give_back(self, amount: float, period: float, now_s: float) -> None:
        """Returns an unused amount that was taken in `period`.

        A negative amount is additional usage.
        """

    @abstractmethod
    def ask(self, need: float, now_s: float) -> Ask:
        """Returns the ask to send to Redis for a request with this need.

        A need of 0 only returns amounts.
        """

    @abstractmethod
    def accept(self, ask: Ask, answer: Answer, sent_s: float, *, need: float) -> None:
        """Records the amount that Redis granted for `ask`, sent at `sent_s` for `need`.

        A grant covers the need. If another limit rejected the request, nothing is granted.
        """

    @abstractmethod
    def abandon(self, ask: Ask, need: float, *, is_lost: bool = False) -> None:
        """Records that Redis did not respond.

        If the response was lost, `resolve` is called later.
        """

    def resolve(self, ask: Ask, answer: Answer, now_s: float) -> None:
        """Returns the amount granted for an ask whose response was lost.

        Args:
            answer: the amount that Redis had already counted or has now counted.
        """
        if answer.granted:
            self.give_back(answer.granted, answer.period, now_s)

    def hold(self, amount: float, period: float) -> None:  # noqa: B027  most limits don't care
        """Records that an unfinished request has reserved `amount` in `period`."""

    def release(self, amount: float, period: float) -> None:  # noqa: B027  nor here
        """Records that this request is finished. The unused part has already been returned."""

    @abstractmethod
    def is_due(self, now_s: float) -> bool:
        """Returns whether an amount should be returned now."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Returns whether this object can be dropped without losing anything."""

    def retry_after_s(self, now_s: float) -> float:
        """Returns the seconds until there is room for the amount that was last rejected."""
        return max(0.0, self._room_at_s - now_s)

    def reset_s(self, now_s: float) -> float:
        """Returns the seconds until nothing counts as used, assuming no further requests."""
        return max(0.0, self._reset_at_s - now_s)

    @property
    def remaining(self) -> float:
        """Returns how much of the limit remains, as far as this instance knows."""
        return max(0.0, self.limit - self.used)

    def is_blocked(self, need: float, now_s: float) -> bool:
        """Returns whether Redis has just rejected this need."""
        return need >= self._blocked_need and now_s < self._blocked_until_s

    def _note(self, ask: Ask, answer: Answer, sent_s: float) -> None:
        self.used, self.touched_s = answer.used, sent_s
        self._reset_at_s = sent_s + answer.reset_ms / 1000
        self._blocked_need = math.inf
        if not answer.fits:
            retry_s = answer.retry_ms / 1000
            self._blocked_need = ask.need
            self._blocked_until_s = sent_s + min(retry_s or BLOCK_S, BLOCK_S)
            self._room_at_s = sent_s + retry_s


class LeasedCounter(Counter):
    """A limit on the units consumed within a period."""

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        super().__init__(key, limit, unit, subject)
        self._left = 0.0
        self._period = 0.0
        self._ends_s = 0.0
        self._spent = 0.0
        """Amount used from the current lease, or from the last lease if it has expired."""
        self._returns: dict[float, float] = {}

    def take(self, need: float, now_s: float) -> float | None:
        """Takes `need` from the lease."""
        if need > self._left or now_s >= self._ends_s:
            return self._period if need <= 0 else None
        self._left -= need
        self._spent += need
        return self._period

    def give_back(self, amount: float, period: float, now_s: float) -> None:
        """Adds the amount to a lease for the same period, or returns it on the next round trip."""
        if period == ALONE:
            self._give_back_alone(amount)
        elif period == self._period and now_s < self._ends_s and amount >= -self._left:
            self._left += amount
            self._spent -= amount
        else:
            self._return(period, amount)

    def ask(self, need: float, now_s: float) -> Ask:
        """Asks for twice the last lease if that lease expired only a moment ago."""
        self._retire()
        is_recent = now_s < self._ends_s + RECENT_S
        extra = 2 * max(self._spent, need) if need and is_recent else 0.0
        returns, self._returns = list(self._returns.items()), {}
        return Ask(self.key, self.kind, self.limit, need, extra, returns)

    def accept(self, ask: Ask, answer: Answer, sent_s: float, *, need: float) -> None:
        """Starts a lease with the amount granted in excess of the need."""
        self._note(ask, answer, sent_s)
        if answer.granted:
            self._retire()
            self._left, self._period = answer.granted - ask.need, answer.period
            self._ends_s, self._spent = sent_s + LEASE_S, ask.need

    def abandon(self, ask: Ask, need: float, *, is_lost: bool = False) -> None:
        """Saves amounts for the next round trip, unless they may already have been returned."""
        for period, amount in () if is_lost else ask.returns:
            self._return(period, amount)

    def is_due(self, now_s: float) -> bool:
        """Returns whether a lease has expired, so that the remainder must be returned."""
        return bool(self._returns) or (self._left > 0 and now_s >= self._ends_s)

    @property
    def is_idle(self) -> bool:
        """Returns whether there is nothing to return."""
        return not self._returns and self._left <= 0

    @property
    def remaining(self) -> float:
        """Returns the remaining amount, including the lease and amounts to return or add."""
        own = self._left + sum(self._returns.values())
        return min(self.limit, max(0.0, self.limit - self.used + own))

    @abstractmethod
    def _give_back_alone(self, amount: float) -> None: ...

    def _retire(self) -> None:
        if self._left > 0:
            self._return(self._period, self._left)
        self._left = 0.0

    def _return(self, period: float, amount: float) -> None:
        self._returns[period] = self._returns.get(period, 0.0) + amount


class WindowCounter(LeasedCounter):
    """A limit per minute."""

    kind = "window"

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        super().__init__(key, limit, unit, subject)
        self._alone: deque[tuple[float, float]] = deque()
        self._alone_used = 0.0

    def take_alone(self, need: float, now_s: float, standing: Standing) -> float | None:
        """Takes up to this instance's share of the limit in any minute."""
        while self._alone and self._alone[0][0] <= now_s - MINUTE_S:
            self._alone_used -= self._alone.popleft()[1]
        room = part_of(self.limit, standing) - self._alone_used
        if need > room:
            self._room_at_s = (self._alone[0][0] if self._alone else now_s) + MINUTE_S
            return None
        if need > 0:
            self._alone.append((now_s, need))
            self._alone_used += need
        self.used, self._reset_at_s = self.limit - room + need, now_s + MINUTE_S
        return ALONE

    @property
    def is_idle(self) -> bool:
        """Returns whether there is nothing to return and nothing was used without Redis."""
        return super().is_idle and not self._alone

    def _give_back_alone(self, amount: float) -> None:
        """Does nothing, because the time of use within the minute is no longer known."""


class MonthCounter(LeasedCounter):
    """A budget for a calendar month."""

    kind = "month"

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        super().__init__(key, limit, unit, subject)
        self.month = 0.0
        """Month in which the requests arrived, as counted by `month_of`. 0 means the current month
        on Redis's clock.
        """
        self.period = 0.0
        """The month reported by Redis. 0 if not yet known."""
        self.key_id = ""
        """The key to which the budget belongs. Empty for the tenant's budget."""
        self.is_known = False
        """True if Redis has reported the amount used, even if that was 0."""
        self.is_open = False
        """True if the budget may be spent without Redis while the amount used is unknown."""
        self.spent = 0.0
        """Amount spent (not just reserved) by all instances as of the last Redis response."""
        self._reserved = 0.0
        """Amount reserved by this instance's unfinished requests."""
        self._asking = 0.0
        """Maximum amount that unanswered asks may take."""
        self._reported = 0.0
        """The amount this instance may return, as last reported to Redis."""
        self._reported_s = 0.0
        self._telling: list[Ask] = []
        """Amount in unanswered asks that was taken without Redis.

        It is not part of `used` until Redis responds.
        """

    def is_spent(self, amount: float) -> bool:
        """Returns whether `amount` would not fit even if all reservations were returned unused."""
        return amount > self.limit - self.spent + ROUNDING_USD

    def hold(self, amount: float, period: float) -> None:
        """Records a reservation, which may be returned."""
        if period == self.period:
            self._reserved += amount

    def release(self, amount: float, period: float) -> None:
        """Records that the used part will not be returned.

        The unused part may be enough for a rejected request.
        """
        self._blocked_need = math.inf
        if period == self.period:
            self._reserved -= amount
            if self._reserved < ROUNDING_USD:
                self._reserved = 0.0

    def ask(self, need: float, now_s: float) -> Ask:
        """Asks for the month in which the request arrived, because its rows belong to that month.

        Also reports the amount that may be returned. Asks are handled in order, so the last report
        applies.
        """
        held = self._reserved + self._asking + need
        ask = msgspec.structs.replace(super().ask(need, now_s), month=self.month, held=held)
        self._asking += ask.need + ask.extra
        if _get_alone(ask):
            self._telling.append(ask)
        return ask

    def accept(self, ask: Ask, answer: Answer, sent_s: float, *, need: float) -> None:
        """Also records the month and the amount spent in it."""
        super().accept(ask, answer, sent_s, need=need)
        self._end_asking(ask)
        self._has_told(ask)
        if answer.period != self.period:
            self.period, self._reserved = answer.period, 0.0
        self.is_known = True
        self.spent = answer.used - answer.held
        if ask.held >= 0:
            self._reported, self._reported_s = ask.held - ask.need + answer.granted, sent_s

    def settling(self, amount: float, period: float, used: float, operation: str) -> Ask:
        """Returns the ask that settles an operation that had reserved `amount`."""
        returns = [(period, amount)]
        return Ask(
            self.key,
            self.kind,
            self.limit,
            0,
            returns=returns,
            month=self.month,
            operation=operation,
            used=used,
        )

    def learn(self, used: float, at_s: float) -> None:
        """Records the amount used at `at_s`, unless a more recent amount is known."""
        if at_s >= self.touched_s:
            self.used, self.is_known = used, True

    def abandon(self, ask: Ask, need: float, *, is_lost: bool = False) -> None:
        """On the next round trip, reports the returnable amounts again."""
        super().abandon(ask, need, is_lost=is_lost)
        if not is_lost:
            self._end_asking(ask)
            self._has_told(ask)

    def resolve(self, ask: Ask, answer: Answer, now_s: float) -> None:
        """Also records that Redis now knows about the amounts taken without it."""
        super().resolve(ask, answer, now_s)
        self._end_asking(ask)
        self._has_told(ask)
        if answer.period == self.period:
            self.used = max(self.used, answer.used)

    def _end_asking(self, ask: Ask) -> None:
        self._asking -= ask.need + ask.extra
        if self._asking < ROUNDING_USD:
            self._asking = 0.0

    def _has_told(self, ask: Ask) -> None:
        self._telling = [other for other in self._telling if other is not ask]

    def is_due(self, now_s: float) -> bool:
        """Returns whether to return an amount or report that less than assumed may be returned."""
        if self._reserved and now_s >= self._reported_s + SLOTS_S / 2:
            return True
        is_over = self._reported > self._reserved + self._left + ROUNDING_USD
        return super().is_due(now_s) or (is_over and now_s >= self._ends_s)

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is left to return, now or later, and Redis has been notified."""
        is_known = not self._telling and self._reported < ROUNDING_USD
        return super().is_idle and not self._reserved and is_known

    def take_alone(self, need: float, now_s: float, standing: Standing) -> float | None:
        """Takes up to this instance's share of the remaining amount. Redis is notified afterward.

        Takes nothing if the remaining amount is unknown and the plan does not allow it.
        """
        spent = -self._returns.get(ALONE, 0.0) - sum(map(_get_alone, self._telling))
        available = (self.limit - self.used) / standing.instances - spent
        if need > max(0.0, available) + ROUNDING_USD or not self.may_spend_alone:
            self._room_at_s = now_s
            return None
        self._return(ALONE, -need)
        return ALONE

    @property
    def may_spend_alone(self) -> bool:
        """Returns whether any of the budget may be spent while Redis is unreachable."""
        return self.is_known or self.is_open

    def _give_back_alone(self, amount: float) -> None:
        self._return(ALONE, amount)


def _get_alone(ask: Ask) -> float:
    return dict(ask.returns).get(ALONE, 0.0)


def month_of(at_s: float) -> float:
    """Returns the calendar month (UTC) of a Unix time, in months since January of year 0."""
    at = datetime.fromtimestamp(at_s, UTC)
    return at.year * 12 + at.month - 1


def part_of(limit: float, standing: Standing) -> float:
    """Returns the share that one instance may admit on its own. All shares add up to the limit."""
    part, rest = divmod(limit, standing.instances)
    return part + (1 if standing.rank < rest else 0)


class SlotCounter(Counter):
    """A limit on items in flight. Unused slots are kept for LEASE_S."""

    kind = "slots"

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        super().__init__(key, limit, unit, subject)
        self.in_use = 0.0
        self._held = 0.0
        self._held_until_s = 0.0
        self._spare_since_s = 0.0

    def take(self, need: float, now_s: float) -> float | None:
        """Takes slots held by this instance."""
        if self.in_use + need > self._held or now_s >= self._held_until_s:
            return None
        self.in_use += need
        return 0.0

    def take_alone(self, need: float, now_s: float, standing: Standing) -> float | None:
        """Takes up to this instance's share."""
        if self.in_use + need > part_of(self.limit, standing):
            self._room_at_s = now_s
            return None
        self.in_use += need
        return 0.0

    def give_back(self, amount: float, period: float, now_s: float) -> None:
        self.in_use -= amount
        self._spare_since_s = self.touched_s = now_s

    def ask(self, need: float, now_s: float) -> Ask:
        """Asks for all slots that this instance needs.

        `need` counts as in use until it is rejected.

        Asks are handled in order, so the last response contains the number held.
        """
        self.in_use += need
        extra = max(1.0, self.in_use) if need else 0.0
        return Ask(self.key, self.kind, self.limit, self.in_use, extra)

    def accept(self, ask: Ask, answer: Answer, sent_s: float, *, need: float) -> None:
        """Records how many slots are held: fewer than requested if the request was rejected."""
        self._note(ask, answer, sent_s)
        self._held, self._held_until_s = answer.granted, sent_s + SLOTS_S * 0.9
        self._spare_since_s = sent_s
        if answer.granted < ask.need:
            self.in_use -= need

    def abandon(self, ask: Ask, need: float, *, is_lost: bool = False) -> None:
        """Stops counting `need` as in use.

        Redis may or may not hold the slots, but the next ask contains the total number.
        """
        self.in_use -= need

    def is_due(self, now_s: float) -> bool:
        """Returns whether there are spare slots to return, or slots whose lease must be renewed."""
        if self._held > self.in_use:
            return now_s >= self._spare_since_s + LEASE_S
        return self._held > 0 and now_s >= self._held_until_s - SLOTS_S / 2

    @property
    def is_idle(self) -> bool:
        """Returns whether no slots are held."""
        return not self.in_use and not self._held

    def is_blocked(self, need: float, now_s: float) -> bool:
        """Returns whether Redis has just rejected this number of slots."""
        return super().is_blocked(self.in_use + need, now_s)
