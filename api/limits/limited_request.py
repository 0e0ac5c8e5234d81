"""Runs a request within the limits of its caller, and tells of them in the headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from api.errors import ClientGone
from api.limits.limiter import Limiter, RequestDemand
from shared.catalog import Model
from shared.messages import ItemOutcome
from shared.tasks import Input
from shared.tenants.plan import Caller
from shared.usage.charge import (
    ItemPrice,
    as_delivered,
    charged_work,
    cost_usd,
    list_price_usd,
    price_of,
)


class LimitedRequest:
    """A block in which a request is computed. Entering it reserves what that will probably use.

    - `settle` says what was used.
    - `go_on` says that the work outlives the block. Somebody else ends it then.
    - If the caller hangs up before, it counts as reserved too. Only the budget is given back,
      because such work is not charged.
    - Any other error means that the request was not taken on: nothing counts.

    For callers without limits nothing happens.

    Args:
        limiter: knows the limits.
        caller: who asks.
        model: that computes.
        inputs: what it computes.
        headers: of the answer. Those about limits are added.
        price_share: the part of the list price that it pays.
    """

    def __init__(
        self,
        limiter: Limiter,
        caller: Caller,
        model: Model,
        inputs: Sequence[Input],
        headers: dict[str, str],
        *,
        price_share: float = 1.0,
    ) -> None:
        self._limiter = limiter
        self._model = model
        self._inputs = inputs
        self._headers = headers
        self._price_share = price_share
        self._used: RequestDemand | None = None
        self._follow: Callable[[LimitedRequest], bool] | None = None
        self._account = (
            limiter.account(caller, model.name, model.definition.unit)
            if caller.is_limited
            else None
        )

    async def __aenter__(self) -> Self:
        """Reserves.

        Raises:
            RateLimited: a limit is reached. BudgetExceeded: it is the budget of the month.
        """
        if self._account is not None:
            try:
                self._reservation = await self._limiter.reserve(self._account, self._estimate())
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
        if self._used is not None:
            self._reservation.settle(self._used)
        elif self._follow is not None:
            if not self._follow(self):
                self.leave()
        elif isinstance(error, ClientGone):
            self._reservation.leave(is_charged=False)
        else:
            self._reservation.cancel()
        self._headers |= self._limiter.headers(self._account)

    def go_on(self, follow: Callable[[LimitedRequest], bool]) -> None:
        """Says that the work outlives the block.

        Args:
            follow: called at the end of the block, if it is not settled. Returns whether it will
                call `end` or `leave` later.
        """
        self._follow = follow

    def end(self, price: ItemPrice, outcomes: Sequence[ItemOutcome]) -> None:
        """Settles after the block."""
        self.settle(price, outcomes)
        if self._used is not None:
            self._reservation.settle(self._used)

    def leave(self) -> None:
        """Ends it after the block, as nothing is known: it counts as reserved."""
        if self._account is not None:
            self._reservation.leave(is_charged=True)

    def settle(
        self, price: ItemPrice, outcomes: Sequence[ItemOutcome], *, is_delivered: bool = True
    ) -> None:
        """Says how the items ended. Work and cost count as they are charged.

        Work that was done for an answer that nobody got counts, but costs nothing.

        Args:
            price: their terms.
            outcomes: how they ended.
            is_delivered: whether the caller got them.
        """
        if self._account is not None:
            charged = as_delivered(outcomes, is_delivered=is_delivered)
            self._used = RequestDemand(
                self._model.definition.unit,
                items=len(outcomes),
                work=sum(charged_work(price, outcome) for outcome in outcomes),
                cost_usd=sum(cost_usd(price, outcome) for outcome in charged),
            )

    def _estimate(self) -> RequestDemand:
        unit, work = self._model.definition.unit, 0
        if self._account is not None and self._account.counts_work:
            work = sum(given.estimate_work() for given in self._inputs)
        usd = self._price_share * list_price_usd(price_of(self._model, time.time()), **{unit: work})
        return RequestDemand(unit, items=len(self._inputs), work=work, cost_usd=usd)
