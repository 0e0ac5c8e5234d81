"""Redis counts a call once, even if its response is lost and the call is repeated or arrives again
later.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from api.errors import RateLimited
from api.limits.accounts import LimitStore
from api.limits.counters import Ask
from api.limits.limiter import Limiter, RequestDemand, Reservation
from shared.errors import Unavailable
from shared.tenants.plan import Caller, Plan
from tests.api.limits.clocks import CLOCK, Clock
from tests.faults.links import Links
from tests.limits import REDIS_LIMIT_S

pytestmark = pytest.mark.anyio
LINK = "api"
CALLER = Caller(
    tenant="acme",
    plan=Plan(
        budget_usd_per_month=1.0,
        tokens_per_min=1000,
        max_in_flight=10,
        on_limit_store_outage="allow",
    ),
)
BUDGET = "penstock:limits:month:t:acme:usd"
WINDOW = "penstock:limits:window:t:acme:tokens"


@dataclass
class Setup:
    """An instance whose link to Redis can lose responses."""

    limiter: Limiter
    links: Links
    clock: Clock
    client: Any

    async def reserve(self, usd: float) -> Reservation:
        account = self.limiter.account(CALLER, "m", "tokens")
        return await self.limiter.reserve(account, demand(usd))

    async def give_back(self) -> None:
        """Acts like the background task: a failed call is retried the next time."""
        with suppress(Unavailable):
            await self.limiter.give_back(math.inf)

    async def until_given_back(self) -> None:
        """Retries until Redis has everything, reconnecting if the connection is lost."""
        for _ in range(20):
            await self.give_back()
            await self.limiter.store.wait_up(REDIS_LIMIT_S)

    async def spent_usd(self) -> float:
        return float(await self.client.hget(BUDGET, "used") or 0)

    async def calls(self) -> int:
        """The number of calls that Redis remembers from this instance."""
        [key] = await self.client.keys("penstock:limits:calls:*")
        return int(await self.client.hlen(key)) - 1


def demand(usd: float) -> RequestDemand:
    return RequestDemand("tokens", items=1, work=round(1000 * usd), cost_usd=usd)


@pytest.fixture
def links(redis_url: str) -> Iterator[Links]:
    port = urlsplit(redis_url).port
    assert port is not None
    with Links({LINK: port}) as made:
        yield made


@pytest.fixture
async def setup(redis_url: str, links: Links) -> AsyncIterator[Setup]:
    clock = Clock(redis_url)
    url = f"redis://127.0.0.1:{links.port(LINK)}/0"
    async with (
        LimitStore(url, "a", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as store,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        limiter = Limiter(store, clock=clock)
        await limiter.register()
        await store.take([])  # so that Redis has the script
        yield Setup(limiter, links, clock, client)
    clock.close()


async def test_reservation_whose_answer_was_lost_counts_once(setup: Setup) -> None:
    """The request continues without Redis, which has already counted it."""
    setup.links.lose_answers(LINK)
    reservation = await setup.reserve(0.5)
    assert await setup.spent_usd() == 0.5, "Redis counted it"
    setup.links.heal(LINK)
    reservation.settle(demand(0.2))
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.2, abs=1e-12)
    assert float(await setup.client.hget(WINDOW, "used")) == 0, "used without Redis"
    await setup.reserve(0.8)


async def test_amount_that_came_back_unheard_comes_back_once(setup: Setup) -> None:
    first, other = await setup.reserve(0.5), await setup.reserve(0.4)
    first.settle(demand(0.1))
    setup.links.lose_answers(LINK)
    await setup.give_back()
    assert await setup.spent_usd() == pytest.approx(0.5), "Redis counted it"
    setup.links.heal(LINK)
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.5), "0.1 used and 0.4 reserved"
    assert float(await setup.client.hget(WINDOW, "used")) == 500
    other.settle(demand(0.4))
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.5)


async def test_what_was_spent_without_redis_is_told_once(setup: Setup) -> None:
    """As long as Redis may have counted an amount, that amount is not available to others."""
    await setup.reserve(0.1)
    setup.links.cut(LINK)
    for _ in range(3):
        await setup.reserve(0.1)
    setup.links.heal(LINK)
    assert await setup.limiter.store.wait_up(REDIS_LIMIT_S)
    setup.links.lose_answers(LINK)
    await setup.give_back()
    await setup.give_back()
    with pytest.raises(RateLimited):
        await setup.reserve(0.7)
    setup.links.heal(LINK)
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.4)
    await setup.reserve(0.6)


@pytest.mark.parametrize("first", ["copy", "resolve"])
async def test_copy_that_comes_late_counts_nothing(setup: Setup, first: str) -> None:
    """An abandoned connection may deliver its data after the call has been repeated."""
    store, sent = setup.limiter.store, list[tuple[Any, ...]]()
    run = store._commands.run_script

    async def lost(*words: Any) -> None:
        sent.append(words)
        raise Unavailable("the test says so")

    store._commands.run_script = lost  # type: ignore[assignment,method-assign]
    reservation = await setup.reserve(0.5)
    store._commands.run_script = run  # type: ignore[method-assign]
    if first == "copy":
        await run(*sent[0])
    await setup.until_given_back()
    await run(*sent[0])
    assert await setup.spent_usd() == pytest.approx(0.5)
    (await setup.reserve(0.1)).cancel()
    await setup.until_given_back()
    await run(*sent[0])
    assert await setup.spent_usd() == pytest.approx(0.5)
    reservation.cancel()
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.0)


async def test_redis_remembers_few_calls(setup: Setup) -> None:
    """Redis remembers calls that got no response, and every later call until one succeeds."""
    for _ in range(20):
        (await setup.reserve(0.9)).cancel()
        await setup.until_given_back()
    assert await setup.calls() <= 1
    setup.links.lose_answers(LINK)
    reservation = await setup.reserve(0.2)
    setup.links.heal(LINK)
    for _ in range(5):
        with suppress(Unavailable):
            await setup.limiter.store.take([Ask("t:other", "month", 1.0, 0.01)])
    assert 1 < await setup.calls() <= 6
    reservation.cancel()
    await setup.until_given_back()
    await setup.limiter.store.take([Ask("t:other", "month", 1.0, 0.01)])
    assert await setup.calls() == 1


async def test_calls_beyond_a_bound_are_given_up(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The amount the oldest call may have used stays counted, so the counter is never too low."""
    monkeypatch.setattr("api.limits.limiter.MAX_LOST", 1)
    for usd in (0.1, 0.2):
        setup.links.lose_answers(LINK)
        reservation = await setup.reserve(usd)
        setup.links.heal(LINK)
        reservation.cancel()
    await setup.until_given_back()
    assert await setup.spent_usd() == pytest.approx(0.1)
