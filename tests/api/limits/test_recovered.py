"""Batch lines that another process has already run are counted once, even if a budget is full."""

from __future__ import annotations

import asyncio

import pytest

from api.limits.limited_request import LimitedRequest, RecoveredRequest
from api.limits.limiter import Limiter
from shared.messages import ItemOutcome, Receipt
from shared.models.tasks.embedding import TextInput
from shared.money.charge import price_of
from shared.tenants.plan import Caller, Plan
from tests.api.limits.clocks import Clock, limiters
from tests.api.limits.test_holds import MODEL, RESERVED_USD

pytestmark = pytest.mark.anyio
INPUTS = [TextInput("x" * 20)]
CALLER = Caller(tenant="acme", plan=Plan(budget_usd_per_month=RESERVED_USD))
COST_USD = 0.003
OUTCOMES = [ItemOutcome(0, "succeeded", Receipt("miss", tokens=3))]


async def recover(limiter: Limiter, clock: Clock) -> None:
    async with RecoveredRequest(
        limiter, CALLER, MODEL, INPUTS, {}, received_at_s=clock(), operation="batch:0/1"
    ) as limited:
        limited.settle(price_of(MODEL, clock()), OUTCOMES)


async def used_usd(limiter: Limiter, clock: Clock) -> float:
    """The amount counted in Redis, including reservations."""
    await asyncio.gather(*limiter._takings)
    clock.advance(1.0)
    await limiter.give_back(clock())
    (by_month,) = (await limiter.store.totals(0)).by_key.values()
    return max(by_month.values())


async def test_recovered_line_counts_once_in_a_full_budget(redis_url: str, clock: Clock) -> None:
    async with limiters(redis_url, clock, 2) as (limiter, other):
        async with LimitedRequest(
            other, CALLER, MODEL, INPUTS, {}, received_at_s=clock()
        ) as limited:
            for _ in range(2):
                await recover(limiter, clock)
            assert await used_usd(limiter, clock) == pytest.approx(RESERVED_USD + COST_USD)
            limited.settle(price_of(MODEL, clock()), OUTCOMES)
        assert await used_usd(other, clock) == pytest.approx(2 * COST_USD)
