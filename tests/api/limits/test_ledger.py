"""For any mix of requests, no matter how they end, a budget's counter equals the sum of its rows.

A request is admitted only if its maximum cost fits on top of the amounts already spent and
reserved.
"""

from __future__ import annotations

import asyncio
import calendar
import itertools
import time
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from api.errors import ClientGone, RateLimited
from api.limits.accounts import LimitStore
from api.limits.counters import month_of
from api.limits.limited_request import Hold, LimitedRequest, highest_cost_usd
from api.limits.limiter import Limiter
from api.predictions.follower import PredictionFollower
from shared.errors import Unavailable
from shared.messages import ItemOutcome, Receipt, ReplyBody, encode_reply_body
from shared.models.catalog import Model
from shared.models.entry import Batch, Generation, Price
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextInput, TokensInput
from shared.models.tasks.image import ImageInput
from shared.models.tasks.text import GenerationInput
from shared.money.charge import cost_usd, price_of
from shared.predictions import Prediction
from shared.stores.redis_client import Script
from shared.tenants.plan import Caller, Plan
from tests.api.harness import SERVED
from tests.api.limits.clocks import CLOCK, Clock
from tests.limits import REDIS_LIMIT_S
from tests.record_stores import RecordStores

INSTANCES = 2
T = TypeVar("T")
WRITER = Model(
    name="writer",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=4096),
    generation=Generation(context_tokens=400, default_tokens=16, longest_tokens=300),
    price=Price(
        per_million_tokens_usd=100.0,
        per_million_output_tokens_usd=700.0,
        per_million_cached_tokens_usd=30.0,
        cached_share=0.3,
    ),
)
ENCODER = SERVED.default("embedding").model_copy(
    update={"price": Price(per_million_tokens_usd=200.0)}
)
PAINTER = SERVED.default("image").model_copy(
    update={"price": Price(per_million_pixel_steps_usd=0.5, cached_share=0.5)}
)
IMAGE = ImageInput("a circle", 64, 64, 20, 2.0, 1, "default")
INPUTS: list[tuple[Model, Input]] = [
    (WRITER, GenerationInput(200, 1, prompt="{}[]();" * 8)),
    (WRITER, GenerationInput(20, 1, messages=[{"role": "user", "content": "éè"}])),
    (ENCODER, TextInput("?!" * 40)),
    (ENCODER, TokensInput([7] * 30)),
    (PAINTER, IMAGE),
]
SHARES = st.sampled_from([0.0, 0.4, 1.0])


@dataclass
class Open:
    """An admitted request."""

    limited: LimitedRequest
    model: Model
    inputs: list[Input]
    received_at_s: float
    price_share: float
    instance: int
    hold: Hold | None = None
    name: str = ""
    outcomes: list[ItemOutcome] = field(default_factory=list)

    @property
    def month(self) -> float:
        return month_of(self.received_at_s)

    @property
    def highest_usd(self) -> float:
        price = price_of(self.model, self.received_at_s, self.price_share)
        unit = self.model.definition.unit
        return sum(highest_cost_usd(price, unit, one.bound_work(self.model)) for one in self.inputs)

    def outcome(self, index: int, share: float, cache: str = "miss") -> ItemOutcome:
        """The result of an item that used part of its maximum."""
        bound = self.inputs[index].bound_work(self.model)
        receipt = Receipt(cache)
        if self.model.definition.unit == "pixel_steps":
            receipt.pixel_steps = bound.work
        else:
            receipt.output_tokens = int(bound.output_tokens * share)
            read = int((bound.work - bound.output_tokens) * share)
            receipt.tokens, receipt.cached_tokens = read + receipt.output_tokens, read // 2
        return ItemOutcome(index, "succeeded", receipt)

    def cost_usd(self, outcomes: list[ItemOutcome]) -> float:
        price = price_of(self.model, self.received_at_s, self.price_share)
        return sum(cost_usd(price, one) for one in outcomes)


class NoPredictions:
    """No prediction is late in this test."""

    async def read_linked(self, record_id: str, prediction_id: str) -> None:
        raise AssertionError


class Ledger(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = redis.Redis.from_url(self.url)
        self.redis.flushall()
        self.clock = Clock(self.url)
        self.opened = AsyncExitStack()
        self.stores = RecordStores(self.url, timeout_s=REDIS_LIMIT_S)
        self.run(self.opened.enter_async_context(self.stores))
        self.started = itertools.count()
        self.instances = [self.run(self.start()) for _ in range(INSTANCES)]
        self.plan = Plan(budget_usd_per_month=1.0)
        self.rows: dict[float, float] = defaultdict(float)
        self.open: list[Open] = []
        self.predictions: list[Open] = []
        self.giving: list[asyncio.Task[None]] = []
        self.lost: set[float] = set()
        """The months when Redis's responses were lost."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    async def start(self) -> tuple[Limiter, PredictionFollower]:
        name = f"api-{next(self.started)}"
        store = LimitStore(self.url, name, clock=CLOCK, timeout_s=REDIS_LIMIT_S)
        limiter = Limiter(await self.opened.enter_async_context(store), clock=self.clock)
        predictions: Any = NoPredictions()
        return limiter, PredictionFollower(predictions, self.stores.holds, limiter)

    async def until_given_back(self) -> None:
        await asyncio.gather(*self.giving, return_exceptions=True)
        self.giving.clear()

    def teardown(self) -> None:
        self.all_end()
        self.run(self.opened.aclose())
        self.clock.close()
        self.redis.close()
        self.loop.close()

    def let_in(
        self, kind: int, items: int, instance: int, received_at_s: float, price_share: float
    ) -> Open | None:
        model, given = INPUTS[kind]
        caller = Caller(tenant="acme", plan=self.plan)
        inputs, limiter = [given] * items, self.instances[instance][0]
        limited = LimitedRequest(
            limiter,
            caller,
            model,
            inputs,
            {},
            received_at_s=received_at_s,
            price_share=price_share,
        )
        asked = Open(limited, model, inputs, received_at_s, price_share, instance)
        try:
            self.run(limited.__aenter__())
        except (RateLimited, Unavailable):
            return None
        others = [one for one in (*self.open, *self.predictions) if one.month == asked.month]
        reserved = sum(one.highest_usd for one in (*others, asked))
        budget = self.plan.budget_usd_per_month or 0.0
        if asked.month in self.lost:  # an instance spends only the remainder that it knows about
            budget *= 1 + INSTANCES
        assert self.rows[asked.month] + reserved <= budget + 1e-8
        return asked

    @rule(
        kind=st.integers(0, len(INPUTS) - 1),
        items=st.integers(1, 4),
        instance=st.integers(0, INSTANCES - 1),
        age_s=st.sampled_from([0.0, 0.0, 60.0, 80_000.0]),
        price_share=st.sampled_from([1.0, 0.5]),
    )
    def ask(self, kind: int, items: int, instance: int, age_s: float, price_share: float) -> None:
        """A request, or a line in a batch that was created a while ago."""
        at_s = self.clock() - age_s
        if (asked := self.let_in(kind, items, instance, at_s, price_share)) is not None:
            self.open.append(asked)

    @rule(
        which=st.integers(0, 100),
        shares=st.tuples(SHARES, SHARES, SHARES, SHARES),
        cache=st.sampled_from(["miss", "memory", "joined"]),
    )
    def answer(self, which: int, shares: tuple[float, ...], cache: str) -> None:
        if self.open:
            one = self.open.pop(which % len(self.open))
            outcomes = [
                one.outcome(index, share, cache)
                for index, share in zip(range(len(one.inputs)), shares, strict=False)
            ]
            one.limited.settle(price_of(one.model, one.received_at_s, one.price_share), outcomes)
            self.run(one.limited.__aexit__(None, None, None))
            self.rows[one.month] += one.cost_usd(outcomes)

    @rule(which=st.integers(0, 100), error=st.sampled_from([ClientGone, RuntimeError]))
    def fail(self, which: int, error: type[Exception]) -> None:
        """The caller hangs up, or the request is rejected after all. It is not charged."""
        if self.open:
            one = self.open.pop(which % len(self.open))
            self.run(one.limited.__aexit__(error, error(), None))

    @rule(
        kind=st.integers(0, len(INPUTS) - 1),
        items=st.integers(1, 3),
        instance=st.integers(0, INSTANCES - 1),
        stored=st.sampled_from(["yes", "yes", "found", "lost", "lost answer"]),
    )
    def predict(self, kind: int, items: int, instance: int, stored: str) -> None:
        """A prediction. Either the call to Redis or its response may be lost."""
        asked = self.let_in(kind, items, instance, self.clock(), 1.0)
        if asked is None:
            return
        asked.name = f"pred_{next(self.started)}"
        self.run(self.create(asked, stored))
        if stored in ("yes", "lost answer"):
            self.predictions.append(asked)
        if stored in ("lost", "lost answer"):
            self.run(self.instances[instance][1].sweep())

    async def create(self, one: Open, stored: str) -> None:
        deadline_s = time.time() + 1000
        prediction = Prediction(
            id=one.name,
            record=one.name,
            tenant="acme",
            model=one.model.name,
            owner="o",
            version="v",
            input={},
            base_url="http://x",
            created_at_s=one.received_at_s,
            deadline_s=deadline_s,
        )
        hold = one.hold = one.limited.hold(prediction, self.instances[one.instance][1].follow)
        assert hold is not None
        if stored in ("yes", "lost answer"):
            await self.stores.predictions.create(
                one.name, "acme", b"{}", deadline_s=deadline_s, keep_s=600, hold=hold.data
            )
        hold.is_stored = {"yes": True, "found": False}.get(stored)
        if stored == "found":
            one.limited.settle(price_of(one.model, one.received_at_s), [])
        await one.limited.__aexit__(None, None, None)

    @rule(which=st.integers(0, 100), share=SHARES, instance=st.integers(0, INSTANCES - 1))
    def end_prediction(self, which: int, share: float, instance: int) -> None:
        """A worker finishes the prediction, and any instance may settle it any number of times."""
        if self.predictions:
            one = self.predictions.pop(which % len(self.predictions))
            outcomes = [one.outcome(index, share) for index in range(len(one.inputs))]
            reply = encode_reply_body(ReplyBody(outcomes))
            self.run(self.stores.records.finish(one.name, "succeeded", reply))
            self.rows[one.month] += one.cost_usd(outcomes)
            for _ in range(2):
                self.run(self.instances[instance][1].sweep())

    @rule(instance=st.integers(0, INSTANCES - 1))
    def die(self, instance: int) -> None:
        """An instance dies with no request in flight. Its predictions continue."""
        if not any(one.instance == instance for one in self.open):
            for _ in range(4):
                with suppress(Unavailable):
                    self.run(self.instances[instance][0].give_back(self.clock() + 1))
            self.instances[instance] = self.run(self.start())

    @rule(instance=st.integers(0, INSTANCES - 1), calls=st.integers(1, 2), is_counted=st.booleans())
    def lose_answers(self, instance: int, calls: int, is_counted: bool) -> None:
        """An instance's next calls may or may not be counted, and it gets no responses.

        If settling a prediction fails, another instance settles it (test_holds.py).
        """
        commands = self.instances[instance][0].store._commands
        left, run_script = itertools.count(-calls + 1), type(commands).run_script

        async def lost(script: Script, keys: list[str], *args: Any) -> Any:
            if args[4] == 0:
                return await run_script(commands, script, keys, *args)
            if next(left) >= 0:
                commands.__dict__.pop("run_script", None)
            if is_counted:
                await run_script(commands, script, keys, *args)
            raise Unavailable("the test says so")

        commands.run_script = lost  # type: ignore[assignment,method-assign]
        now = month_of(self.clock())
        self.lost |= {now - 1, now}

    @rule(seconds=st.sampled_from([0.1, 0.3, 5.0, 40_000.0]))
    def wait(self, seconds: float) -> None:
        """Advances the clock. The longest step may cross into the next month."""
        self.clock.advance(seconds)
        for limiter, _ in self.instances:
            with suppress(Unavailable):
                self.run(limiter.give_back(self.clock()))

    @rule(instance=st.integers(0, INSTANCES - 1), steps=st.integers(1, 20))
    def begin_to_give_back(self, instance: int, steps: int) -> None:
        """Instances return leases every quarter of a second, concurrently with the next steps."""

        async def begin() -> None:
            giving = self.instances[instance][0].give_back(self.clock())
            self.giving.append(asyncio.create_task(giving))
            for _ in range(steps):
                await asyncio.sleep(0)

        self.run(begin())

    @rule()
    def turn_the_month(self) -> None:
        """Requests still open may be from the previous month, but never from an earlier one."""
        now = month_of(self.clock())
        if any(one.month < now for one in (*self.open, *self.predictions)):
            self.all_end()
        year, month = divmod(int(now) + 1, 12)
        self.clock.set(calendar.timegm((year, month + 1, 1, 0, 0, 0)) * 1000 + 10)

    @rule(budget=st.sampled_from([0.2, 0.5, 1.0, 2.0]))
    def change_the_plan(self, budget: float) -> None:
        """Leases on the old budget expire within a quarter of a second."""
        self.plan = Plan(budget_usd_per_month=budget)
        self.wait(0.3)

    @rule()
    def all_end(self) -> None:
        while self.open:
            self.answer(0, (0.4, 1.0, 0.0, 1.0), "miss")
        while self.predictions:
            self.end_prediction(0, 1.0, 0)
        self.run(self.until_given_back())
        self.clock.advance(0.3)
        for limiter, _ in self.instances:
            for _ in range(4):
                with suppress(Unavailable):
                    self.run(limiter.give_back(self.clock() + 1))
        found = self.redis.hgetall("penstock:limits:month:t:acme:usd")
        if found:
            newest = float(found[b"month"])
            assert float(found[b"used"]) == pytest.approx(self.rows[newest], abs=1e-9)
            before = float(found[b"used_before"])
            assert before == pytest.approx(self.rows[newest - 1], abs=1e-9)
        assert not self.redis.hgetall("penstock:predictions:holds")


def test_counter_is_the_sum_of_the_rows(server_url: str) -> None:
    Ledger.url = server_url
    run_state_machine_as_test(Ledger, settings=settings(max_examples=12, stateful_step_count=30))
