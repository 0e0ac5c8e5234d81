"""Runs a request within its caller's limits and reports the limits in the headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

import msgspec

from api.errors import ClientGone
from api.limits.accounts import Account
from api.limits.counters import month_of
from api.limits.limiter import Limiter, RequestDemand, Taking
from api.limits.preparation import Preparation
from shared.errors import Unavailable
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.models.flow_plan import step_of
from shared.models.tasks import Input
from shared.models.tasks.base import Unit, WorkBound
from shared.money.charge import (
    ItemPrice,
    as_delivered,
    cost_usd,
    count_work,
    list_price_usd,
    price_of,
    step_prices_of,
)
from shared.predictions import Prediction
from shared.tenants.plan import Caller

STOPS_WITHIN_S = 5.0
"""Late or canceled work may still finish within this time, and is charged if its result was read.
"""

Follow: TypeAlias = "Callable[[LimitedRequest, Hold], None]"


class HeldLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prediction's reservations, as stored in its hold in Redis."""

    prediction_id: str
    deadline_s: float
    """Unix time after which no more work is done on the prediction."""
    unit: Unit
    price: ItemPrice
    takings: list[Taking]
    step_prices: list[ItemPrice] = []
    """For a flow, each step's pricing terms."""

    def count_unreported(self) -> RequestDemand:
        """Returns the usage to count if a worker took the prediction but never reported back.

        The reserved work is counted, but it costs nothing because nothing was delivered.
        """
        work = max(
            (taking.amount for taking in self.takings if taking.unit == self.unit), default=0.0
        )
        return RequestDemand(self.unit, items=0, work=work, cost_usd=0.0)


@dataclass(slots=True)
class Hold:
    """A prediction's reservations, and whether Redis has them."""

    record_id: str
    limits: HeldLimits
    is_stored: bool | None = False
    """None if unknown because Redis did not respond."""

    @property
    def data(self) -> bytes:
        return msgspec.json.encode(self.limits)


class LimitedRequest:
    """A context in which a request runs.

    Entering the context reserves the request's estimated usage.

    For a budget, it reserves the maximum that the request can cost.

    - `settle` sets the actual usage.
    - `hold` is for work that outlives the context, such as a prediction. Redis stores the
      reservations with the record, and any instance can settle them.
    - If the caller hangs up before that, the estimate is counted. Only the budget part is returned,
      because callers who hang up are not charged for the work.
    - Any other error means that the request was not accepted, so nothing is counted.

    Does nothing for callers without limits.

    Args:
        model: the model that runs the request.
        headers: response headers. The rate-limit headers are added here.
        received_at_s: Unix time at which the request arrived. Its rows use this time.
        longest_s: maximum compute time in seconds. None means the model's maximum.
        price_share: fraction of the list price that the request pays.
        preparation: amounts taken by the request's preparation. None if there was no preparation.
        operation: GROUP/NAME, which stays the same each time this request is repeated after a
            process dies. Budgets count it once. Empty if the request is never repeated.
    """

    def __init__(
        self,
        limiter: Limiter,
        caller: Caller,
        model: Model,
        inputs: Sequence[Input],
        headers: dict[str, str],
        *,
        received_at_s: float,
        longest_s: float | None = None,
        price_share: float = 1.0,
        preparation: Preparation | None = None,
        operation: str = "",
    ) -> None:
        self._preparation = preparation
        self._operation = operation
        self._limiter = limiter
        self._model = model
        self._inputs = inputs
        self._headers = headers
        self._received_at_s = received_at_s
        longest_s = model.deadline.longest_s if longest_s is None else longest_s
        self._longest_s = longest_s + STOPS_WITHIN_S
        self._price_share = price_share
        self._used: RequestDemand | None = None
        self._hold: Hold | None = None
        self._follow: Follow | None = None
        self._account = (
            limiter.account(caller, model.name, model.limited_unit, month_of(received_at_s))
            if caller.is_limited
            else None
        )

    async def __aenter__(self) -> Self:
        """Reserves the estimated usage.

        Raises:
            RateLimited: a limit is reached. BudgetExceeded: the monthly budget is spent.
        """
        if self._account is not None:
            before = None if self._preparation is None else self._preparation.taken
            try:
                self._reservation = await self._limiter.reserve(
                    self._account, self._estimate(self._account), before
                )
            finally:
                self._headers |= self._limiter.headers(self._account)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._account is None:
            return
        if self._hold is not None and self._hold.is_stored is not False:
            await self._hand_over(self._hold)
        elif self._used is not None:
            self._reservation.settle(self._used, self._operation)
        elif isinstance(error, ClientGone):
            self._reservation.leave(is_charged=False)
        else:
            self._reservation.cancel()
        self._headers |= self._limiter.headers(self._account)

    def wake_next(self) -> None:
        """Wakes the next request waiting for the same budgets, because there may be room for it."""
        if self._account is not None:
            self._limiter.wake_all_next(self._account)

    def hold(self, prediction: Prediction, follow: Follow) -> Hold | None:
        """Returns the hold to store with a prediction's record, or None if there are no limits.

        Args:
            follow: called when the context exits if the prediction continues, or if it is unknown
                whether the prediction was created.
        """
        if self._account is None:
            return None
        held_limits = HeldLimits(
            prediction_id=prediction.id,
            deadline_s=prediction.deadline_s,
            unit=self._model.limited_unit,
            price=price_of(self._model, self._received_at_s, self._price_share),
            takings=self._reservation.takings(),
            step_prices=self._step_prices(),
        )
        self._hold = Hold(prediction.record, held_limits)
        self._follow = follow
        return self._hold

    def end(self) -> None:
        """Ends the hold after the context exits.

        Nothing remains in flight, and Redis has the remaining amounts.
        """
        self._reservation.hand_over()
        self._reservation.cancel()

    def hand_over(self) -> None:
        """Leaves the amounts to whichever instance settles the hold. The items remain in flight."""
        self._reservation.hand_over()

    def cancel(self) -> None:
        """Ends the hold without counting, because the prediction was not created."""
        self._reservation.cancel()

    async def _hand_over(self, hold: Hold) -> None:
        if hold.is_stored:
            self.hand_over()
            if self._used is not None:
                self.end()
                # Another instance settles it if Redis does not respond now.
                with suppress(Unavailable):
                    await self._limiter.settle_hold(hold.record_id, hold.limits.takings, self._used)
                return
        if self._follow is not None:
            self._follow(self, hold)

    def settle(
        self, price: ItemPrice, outcomes: Sequence[ItemOutcome], *, is_delivered: bool = True
    ) -> None:
        """Records the items' outcomes. Work and cost are counted as charged.

        Work for an undelivered response is counted, but costs nothing.

        Args:
            price: the items' terms.
            is_delivered: True if the outcomes were delivered to the caller.
        """
        if self._account is not None:
            charged = as_delivered(outcomes, is_delivered=is_delivered)
            unit = self._model.limited_unit
            self._used = sum_usage(price, unit, outcomes, charged, self._step_prices())

    def _step_prices(self) -> list[ItemPrice]:
        return list(step_prices_of(self._model, self._received_at_s, self._price_share))

    def _estimate(self, account: Account) -> RequestDemand:
        """Returns the estimated work and the maximum cost."""
        unit = self._model.limited_unit
        work, usd = 0, 0.0
        if account.counts_work:
            work = sum(
                task_input.estimate_work(self._model.requested) for task_input in self._inputs
            )
        if account.has_budget:
            price = price_of(self._model, self._received_at_s, self._price_share)
            bounds = (task_input.bound_work(self._model) for task_input in self._inputs)
            usd = sum(highest_cost_usd(price, unit, bound, self._longest_s) for bound in bounds)
            usd += self._highest_cost_of_steps_usd()
        return RequestDemand(unit, items=len(self._inputs), work=work, cost_usd=usd)

    def _highest_cost_of_steps_usd(self) -> float:
        """Returns the maximum cost of a flow's steps if each has as many items as possible."""
        steps = zip(self._model.find_bounds(self._inputs), self._step_prices(), strict=True)
        return sum(
            highest_cost_usd(price, model.definition.unit, bound, self._longest_s)
            for (model, bounds), price in steps
            for bound in bounds
        )


class RecoveredRequest(LimitedRequest):
    """A context for a request whose result was computed by another process.

    It reserves nothing and is never rejected. `settle` counts delivered results, even if they
    exceed a budget. It requires an operation and the time the request was received.
    """

    async def __aenter__(self) -> Self:
        if self._account is not None:
            self._reservation = self._limiter.reserve_nothing(self._account)
        return self


def sum_usage(
    price: ItemPrice,
    unit: Unit,
    outcomes: Sequence[ItemOutcome],
    charged: Sequence[ItemOutcome] | None = None,
    step_prices: Sequence[ItemPrice] = (),
) -> RequestDemand:
    """Returns the items' usage that counts toward limits, including their charge.

    Args:
        price: the items' terms.
        charged: the outcomes as delivered. None means they are the same as `outcomes`.
        step_prices: for a flow, each step's pricing terms. The items then belong to the steps.
    """
    delivered = outcomes if charged is None else charged
    if step_prices:
        priced = [(step_prices[step_of(outcome.index)], outcome) for outcome in delivered]
        if unit == "work":  # a flow's models use different units, so each item counts as one unit
            work = float(sum(_is_computed(outcome) for outcome in outcomes))
        else:  # for image requests, count only the work for items to draw
            own = [(step_prices[0], outcome) for outcome in outcomes if step_of(outcome.index) == 0]
            work = sum(count_work(terms, outcome) for terms, outcome in own)
    else:
        priced = [(price, outcome) for outcome in delivered]
        work = sum(count_work(price, outcome) for outcome in outcomes)
    usd = sum(cost_usd(terms, outcome) for terms, outcome in priced)
    return RequestDemand(unit, items=len(outcomes), work=work, cost_usd=usd)


def _is_computed(outcome: ItemOutcome) -> bool:
    return outcome.status == "succeeded" or bool(outcome.receipt.spent_work)


def highest_cost_usd(
    price: ItemPrice, unit: Unit, bound: WorkBound, longest_s: float = 0.0
) -> float:
    """Returns the maximum charge for an item.

    Args:
        bound: maximum work for the item.
        longest_s: maximum compute time in seconds.
    """
    read = bound.work - bound.output_tokens if unit == "tokens" else 0
    return price.price_share * max(
        list_price_usd(
            price,
            **{unit: bound.work},
            output_tokens=bound.output_tokens,
            cached_tokens=cached_tokens,
            compute_s=longest_s,
        )
        for cached_tokens in (0, read)
    )
