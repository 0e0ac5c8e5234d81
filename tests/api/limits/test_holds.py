"""Any instance settles predictions' reservations, no matter when or how the predictions end."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from api.errors import ClientGone
from api.limits.accounts import LimitStore
from api.limits.counters import Answer, Ask
from api.limits.limited_request import HeldLimits, Hold, LimitedRequest
from api.limits.limiter import Limiter
from api.predictions.follower import ENDING_S, PredictionFollower
from shared.errors import Unavailable
from shared.messages import ItemOutcome, Receipt, ReplyBody, encode_reply_body
from shared.models.entry import Price
from shared.models.tasks.embedding import TextInput
from shared.predictions import Prediction, decode_document
from shared.tenants.plan import Caller, Plan
from tests.api.harness import SERVED
from tests.api.limits.clocks import CLOCK, Clock
from tests.deleting import delete_ended
from tests.limits import REDIS_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
MODEL = SERVED.default("embedding").model_copy(
    update={"price": Price(per_million_tokens_usd=1000.0)}
)
CALLER = Caller(
    tenant="acme",
    plan=Plan(budget_usd_per_month=100.0, max_in_flight=1000, on_limit_store_outage="allow"),
)
RESERVED_USD = 0.022
"""The cost of twenty bytes and two special tokens."""
REPLY = encode_reply_body(ReplyBody([ItemOutcome(0, "succeeded", Receipt("miss", tokens=3))]))


class LatePredictions:
    """Marks a prediction as late when asked to read it."""

    def __init__(self, stores: RecordStores) -> None:
        self._stores = stores

    async def read_linked(self, record_id: str, prediction_id: str) -> None:
        await self._stores.records.finish(record_id, "failed", encode_reply_body(ReplyBody([])))


@dataclass
class Setup:
    limiter: Limiter
    stores: RecordStores
    follower: PredictionFollower
    client: Any

    async def create(self, name: str, *, left_s: float = 1000.0) -> Hold:
        """Creates a prediction that reserves RESERVED_USD."""
        now_s = time.time()
        prediction = Prediction(
            id=name,
            record=name,
            tenant="acme",
            model=MODEL.name,
            owner="o",
            version="v",
            input={},
            base_url="http://x",
            created_at_s=now_s,
            deadline_s=now_s + left_s,
        )
        inputs = [TextInput("x" * 20)]
        async with LimitedRequest(
            self.limiter, CALLER, MODEL, inputs, {}, received_at_s=self.limiter._clock()
        ) as limited:
            hold = limited.hold(prediction, self.follower.follow)
            assert hold is not None
            await self.store(hold)
        return hold

    async def store(self, hold: Hold) -> None:
        await self.stores.predictions.create(
            hold.record_id,
            "acme",
            b"{}",
            deadline_s=hold.limits.deadline_s,
            keep_s=600,
            hold=hold.data,
        )
        hold.is_stored = True

    async def spent_usd(self) -> float:
        """The spent counter's value after all leases have been returned."""
        await self.limiter.give_back(self.limiter._clock() + 1)
        return float(await self.client.hget("penstock:limits:month:t:acme:usd", "used"))

    async def in_flight(self) -> float:
        (answer,) = await self.limiter.store.take([Ask("t:acme:items", "slots", 1000, 0)])
        return answer.used

    async def open_holds(self) -> int:
        return int(await self.client.hlen("penstock:predictions:holds"))


@pytest.fixture
async def setup(redis_url: str) -> AsyncIterator[Setup]:
    clock = Clock(redis_url)
    async with (
        RecordStores(redis_url, timeout_s=REDIS_LIMIT_S) as stores,
        LimitStore(redis_url, "a", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as store,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        limiter = Limiter(store, clock=clock)
        late: Any = LatePredictions(stores)
        yield Setup(limiter, stores, PredictionFollower(late, stores.holds, limiter), client)
    clock.close()


async def test_all_are_settled_however_many_there_are(setup: Setup) -> None:
    names = [f"p{number}" for number in range(300)]
    for name in names:
        await setup.create(name)
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(300 * RESERVED_USD)
    for name in names:
        await setup.stores.records.finish(name, "succeeded", REPLY)
    await setup.follower.sweep()
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(300 * 0.003)
    assert await setup.open_holds() == 0
    account = setup.limiter.account(CALLER, MODEL.name, "tokens")
    assert [one.is_idle for one in account.counters if one.unit == "items"] == [True]


async def test_one_whose_creation_is_not_known_is_found_or_canceled(setup: Setup) -> None:
    class Lost(Setup):
        arrives = True

        async def store(self, hold: Hold) -> None:
            if self.arrives:
                await super().store(hold)
            hold.is_stored = None

    lost = Lost(setup.limiter, setup.stores, setup.follower, setup.client)
    await lost.create("arrived")
    lost.arrives = False
    await lost.create("lost")
    equal = await lost.create("arrived")
    assert equal.is_stored is None
    assert await setup.spent_usd() == pytest.approx(3 * RESERVED_USD)
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(RESERVED_USD)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_one_that_was_settled_before_its_creation_is_known_is_settled_once(
    setup: Setup, is_deleted: bool
) -> None:
    class Lost(Setup):
        async def store(self, hold: Hold) -> None:
            await super().store(hold)
            hold.is_stored = None

    await setup.create("other")
    await Lost(setup.limiter, setup.stores, setup.follower, setup.client).create("lost")
    await setup.stores.records.finish("lost", "succeeded", REPLY)
    if is_deleted:
        await delete_ended(setup.stores, "lost")
    for _ in range(2):
        await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(RESERVED_USD + 0.003)


async def test_creation_that_comes_late_does_not_come_to_be(setup: Setup) -> None:
    """Its reservation has already been returned, so nothing would pay for it."""

    class Late(Setup):
        async def store(self, hold: Hold) -> None:
            hold.is_stored = None

    hold = await Late(setup.limiter, setup.stores, setup.follower, setup.client).create("late")
    await setup.follower.sweep()
    assert await setup.spent_usd() == 0
    await setup.store(hold)
    assert await setup.open_holds() == 0
    assert await setup.stores.records.read("late") is None


async def test_canceled_one_waits_for_what_its_worker_says(setup: Setup) -> None:
    await setup.create("taken")
    await setup.create("waiting")
    await setup.stores.records.claim(["taken"])
    for name in ("taken", "waiting"):
        await setup.stores.records.cancel(name)
        # Backdates the cancellation: no worker took the waiting prediction, so none will report on
        # it.
        canceled_at_s = str(time.time() - ENDING_S - 1)
        await setup.client.hset(f"penstock:record:{name}", "canceled_at_s", canceled_at_s)
    await delete_ended(setup.stores, "taken")
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(RESERVED_USD)
    partial = Receipt("miss", tokens=2, is_delivered_in_part=True)
    reply = encode_reply_body(ReplyBody([ItemOutcome(0, "canceled", partial)]))
    await setup.stores.records.finish("taken", "canceled", reply)
    await setup.client.zadd("penstock:predictions:held", {"penstock:record:taken": 0})
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(0.002)


@pytest.mark.parametrize("others", [0, 1])
async def test_one_that_reserved_without_redis_is_settled_before_redis_knows_of_it(
    setup: Setup, redis_url: str, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Redis comes back after the reservation is made but before the record is created.

    Any instance may settle first.

    Another request's reservation may be returned in between.
    """
    with monkeypatch.context() as away:
        away.setattr(LimitStore, "take", _out_of_reach)
        await setup.create("one")
    async with LimitStore(redis_url, "b", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as store:
        limiter = Limiter(store, clock=setup.limiter._clock)
        late: Any = LatePredictions(setup.stores)
        inputs, now_s = [TextInput("x" * 20)] * others, limiter._clock()
        requests = LimitedRequest(limiter, CALLER, MODEL, inputs, {}, received_at_s=now_s)
        with suppress(ClientGone):
            async with requests:
                await setup.stores.records.finish("one", "succeeded", REPLY)
                await PredictionFollower(late, setup.stores.holds, limiter).sweep()
                raise ClientGone
        await limiter.give_back(math.inf)
    assert await setup.spent_usd() == pytest.approx(0.003)


async def _out_of_reach(*_: object, **__: object) -> None:
    raise Unavailable("Redis is away")


async def test_late_one_is_ended_and_costs_nothing(setup: Setup) -> None:
    await setup.create("late", left_s=-10)
    await setup.follower.sweep()
    await setup.follower.sweep()
    assert (await setup.spent_usd(), await setup.open_holds()) == (0, 0)


async def test_late_one_that_can_not_be_read_holds_up_no_other(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LatePredictions.read_linked

    async def read_whole(self: LatePredictions, record_id: str, prediction_id: str) -> None:
        if record_id == "damaged":
            decode_document(b"{}")
        await read(self, record_id, prediction_id)

    monkeypatch.setattr(LatePredictions, "read_linked", read_whole)
    await setup.create("damaged", left_s=-20)
    await setup.create("late", left_s=-10)
    await setup.follower.sweep()
    await setup.follower.sweep()
    assert await setup.open_holds() == 1
    assert await setup.spent_usd() == RESERVED_USD


async def test_what_can_not_be_read_counts_as_reserved(setup: Setup) -> None:
    for name in ("broken hold", "broken reply", "gone", "whole"):
        await setup.create(name)
        await setup.stores.records.finish(name, "succeeded", REPLY)
    await setup.client.hset("penstock:predictions:holds", "penstock:record:broken hold", "?")
    await setup.client.hset("penstock:record:broken reply", "reply", "?")
    await setup.client.delete("penstock:record:gone")
    await setup.follower.sweep()
    assert await setup.spent_usd() == pytest.approx(3 * RESERVED_USD + 0.003)
    assert await setup.open_holds() == 0


async def test_hold_is_settled_once(setup: Setup) -> None:
    hold = await setup.create("p")
    kept: HeldLimits = hold.limits
    asks = [one.build_settlement(0.0) for one in kept.takings]
    found: list[list[Answer]] = [await setup.limiter.store.settle("p", asks) for _ in range(2)]
    assert [answers[0].used for answers in found] == [0, 0]
    await setup.create("another")
    await setup.limiter.store.settle("p", asks)
    assert await setup.spent_usd() == pytest.approx(RESERVED_USD)
