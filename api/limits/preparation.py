"""Counts the work that is done for a request before its inputs are known.

Fetching, decoding and cutting come before a request can be weighed, and may end it. So a request
takes its place in the limits of a minute before that work begins. If the request goes on, what it
took is a part of what it reserves (api/limits/limited_request.py). If the work ends it, what it
took stays counted: nothing has to be told later, so the death of an instance changes nothing.
"""

from __future__ import annotations

import asyncio

from api.limits.counters import month_of
from api.limits.limiter import Limiter, RequestDemand, Reservation
from shared.catalog import Model
from shared.tenants.plan import Caller


class Preparation:
    """The preparation of one request. Callers without limits count nothing.

    Args:
        caller: the sender of the request.
        model: the model that the request is for.
        headers: the headers of the answer. Those about limits are added.
        received_at_s: when the request arrived, Unix seconds.
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
        """None: no work has begun that counts."""

    async def begin(self, work: float | None = None) -> None:
        """Takes a request and its least work, unless this was called before.

        Call it before each piece of work.

        Args:
            work: in the unit of the model. None: as the smallest item of the model.

        Raises:
            RateLimited: a limit of a minute is reached.
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
