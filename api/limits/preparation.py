"""Counts work done for a request before its inputs are known.

Inputs must be fetched, decoded, and split before a request's size is known, and any of these steps
may fail. For this reason, a request takes amounts from the per-minute limits before the preparation
starts. If the request continues, those amounts become part of its reservation
(api/limits/limited_request.py). If the preparation fails, the amounts remain counted. Nothing needs
to be reported later, so it does not matter if the instance dies.
"""

from __future__ import annotations

import asyncio

from api.limits.counters import month_of
from api.limits.limiter import Limiter, RequestDemand, Reservation
from shared.models.catalog import Model
from shared.tenants.plan import Caller


class Preparation:
    """One request's preparation. Counts nothing for callers without limits.

    Args:
        model: the model the request is for.
        headers: response headers. The rate-limit headers are added here.
        received_at_s: Unix time at which the request arrived.
    """

    def __init__(
        self,
        limiter: Limiter,
        caller: Caller,
        model: Model,
        headers: dict[str, str],
        *,
        received_at_s: float,
    ) -> None:
        self._limiter = limiter
        self._model = model
        self._headers = headers
        self._account = (
            limiter.account(caller, model.name, model.limited_unit, month_of(received_at_s))
            if caller.is_limited
            else None
        )
        self._lock = asyncio.Lock()
        self.taken: Reservation | None = None
        """None if no countable work has started."""

    async def begin(self, work: float | None = None) -> None:
        """Takes one request and its minimum work from the limits, unless already taken.

        Call this before each piece of work.

        Args:
            work: work in the model's unit. None means the work for the model's smallest item.

        Raises:
            RateLimited: a per-minute limit is reached.
        """
        if self._account is None:
            return
        async with self._lock:
            if self.taken is None:
                least = self._model.definition.least_work(self._model) if work is None else work
                unit = self._model.limited_unit
                demand = RequestDemand(unit, items=0, work=least, cost_usd=0.0)
                try:
                    self.taken = await self._limiter.reserve_rates(self._account, demand)
                finally:
                    self._headers |= self._limiter.headers(self._account)
