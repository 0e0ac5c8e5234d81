"""Ten instances on one real Redis admit exactly as many requests as the limit allows."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from api.errors import BudgetExceeded, BudgetReserved, RateLimited, headers_for
from api.limits.accounts import LimitStore
from api.limits.counters import Answer, Ask, Standing
from api.limits.limiter import Limiter, RequestDemand, Reservation
from infra.local.redis_server import RedisServer
from shared.errors import Unavailable
from shared.tenants.plan import Caller, Limits, OnOutage, Plan, Rates
from tests.api.limits.clocks import Clock, limiters

pytestmark = pytest.mark.anyio
INSTANCES = 10


@pytest.fixture
async def ten(redis_url: str, clock: Clock) -> AsyncIterator[list[Limiter]]:
    async with limiters(redis_url, clock, INSTANCES) as made:
        yield made


def demand(work: int = 1, *, items: int = 1, usd: float = 0.0) -> RequestDemand:
    return RequestDemand("tokens", items=items, work=work, cost_usd=usd)


async def ask(
    limiter: Limiter, caller: Caller, wanted: RequestDemand, model: str = "mini"
) -> Reservation:
    return await limiter.reserve(limiter.account(caller, model, "tokens"), wanted)


async def is_let_in(limiter: Limiter, caller: Caller, wanted: RequestDemand | None = None) -> bool:
    try:
        await ask(limiter, caller, wanted or demand())
    except RateLimited:
        return False
    return True


async def let_in(ten: list[Limiter], caller: Caller, wanted: RequestDemand, tries: int) -> int:
    """How many of `count` requests are admitted when all instances receive them at once."""
    asked = (is_let_in(ten[number % len(ten)], caller, wanted) for number in range(tries))
    return sum(await asyncio.gather(*asked))


async def give_back(ten: list[Limiter], clock: Clock) -> None:
    """Returns unused leases, as the background task does."""
    clock.advance(0.25)
    for limiter in ten:
        await limiter.give_back(clock())


async def test_ten_instances_let_through_exactly_the_limit(
    ten: list[Limiter], clock: Clock
) -> None:
    caller = Caller(tenant="acme", plan=Plan(requests_per_min=1000))
    drawn, through = random.Random(7), 0
    for _ in range(60):
        through += await let_in(ten, caller, demand(), drawn.randrange(1, 90))
        assert through <= 1000
        await give_back(ten, clock)
    assert through == 1000
    clock.advance(60)
    assert await let_in(ten, caller, demand(), 1500) <= 1000


async def test_no_minute_has_more_than_the_limit(ten: list[Limiter], clock: Clock) -> None:
    """A limit used up at the end of one minute isn't available again at the start of the next."""
    caller, through = Caller(tenant="acme", plan=Plan(tokens_per_min=50_000)), []
    drawn = random.Random(3)
    for _ in range(300):
        for limiter in drawn.sample(ten, 4):
            tokens = drawn.randrange(1, 900)
            if await is_let_in(limiter, caller, demand(tokens)):
                through.append((clock(), tokens))
        clock.advance(drawn.choice([0.05, 0.2, 0.24, 1.0]))
        for limiter in drawn.sample(ten, 3):
            await limiter.give_back(clock())
    for start_s, _ in through:
        in_minute = sum(tokens for at, tokens in through if start_s <= at < start_s + 60)
        assert in_minute <= 50_000
    assert sum(tokens for _, tokens in through) > 50_000


async def test_far_from_the_limit_few_requests_ask_redis(
    redis_url: str, ten: list[Limiter], clock: Clock
) -> None:
    caller = Caller(tenant="acme", plan=Plan(requests_per_min=100_000, tokens_per_min=10_000_000))
    asked = _count_calls(ten[0])
    for _ in range(1000):
        await ask(ten[0], caller, demand(10))
        clock.advance(0.002)
    assert len(asked) < 20


async def test_callers_without_limits_never_ask(ten: list[Limiter]) -> None:
    asked = _count_calls(ten[0])
    caller = Caller(tenant="acme", key_limits=Limits())
    for _ in range(10):
        await ask(ten[0], caller, demand())
    assert not asked


async def test_refused_callers_ask_redis_rarely(ten: list[Limiter], clock: Clock) -> None:
    caller = Caller(tenant="acme", plan=Plan(requests_per_min=5))
    assert await let_in(ten[:1], caller, demand(), 6) == 5
    asked = _count_calls(ten[0])
    for _ in range(1000):
        assert not await is_let_in(ten[0], caller)
        clock.advance(0.001)
    assert len(asked) <= 5


def _count_calls(limiter: Limiter) -> list[int]:
    calls: list[int] = []
    store, take = limiter.store, limiter.store.take

    async def counted(asks):  # type: ignore[no-untyped-def]
        calls.append(len(asks))
        return await take(asks)

    store.take = counted  # type: ignore[method-assign]
    return calls


async def test_key_has_limits_beside_those_of_its_tenant(ten: list[Limiter]) -> None:
    plan, few = Plan(requests_per_min=10), Limits(requests_per_min=3)
    one = Caller(tenant="acme", key_id="k1", plan=plan, key_limits=few)
    other = Caller(tenant="acme", key_id="k2", plan=plan)
    assert await let_in(ten, one, demand(), 20) == 3
    assert await let_in(ten, other, demand(), 20) == 7
    stranger = Caller(tenant="other", key_id="k1", plan=plan, key_limits=few)
    assert await let_in(ten, stranger, demand(), 20) == 3


async def test_refused_request_takes_nothing_of_its_other_limits(
    ten: list[Limiter], clock: Clock
) -> None:
    plan = Plan(requests_per_min=100, tokens_per_min=10)
    caller = Caller(tenant="acme", plan=plan)
    for _ in range(30):
        assert not await is_let_in(ten[0], caller, demand(11))
        clock.advance(0.3)
    assert await is_let_in(ten[0], caller, demand(10))
    account = ten[0].account(caller, "mini", "tokens")
    assert ten[0].headers(account)["x-ratelimit-remaining-requests"] == "99"


async def test_one_model_may_have_less(ten: list[Limiter]) -> None:
    plan = Plan(requests_per_min=10, per_model={"mini": Rates(requests_per_min=2)})
    caller = Caller(tenant="acme", plan=plan)
    assert await let_in(ten, caller, demand(), 5) == 2
    for _ in range(8):
        await ask(ten[1], caller, demand(), "maxi")
    with pytest.raises(RateLimited):
        await ask(ten[1], caller, demand(), "maxi")


async def test_what_was_not_used_can_be_used(ten: list[Limiter], clock: Clock) -> None:
    caller = Caller(tenant="acme", plan=Plan(requests_per_min=100, tokens_per_min=1000))
    hit = await ask(ten[0], caller, demand(900))
    assert not await is_let_in(ten[1], caller, demand(900))
    hit.settle(demand(0))
    await give_back(ten, clock)
    computed = await ask(ten[1], caller, demand(900))
    computed.settle(demand(950))
    await give_back(ten, clock)
    assert not await is_let_in(ten[2], caller, demand(51))
    assert await is_let_in(ten[3], caller, demand(50))


async def test_more_than_was_reserved_is_waited_for(ten: list[Limiter], clock: Clock) -> None:
    caller = Caller(tenant="acme", plan=Plan(tokens_per_min=1000))
    (await ask(ten[0], caller, demand(10))).settle(demand(1500))
    await give_back(ten, clock)
    with pytest.raises(RateLimited) as refused:
        await ask(ten[1], caller, demand(1))
    assert 59 < refused.value.retry_after_s <= 60


async def test_budget_is_never_overspent(ten: list[Limiter], clock: Clock) -> None:
    """Requests that cost a tenth of a cent each, half of them cache hits, never exceed the
    budget.
    """
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=0.5))
    drawn, spent, refused = random.Random(5), 0, 0
    while refused < 50:
        try:
            reserved = await ask(drawn.choice(ten), caller, demand(usd=0.001))
        except BudgetExceeded:
            refused += 1
        else:
            is_hit = drawn.random() < 0.5
            reserved.settle(demand(usd=0.0 if is_hit else 0.001))
            spent += not is_hit
        clock.advance(0.1)
        if drawn.random() < 0.3:
            await drawn.choice(ten).give_back(clock())
    for limiter in ten:
        await limiter.give_back(clock() + 1)
    while await is_let_in(ten[0], caller, demand(usd=0.001)):
        spent += 1
        clock.advance(0.3)
    assert spent == 500


async def test_spent_budget_says_when_it_starts_anew(ten: list[Limiter], clock: Clock) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=0.001))
    (await ask(ten[0], caller, demand(usd=0.001))).settle(demand(usd=0.001))
    await give_back(ten, clock)
    with pytest.raises(BudgetExceeded) as refused:
        await ask(ten[1], caller, demand(usd=0.001))
    assert refused.value.retry_after_s == pytest.approx(8.5 * 86_400, abs=1)
    assert (refused.value.is_final, refused.value.code) == (True, "insufficient_quota")
    assert await is_let_in(ten[1], caller, demand(usd=0.0)), "what is free needs no budget"


async def test_budget_that_is_only_reserved_is_refused_for_a_moment(
    ten: list[Limiter], clock: Clock
) -> None:
    """It does not matter whether this instance or another one holds the reservation."""
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
    spent = await ask(ten[2], caller, demand(usd=0.4))
    spent.settle(demand(usd=0.4))
    await give_back(ten, clock)
    held = [await ask(ten[0], caller, demand(usd=0.2)), await ask(ten[1], caller, demand(usd=0.2))]
    for limiter in ten[:4]:
        with pytest.raises(BudgetReserved) as refused:
            await ask(limiter, caller, demand(usd=0.5))
        assert (refused.value.is_final, refused.value.retry_after_s) == (False, 1.0)
        headers = headers_for(refused.value)
        assert (headers["retry-after"], headers.get("x-should-retry")) == ("1", None)
        assert "spent 0.4, reserved 0.4, requested 0.5" in refused.value.message
    await give_back(ten, clock)
    with pytest.raises(BudgetExceeded, match="exceeded your current quota") as final:
        await ask(ten[3], caller, demand(usd=0.61))
    assert final.value.is_final, "this does not fit even if all that is reserved comes back"
    for one in held:
        one.settle(demand(usd=0.05))
    await give_back(ten, clock)
    assert await is_let_in(ten[3], caller, demand(usd=0.5))


async def test_reservation_that_is_open_for_long_stays_one_that_may_come_back(
    ten: list[Limiter], clock: Clock
) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
    held = await ask(ten[0], caller, demand(usd=1.0))
    for _ in range(20):
        clock.advance(7)
        await ten[0].give_back(clock())
        with pytest.raises(BudgetReserved):
            await ask(ten[1], caller, demand(usd=0.5))
    held.settle(demand(usd=1.0))
    await give_back(ten, clock)
    with pytest.raises(BudgetExceeded) as refused:
        await ask(ten[1], caller, demand(usd=0.5))
    assert refused.value.is_final


async def test_what_a_dead_instance_reserved_counts_as_spent(
    ten: list[Limiter], clock: Clock
) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
    await ask(ten[0], caller, demand(usd=1.0))
    clock.advance(31)
    with pytest.raises(BudgetExceeded) as refused:
        await ask(ten[1], caller, demand(usd=0.5))
    assert refused.value.is_final


async def test_reservations_of_the_last_month_leave_the_new_one_alone(
    ten: list[Limiter], clock: Clock
) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
    held = await ask(ten[0], caller, demand(usd=1.0))
    clock.advance(10 * 86_400)
    (await ask(ten[0], caller, demand(usd=1.0))).settle(demand(usd=1.0))
    await give_back(ten, clock)
    with pytest.raises(BudgetExceeded) as refused:
        await ask(ten[0], caller, demand(usd=0.5))
    assert refused.value.is_final
    held.settle(demand(usd=0.0))
    await give_back(ten, clock)
    assert not await is_let_in(ten[0], caller, demand(usd=0.5))


async def test_end_of_a_request_wakes_one_who_waits_for_its_budget(ten: list[Limiter]) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
    limiter, other = ten[0], Caller(tenant="other", plan=Plan(budget_usd_per_month=1.0))
    account = limiter.account(caller, "mini", "tokens")
    held = [await ask(limiter, caller, demand(usd=0.5)) for _ in range(2)]
    waiting = [asyncio.create_task(limiter.wait_released(account, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    (await ask(limiter, other, demand(usd=0.5))).cancel()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    held[0].cancel()
    assert await waiting[0]
    assert not any(task.done() for task in waiting[1:])
    assert await is_let_in(limiter, caller, demand(usd=0.5)), "a refusal just before is forgotten"
    waiting[1].cancel()
    held[1].cancel()
    assert await waiting[2]
    assert not await limiter.wait_released(account, 0)
    assert not limiter._waiting


async def test_items_in_flight_of_all_instances_are_bounded(
    ten: list[Limiter], clock: Clock
) -> None:
    caller, drawn = Caller(tenant="acme", plan=Plan(max_in_flight=20)), random.Random(9)
    open_ones: list[tuple[Reservation, int]] = []
    most = 0
    for _ in range(400):
        if drawn.random() < 0.6 or not open_ones:
            items = drawn.randrange(1, 6)
            try:
                reserved = await ask(drawn.choice(ten), caller, demand(items=items))
            except RateLimited:
                pass
            else:
                open_ones.append((reserved, items))
        else:
            reserved, _ = open_ones.pop(drawn.randrange(len(open_ones)))
            reserved.settle(demand())
        clock.advance(0.1)
        await drawn.choice(ten).give_back(clock())
        most = max(most, sum(items for _, items in open_ones))
        assert most <= 20
    assert most >= 15
    for reserved, _ in open_ones:
        reserved.cancel()
    await give_back(ten, clock)
    assert await is_let_in(ten[0], caller, demand(items=20))


async def test_call_that_is_canceled_holds_nothing(ten: list[Limiter], clock: Clock) -> None:
    caller = Caller(plan=Plan(max_in_flight=2, requests_per_min=100))
    limiter, take = ten[0], ten[0].store.take
    asked = asyncio.Event()

    async def never(asks: object) -> list[Answer]:
        asked.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    limiter.store.take = never  # type: ignore[method-assign]
    canceled = asyncio.create_task(ask(limiter, caller, demand(items=2)))
    await asked.wait()
    canceled.cancel()
    await asyncio.wait([canceled])
    limiter.store.take = take  # type: ignore[method-assign]
    assert await is_let_in(limiter, caller, demand(items=2))


async def test_request_larger_than_the_limit_is_told_so(ten: list[Limiter]) -> None:
    caller = Caller(tenant="acme", plan=Plan(tokens_per_min=10))
    with pytest.raises(RateLimited, match=r"Request too large .* limit 10, requested 11") as error:
        await ask(ten[0], caller, demand(11))
    assert error.value.is_final


async def test_request_larger_than_the_limit_is_told_so_after_its_preparation(
    ten: list[Limiter],
) -> None:
    """Preparation has used part of the limit. The rest would fit by itself."""
    limiter, caller = ten[0], Caller(tenant="acme", plan=Plan(tokens_per_min=10))
    account = limiter.account(caller, "mini", "tokens")
    taken = await limiter.reserve_rates(account, demand(4, items=0))
    with pytest.raises(RateLimited, match=r"Request too large .* limit 10, requested 11") as error:
        await limiter.reserve(account, demand(11), taken)
    assert error.value.is_final
    (await limiter.reserve(account, demand(10), taken)).cancel()


async def test_request_larger_than_the_budget_sees_plain_amounts(ten: list[Limiter]) -> None:
    caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1_234_567.5))
    with pytest.raises(BudgetExceeded, match=r"limit 1234567\.5, requested 2000000\.25\.") as error:
        await ask(ten[0], caller, demand(usd=2_000_000.25))
    assert error.value.is_final
    small = Caller(tenant="small", plan=Plan(budget_usd_per_month=0.00001))
    with pytest.raises(BudgetExceeded, match=r"limit 0\.00001, requested 0\.00002\."):
        await ask(ten[0], small, demand(usd=0.00002))


async def test_changed_plan_counts_at_once(ten: list[Limiter]) -> None:
    assert await let_in(ten, Caller(plan=Plan(requests_per_min=5)), demand(), 9) == 5
    assert await let_in(ten, Caller(plan=Plan(requests_per_min=8)), demand(), 9) == 3


async def test_without_redis_at_most_one_limit_more_gets_in(tmp_path: Path, clock: Clock) -> None:
    """Before, during and after the Redis outage, at most twice the limit is admitted in any
    minute.
    """
    with RedisServer(tmp_path, tmp_path) as server:
        time_of = Clock(server.url)
        async with limiters(server.url, time_of, INSTANCES) as ten:
            for _ in range(2):
                for limiter in ten:
                    await limiter.register()
            caller = Caller(plan=Plan(requests_per_min=104, tokens_per_min=1005))
            before = await let_in(ten, caller, demand(), 150)
            await give_back(ten, time_of)
            before += await let_in(ten, caller, demand(), 150)
            server.kill()
            time_of.now_ms += 250
            lost = [sum([await let_in([one], caller, demand(), 30) for one in ten])]
            time_of.now_ms += 30_000
            lost += [sum([await let_in([one], caller, demand(), 30) for one in ten])]
            time_of.now_ms += 30_500
            again = sum([await let_in([one], caller, demand(), 30) for one in ten])
            tokens = sum([await let_in([one], caller, demand(20), 9) for one in ten]) * 20
        time_of.close()
    assert before == 104
    assert lost == [104, 0]
    assert again == 104
    assert tokens <= 1005


async def test_budget_without_redis_is_what_was_left(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tmp_path) as server:
        time_of = Clock(server.url)
        async with limiters(server.url, time_of, 2) as two:
            for _ in range(2):
                for limiter in two:
                    await limiter.register()
            caller = Caller(plan=Plan(budget_usd_per_month=1.0))
            assert await let_in(two, caller, demand(usd=0.1), 6) == 6
            server.kill()
            alone = sum([await let_in([one], caller, demand(usd=0.1), 9) for one in two])
        time_of.close()
    assert alone <= 5


async def test_spent_budget_stays_spent_without_redis(redis_url: str, clock: Clock) -> None:
    """This includes an instance that never served the tenant: it finds out when it registers."""
    async with limiters(redis_url, clock, 3) as three:
        for limiter in three:
            await limiter.register()
        caller = Caller(tenant="acme", plan=Plan(budget_usd_per_month=1.0))
        assert await let_in(three[:1], caller, demand(usd=0.1), 20) == 10
        clock.advance(10)
        for limiter in three:
            await limiter.register()
            limiter.store.take = _unavailable  # type: ignore[method-assign]
        for limiter in three:
            with pytest.raises(BudgetExceeded):
                await ask(limiter, caller, demand(usd=0.1))
        # None of this budget has been spent, and that is known too.
        other = Caller(tenant="other", plan=Plan(budget_usd_per_month=0.9))
        assert await let_in(three, other, demand(usd=0.1), 30) == 9
        assert await is_let_in(three[1], caller, demand(usd=0.0)), "what is free"


@pytest.mark.parametrize(("on_outage", "let"), [("deny", 0), ("allow", 5)])
async def test_plan_says_what_becomes_of_a_budget_that_is_not_known(
    redis_url: str, clock: Clock, on_outage: OnOutage, let: int
) -> None:
    """The instance, which is one of two, has never reached Redis."""
    plan = Plan(budget_usd_per_month=1.0, on_limit_store_outage=on_outage)
    key = Limits(budget_usd_per_month=1.0)
    async with limiters(redis_url, clock, 1) as (one,):
        one._standing = Standing(0, 2)
        one.store.take = _unavailable  # type: ignore[method-assign]
        for caller in (Caller(tenant="acme", plan=plan), Caller(plan=plan, key_limits=key)):
            for _ in range(let):
                assert await is_let_in(one, caller, demand(usd=0.1))
            expected = BudgetExceeded if let else Unavailable
            with pytest.raises(expected, match="US dollars per month of tenant"):
                await ask(one, caller, demand(usd=0.1))


async def test_totals_are_bounded_and_the_unknown_is_not_nothing(
    redis_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.limits.accounts.MAX_TOTALS", 3)
    async with limiters(redis_url, clock, 2) as (one, other):
        for number in range(5):
            caller = Caller(tenant=f"t{number}", plan=Plan(budget_usd_per_month=1.0))
            await ask(one, caller, demand(usd=1.0))
            clock.advance(1)
        await other.register()
        other.store.take = _unavailable  # type: ignore[method-assign]
        for number, error in enumerate([Unavailable] * 2 + [BudgetExceeded] * 3):
            caller = Caller(tenant=f"t{number}", plan=Plan(budget_usd_per_month=1.0))
            with pytest.raises(error):
                await ask(other, caller, demand(usd=0.1))


async def test_budget_spent_without_redis_counts_afterwards(redis_url: str, clock: Clock) -> None:
    async with limiters(redis_url, clock, 1) as (one,):
        await one.register()
        caller = Caller(plan=Plan(budget_usd_per_month=1.0))
        take = one.store.take
        one.store.take = _unavailable  # type: ignore[method-assign]
        assert await let_in([one], caller, demand(usd=0.1), 4) == 4
        one.store.take = take  # type: ignore[method-assign]
        await one.give_back(clock() + 1)
        assert await let_in([one], caller, demand(usd=0.1), 20) == 6


async def _unavailable(asks: object) -> list[Answer]:
    raise Unavailable("the test says so")


async def test_what_redis_grants_to_a_canceled_request_comes_back(
    redis_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hangs up during the call to Redis, or the batch is canceled."""
    taken, take = asyncio.Event(), LimitStore.take

    async def slow(store: LimitStore, asks: Sequence[Ask]) -> list[Answer]:
        answers = await take(store, asks)
        taken.set()
        await asyncio.sleep(0)
        return answers

    caller = Caller(plan=Plan(budget_usd_per_month=1.0, max_in_flight=10))
    async with limiters(redis_url, clock, 1) as [limiter]:
        account = limiter.account(caller, "m", "tokens")
        with monkeypatch.context() as patch:
            patch.setattr(LimitStore, "take", slow)
            asking = asyncio.create_task(limiter.reserve(account, demand(usd=0.1)))
            await taken.wait()
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            for _ in range(5):
                await asyncio.sleep(0)
        await limiter.give_back(math.inf)
        await limiter.reserve(account, demand(usd=0.01))
        [usd] = [one for one in account.counters if one.unit == "usd"]
        assert usd.used < 0.1
