"""The counting script, on a real Redis whose clock the test sets."""

from __future__ import annotations

import calendar
import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from api.limits.accounts import LimitStore
from api.limits.counters import SLOTS_S, Answer, Ask, Kind
from shared.stores.redis_client import load_script
from tests.api.limits.clocks import CLOCK, Clock
from tests.limits import REDIS_LIMIT_S
from tests.tiers import examples

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(redis_url: str, clock: Clock) -> AsyncIterator[LimitStore]:
    async with LimitStore(redis_url, "a", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as made:
        yield made


def ask(need: float, limit: float = 10, kind: Kind = "window", **more: object) -> Ask:
    return Ask("t:acme", kind, limit, need, **more)  # type: ignore[arg-type]


async def test_minute_has_no_more_than_its_limit(store: LimitStore, clock: Clock) -> None:
    for used in range(1, 11):
        (answer,) = await store.take([ask(1)])
        assert (answer.granted, answer.used, answer.fits) == (1, used, True)
        clock.advance(1)
    (refused,) = await store.take([ask(1)])
    assert (refused.granted, refused.used, refused.fits) == (0, 10, False)
    clock.advance(refused.retry_ms / 1000 - 0.001)
    assert not (await store.take([ask(1)]))[0].fits
    clock.advance(0.001)
    assert (await store.take([ask(1)]))[0].fits
    assert not (await store.take([ask(1)]))[0].fits


async def test_retry_is_when_there_is_room_for_all_of_it(store: LimitStore, clock: Clock) -> None:
    await store.take([ask(4)])
    clock.advance(10)
    await store.take([ask(4)])
    (small,) = await store.take([ask(3)])
    (large,) = await store.take([ask(10)])
    assert (small.retry_ms, large.retry_ms) == (50_500, 60_500)
    assert large.reset_ms == 60_500
    clock.advance(60.5)
    assert (await store.take([ask(10)]))[0].fits


async def test_nothing_is_taken_if_one_limit_is_full(store: LimitStore) -> None:
    tokens = Ask("t:acme", "month", 1.0, 0.75)
    first = await store.take([ask(1), tokens])
    assert [one.fits for one in first] == [True, True]
    second = await store.take([ask(1), tokens])
    assert [(one.fits, one.granted) for one in second] == [(True, 0), (False, 0)]
    assert (await store.take([ask(0)]))[0].used == 1


async def test_far_from_the_limit_an_instance_gets_more(store: LimitStore) -> None:
    (answer,) = await store.take([ask(1, limit=1000, extra=500)])
    assert answer.granted == 1 + 999 // 64
    (answer,) = await store.take([ask(1, limit=1000, extra=3)])
    assert answer.granted == 4
    (answer,) = await store.take([ask(950, limit=1000, extra=500)])
    assert answer.granted == 950


async def test_what_comes_back_leaves_its_own_bucket(store: LimitStore, clock: Clock) -> None:
    (first,) = await store.take([ask(6)])
    clock.advance(30)
    await store.take([ask(4)])
    (after,) = await store.take([ask(0, returns=[(first.period, 2)])])
    assert after.used == 8
    clock.advance(31)
    assert (await store.take([ask(0, returns=[(first.period, 4)])]))[0].used == 4


async def test_no_more_comes_back_than_was_taken(store: LimitStore) -> None:
    (first,) = await store.take([ask(2)])
    (after,) = await store.take([ask(0, returns=[(first.period, 100), (first.period - 5, 9)])])
    assert after.used == 0


async def test_more_than_was_reserved_counts(store: LimitStore) -> None:
    (first,) = await store.take([ask(9)])
    (after,) = await store.take([ask(1, returns=[(first.period, -5)])])
    assert (after.used, after.fits) == (14, False)


async def test_budget_is_of_a_calendar_month(store: LimitStore, clock: Clock) -> None:
    clock.set(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp() * 1000)
    budget = ask(0.6, limit=1.0, kind="month")
    (december,) = await store.take([budget])
    (refused,) = await store.take([budget])
    assert (december.fits, refused.fits, refused.retry_ms) == (True, False, 1000)
    clock.advance(1)
    (january,) = await store.take([ask(0.6, 1.0, "month", returns=[(december.period, 0.6)])])
    assert january.fits
    assert january.used == pytest.approx(0.6)


async def test_budget_in_small_parts_is_spent_to_the_last(store: LimitStore) -> None:
    found = [(await store.take([ask(0.1, 1.0, "month")]))[0].fits for _ in range(11)]
    assert found == [True] * 10 + [False]


@settings(max_examples=examples(60))
@given(st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1)))
def test_months_are_those_of_the_calendar(redis_server_url: str, at: datetime) -> None:
    at = at.replace(tzinfo=UTC)
    script = load_script(CLOCK, "api/limits/months.lua", "api/limits/take.lua")
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushall()
        client.set("test:now_ms", int(at.timestamp() * 1000))
        text = '[{"kind":"month","limit":0,"need":1,"extra":0,"returns":[],"operation":""}]'
        (found,) = json.loads(client.eval(script.text, 1, "m", "a", 1, text, "", 0, 0, 0))
    assert found["period"] == at.year * 12 + at.month - 1
    following = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    left_ms = int(following.timestamp() * 1000) - int(at.timestamp() * 1000)
    assert found["retry_ms"] == left_ms


@pytest.fixture(scope="module")
def redis_server_url(redis_server: object) -> str:
    return redis_server.url  # type: ignore[attr-defined,no-any-return]


async def test_slots_of_all_instances_are_counted(redis_url: str, clock: Clock) -> None:
    options = {"clock": CLOCK, "timeout_s": REDIS_LIMIT_S}
    async with (
        LimitStore(redis_url, "a", **options) as one,  # type: ignore[arg-type]
        LimitStore(redis_url, "b", **options) as other,  # type: ignore[arg-type]
    ):
        assert (await one.take([ask(6, kind="slots")]))[0].granted == 6
        (refused,) = await other.take([ask(5, kind="slots")])
        assert (refused.fits, refused.granted, refused.used) == (False, 0, 6)
        assert (await other.take([ask(4, kind="slots")]))[0].fits
        (full,) = await one.take([ask(7, kind="slots")])
        assert (full.fits, full.granted) == (False, 6)
        await one.take([ask(2, kind="slots")])
        assert (await other.take([ask(8, kind="slots")]))[0].fits
        clock.advance(SLOTS_S)
        assert (await one.take([ask(10, kind="slots")]))[0].fits, "the other one died"


async def test_instances_know_how_many_they_are(redis_url: str, clock: Clock) -> None:
    options = {"clock": CLOCK, "timeout_s": REDIS_LIMIT_S}
    async with (
        LimitStore(redis_url, "a", **options) as one,  # type: ignore[arg-type]
        LimitStore(redis_url, "b", **options) as other,  # type: ignore[arg-type]
    ):
        assert await one.register() == (0, 1)
        assert await other.register() == (1, 2)
        clock.advance(SLOTS_S - 1)
        assert await other.register() == (1, 2)
        clock.advance(2)
        assert await other.register() == (0, 1)
        await other.leave()
        assert await one.register() == (0, 1)


async def test_late_requests_count_in_the_month_they_arrived_in(
    store: LimitStore, clock: Clock
) -> None:
    """For example, a batch line. Its row belongs to that month too."""
    november = 2026 * 12 + 10

    async def take(
        need: float, month: float, returns: Sequence[tuple[float, float]] = ()
    ) -> Answer:
        budget = ask(need, 1.0, "month", returns=list(returns), month=month)
        (answer,) = await store.take([budget])
        return answer

    assert (await take(0.7, november)).period == november
    clock.set(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000 + 10)
    new = await take(0.9, november + 1)
    assert (new.fits, new.used, new.period) == (True, 0.9, november + 1)
    late = await take(0.4, november)
    assert (late.fits, late.used, late.period) == (False, 0.7, november)
    assert (await take(0.2, november)).used == pytest.approx(0.9)
    assert (await take(0.0, november + 1, [(november, 0.5)])).used == 0.9
    assert (await take(0.0, november)).used == pytest.approx(0.4)


@pytest.mark.parametrize("order", [1, -1])
async def test_call_may_be_about_two_months_of_a_budget(
    store: LimitStore, clock: Clock, order: int
) -> None:
    """At the turn of the month, an instance returns unused amounts for both months."""
    month = (await store.take([ask(0, kind="month")]))[0].period
    clock.set(calendar.timegm((2026, 12, 1, 0, 0, 0)) * 1000 + 10)
    await store.take([ask(4, kind="month", month=month)])
    await store.take([ask(3, kind="month", month=month + 1)])
    both = [
        ask(0, kind="month", month=of, returns=[(of, amount)])
        for of, amount in ((month, 3), (month + 1, 1))
    ]
    await store.take(both[::order])
    left = [await store.take([ask(0, kind="month", month=of)]) for of in (month, month + 1)]
    assert [answers[0].used for answers in left] == [1, 2]


async def test_clock_of_an_instance_may_be_ahead_a_little(store: LimitStore, clock: Clock) -> None:
    november = 2026 * 12 + 10
    clock.set(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000 - 5000)
    for month in (november + 1, november):
        (answer,) = await store.take([ask(0.6, 1.0, "month", month=month)])
        assert (answer.fits, answer.period) == (True, month)
    (answer,) = await store.take([ask(0.6, 1.0, "month", month=november + 2)])
    assert (answer.fits, answer.period) == (False, november + 1)
