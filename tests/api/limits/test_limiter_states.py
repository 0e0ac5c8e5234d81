"""Requests, completions, waits and outages in any order, checked against a model that tracks every
use.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from api.errors import BudgetExceeded, RateLimited
from api.limits.counters import Answer
from api.limits.limiter import Limiter, RequestDemand, Reservation
from shared.errors import Unavailable
from shared.tenants.plan import Caller, Limits, Plan
from tests.api.limits.clocks import Clock, limiters

INSTANCES = 3
PLAN = Plan(requests_per_min=20, tokens_per_min=200, max_in_flight=7, budget_usd_per_month=0.3)
KEY = Limits(requests_per_min=12)
CALLERS = [
    Caller(tenant="acme", key_id="narrow", plan=PLAN, key_limits=KEY),
    Caller(tenant="acme", key_id="wide", plan=PLAN),
]
USD_PER_TOKEN = 0.0005
WINDOW_S = 60.5


class Use:
    """An admitted request."""

    def __init__(self, at_s: float, caller: Caller, tokens: int, items: int, alone: bool) -> None:
        self.at_s, self.caller, self.items, self.alone = at_s, caller, items, alone
        self.tokens = tokens
        self.is_open = True


class Limited(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock(self.url)
        self.clock._client.flushall()
        self.clock.set(self.clock.now_ms)
        self.opened = limiters(self.url, self.clock, INSTANCES)
        self.instances: list[Limiter] = self.run(self.opened.__aenter__())
        self.takes = [limiter.store.take for limiter in self.instances]
        for _ in range(2):
            for limiter in self.instances:
                self.run(limiter.register())
        self.uses: list[Use] = []
        self.open: list[tuple[Reservation, Use]] = []
        self.is_away = self.was_away = False

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.clock.close()
        self.loop.close()

    @rule(
        instance=st.integers(0, INSTANCES - 1),
        caller=st.sampled_from(CALLERS),
        tokens=st.integers(1, 60),
        items=st.integers(1, 3),
    )
    def ask(self, instance: int, caller: Caller, tokens: int, items: int) -> None:
        limiter = self.instances[instance]
        wanted = RequestDemand("tokens", items=items, work=tokens, cost_usd=tokens * USD_PER_TOKEN)
        account = limiter.account(caller, "mini", "tokens")
        try:
            reservation = self.run(limiter.reserve(account, wanted))
        except RateLimited as error:
            if isinstance(error, BudgetExceeded) and error.is_final and not self.was_away:
                spent = sum(use.tokens for use in self.uses if not use.is_open)
                assert (spent + tokens) * USD_PER_TOKEN > 0.3, "what is reserved is not spent"
            return
        use = Use(self.clock(), caller, tokens, items, self.is_away)
        self.uses.append(use)
        self.open.append((reservation, use))

    @rule(which=st.integers(0, 100), share=st.sampled_from([0.0, 0.3, 1.0]))
    def end(self, which: int, share: float) -> None:
        """The request ends, having used part of its reservation."""
        if self.open:
            reservation, use = self.open.pop(which % len(self.open))
            use.tokens, use.is_open = int(use.tokens * share), False
            cost_usd = use.tokens * USD_PER_TOKEN
            reservation.settle(
                RequestDemand("tokens", items=use.items, work=use.tokens, cost_usd=cost_usd)
            )

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.25, 1.0, 7.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Slots are renewed in the meantime, as the background task would do."""
        while seconds > 0:
            step_s = min(seconds, 7.0)
            self.clock.advance(step_s)
            seconds -= step_s
            if step_s == 7.0:
                for instance in range(INSTANCES):
                    self.give_back(instance)

    def give_back(self, instance: int) -> None:
        if not self.is_away:
            self.run(self.instances[instance].give_back(self.clock()))

    @rule(instance=st.integers(0, INSTANCES - 1))
    def one_gives_back(self, instance: int) -> None:
        self.give_back(instance)

    @rule()
    def lose_or_find_redis(self) -> None:
        """Instances have just exchanged the amounts they spent."""
        if not self.is_away:
            for limiter in self.instances:
                self.run(limiter.register())
        self.is_away, self.was_away = not self.is_away, True
        for limiter, take in zip(self.instances, self.takes, strict=True):
            limiter.store.take = _unavailable if self.is_away else take  # type: ignore[method-assign]

    @invariant()
    def no_minute_has_too_much(self) -> None:
        for caller, limit in ((None, 20), (CALLERS[0], 12)):
            own = [use for use in self.uses if caller is None or use.caller is caller]
            self._check([(use.at_s, 1, use.alone) for use in own], limit)
        self._check([(use.at_s, use.tokens, use.alone) for use in self.uses], 200)

    def _check(self, uses: list[tuple[float, int, bool]], limit: int) -> None:
        for start_s, _, _ in uses:
            within = [use for use in uses if start_s <= use[0] < start_s + 60]
            assert sum(amount for _, amount, alone in within if not alone) <= limit
            assert sum(amount for _, amount, _ in within) <= 2 * limit

    @invariant()
    def not_too_much_is_in_flight(self) -> None:
        in_flight = sum(use.items for use in self.uses if use.is_open)
        assert in_flight <= (2 if self.was_away else 1) * 7

    @invariant()
    def budget_holds(self) -> None:
        spent = sum(use.tokens for use in self.uses) * USD_PER_TOKEN
        assert spent <= 0.3 + 1e-9

    @rule()
    def rest(self) -> None:
        """After a pause in which everything is returned, the limiters admit exactly as many
        requests as the limits allow.
        """
        if self.is_away or self.open:
            return
        self.clock.advance(31.0)
        for limiter in self.instances:
            self.run(limiter.give_back(self.clock() + 1))
        self.clock.advance(WINDOW_S)
        spent = sum(use.tokens for use in self.uses)
        before = len(self.uses)
        self.ask(0, CALLERS[1], 60, 3)
        assert (len(self.uses) > before) == ((spent + 60) * USD_PER_TOKEN <= 0.3 + 1e-9)


async def _unavailable(asks: object) -> list[Answer]:
    raise Unavailable("the test says so")


@pytest.mark.hypothesis
def test_limits_hold_in_any_order(server_url: str) -> None:
    Limited.url = server_url
    run_state_machine_as_test(Limited, settings=settings(stateful_step_count=40))
