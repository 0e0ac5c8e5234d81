"""Tenants are warned once a month about each of their budget's thresholds, no matter which
instances notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from api.errors import BudgetExceeded, BudgetReserved
from api.limits import budget_warnings
from api.limits.accounts import LimitStore
from api.limits.budget_warnings import BudgetWarnings
from api.limits.limiter import Limiter, RequestDemand
from shared.broker.transport import WEBHOOKS_TOPIC_ID
from shared.errors import Unavailable
from shared.tenants.plan import Caller, Limits, Plan
from shared.webhooks.event import BudgetEvent, decode_budget_event
from tests.api.limits.clocks import CLOCK, Clock
from tests.limits import REDIS_LIMIT_S

pytestmark = pytest.mark.anyio
PLAN = Plan(budget_usd_per_month=1.0, budget_webhook="https://acme.example/hook")


class Topic:
    """Stores published messages. Rejects messages while `is_away` is true."""

    def __init__(self) -> None:
        self.events: list[BudgetEvent] = []
        self.is_away = False
        self.is_stuck = False
        self.canceled = 0

    async def publish(
        self, topic_id: str, data: bytes, attributes: dict[str, str], **more: object
    ) -> None:
        try:
            await (asyncio.Event().wait() if self.is_stuck else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.canceled += 1
            raise
        if self.is_away:
            raise Unavailable("the test says so")
        assert topic_id == WEBHOOKS_TOPIC_ID
        self.events.append(decode_budget_event(data))


class Fleet:
    """Two instances that share Redis and a topic."""

    def __init__(self, clock: Clock, topic: Topic) -> None:
        self.clock, self.topic = clock, topic
        self.limiters: list[Limiter] = []
        self.warnings: list[BudgetWarnings] = []

    async def spend(self, usd: float, caller: Caller, instance: int = 0) -> None:
        limiter = self.limiters[instance]
        wanted = RequestDemand("tokens", items=1, work=1, cost_usd=usd)
        try:
            reserved = await limiter.reserve(limiter.account(caller, "mini", "tokens"), wanted)
            reserved.settle(wanted)
        finally:
            for warnings in self.warnings:
                await warnings.__aexit__(None, None, None)
            self.clock.advance(5)
            await limiter.give_back(self.clock())


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[Fleet]:
    made = Fleet(Clock(redis_url), Topic())
    async with AsyncExitStack() as opened:
        for name in ("a", "b"):
            store = LimitStore(redis_url, name, clock=CLOCK, timeout_s=REDIS_LIMIT_S)
            await opened.enter_async_context(store)
            made.warnings.append(BudgetWarnings(store, made.topic))  # type: ignore[arg-type]
            made.limiters.append(Limiter(store, made.warnings[-1], clock=made.clock))
        yield made
    made.clock.close()


def told(fleet: Fleet) -> list[tuple[str, float]]:
    return [(event.month, event.share) for event in fleet.topic.events]


async def test_each_share_is_told_once_a_month(fleet: Fleet) -> None:
    caller = Caller(tenant="acme", plan=PLAN)
    for instance in (0, 1, 0, 1, 0, 1, 0):
        await fleet.spend(0.1, caller, instance)
    assert told(fleet) == []
    for instance in (0, 1):
        await fleet.spend(0.1, caller, instance)
    assert told(fleet) == [("2026-11", 0.8)]
    event = fleet.topic.events[0]
    assert (event.tenant, event.key_id, event.url, event.budget_usd) == (
        "acme",
        "",
        PLAN.budget_webhook,
        1.0,
    )
    assert event.spent_usd == pytest.approx(0.8)
    for instance in (0, 1):
        with pytest.raises(BudgetExceeded):
            await fleet.spend(0.2, caller, instance)
    assert told(fleet) == [("2026-11", 0.8), ("2026-11", 1.0)]
    fleet.clock.advance(10 * 86_400)
    await fleet.spend(0.9, caller)
    assert told(fleet)[2:] == [("2026-12", 0.8)]


async def test_budget_that_is_only_reserved_is_not_told_as_spent(fleet: Fleet) -> None:
    caller, limiter = Caller(tenant="acme", plan=PLAN), fleet.limiters[1]
    wanted = RequestDemand("tokens", items=1, work=1, cost_usd=0.7)
    held = await limiter.reserve(limiter.account(caller, "mini", "tokens"), wanted)
    with pytest.raises(BudgetReserved):
        await fleet.spend(0.4, caller)
    assert told(fleet) == []
    held.cancel()
    await limiter.give_back(fleet.clock())
    await fleet.spend(0.4, caller)
    assert told(fleet) == []


async def test_warning_that_was_not_published_is_told_by_the_next(fleet: Fleet) -> None:
    caller = Caller(tenant="acme", plan=PLAN)
    fleet.topic.is_away = True
    await fleet.spend(0.85, caller)
    fleet.topic.is_away = False
    await fleet.spend(0.01, caller, 1)
    assert told(fleet) == [("2026-11", 0.8)]


async def test_budget_of_a_key_has_its_own_warnings(fleet: Fleet) -> None:
    few = Limits(budget_usd_per_month=0.1)
    caller = Caller(tenant="acme", key_id="k1", plan=PLAN, key_limits=few)
    await fleet.spend(0.09, caller)
    assert [(event.key_id, event.budget_usd) for event in fleet.topic.events] == [("k1", 0.1)]


async def test_plan_without_a_webhook_tells_nobody(fleet: Fleet) -> None:
    await fleet.spend(0.99, Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0)))
    assert told(fleet) == []


async def test_closing_cancels_a_warning_that_gets_stuck(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_warnings, "CLOSE_LIMIT_S", 0.2)
    fleet.topic.is_stuck = True
    await fleet.spend(0.85, Caller(tenant="acme", plan=PLAN))
    assert fleet.topic.canceled == 1
