"""A tenant's share of a topic, and the order in which jobs are sent as replies arrive."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from api.dispatch.model_window import Elsewhere, ModelWindow, PublishWindow, digest_of
from api.fair_room import Demand
from shared.errors import DeadlineExceeded
from shared.models.entry import Batch
from shared.models.service_rate import ServiceRate, count_held_messages
from shared.models.tasks.base import FirstGuesses
from tests.api.dispatcher_harness import running_dispatcher
from tests.api.harness import WRITER
from tests.limits import WAIT_LIMIT_S
from tests.tiers import examples

FLOOR = 8
FAR_S = 1e10
LATE_S = 1.0
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}


def demand(tenant: str, items: int = 1) -> Demand:
    return Demand("m", items, tenant, WEIGHTS.get(tenant, 1.0))


def window_of(items_per_s: float = 1.0, floor: int = FLOOR) -> ModelWindow:
    """A window of at least `floor`, or more if the workers are faster."""
    guesses = FirstGuesses(gap_s=1 / items_per_s, batch_s=0.1)
    return ModelWindow(ServiceRate(guesses), floor, broker_wait_s=0.3)


class Senders:
    """Sends jobs through one window, without publishing any."""

    def __init__(self, window: ModelWindow) -> None:
        self.window = window
        self.tasks: list[tuple[Demand, asyncio.Task[None]]] = []
        self.left: list[Demand] = []
        """Jobs sent but not yet replied to, in the order they were sent."""

    async def send(self, asked: Demand, until_s: float = FAR_S) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(asked, until_s))
        self.tasks.append((asked, task))
        await self.settle()
        return task

    async def _run(self, asked: Demand, until_s: float) -> None:
        await self.window.take(asked, until_s)
        self.left.append(asked)

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def answer(self, tenant: str) -> None:
        one = next(one for one in self.left if one.tenant == tenant)
        self.left.remove(one)
        self.window.release(one)
        await self.settle()

    async def answer_all(self) -> None:
        while self.left:
            await self.answer(self.left[0].tenant)

    def published(self) -> dict[str, int]:
        counts = Counter[str]()
        for one in self.left:
            counts[one.tenant] += one.items
        return dict(counts)


@contextmanager
def ended(senders: Senders) -> Iterator[Senders]:
    """Checks that the block leaves no jobs behind."""
    yield senders
    assert senders.window.is_idle
    assert (senders.window.published, senders.window.held) == (0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("places", [1, 4, 16, 64])
async def test_one_tenant_s_texts_leave_room_in_the_first_worker(places: int) -> None:
    model = WRITER.model_copy(update={"batch": Batch(max_tokens=4096, max_items=places)})
    rate = ServiceRate(model.definition.first_guesses)
    windows = PublishWindow([model], lambda name: rate, broker_wait_s=0.5)
    window = windows.of_demand(replace(demand("a"), model=model.name))
    senders = Senders(window)
    for _ in range(10 * places):
        await senders.send(demand("a"))
    assert senders.published()["a"] < count_held_messages(places, 1, in_steps=True)
    await senders.send(demand("b"))
    assert senders.published()["b"] == 1
    # Once the workers are known to be faster, more jobs are published.
    for now_s in (1.0, 2.0, 3.0):
        rate.record_completed(now_s, 100 * places, 200 * places, 0.5)
    await senders.answer("a")
    assert senders.published()["a"] > count_held_messages(places, 1, in_steps=True)
    await senders.answer_all()


@pytest.mark.anyio
async def test_tenant_alone_fills_the_window_and_goes_on_as_replies_come() -> None:
    with ended(Senders(window_of())) as senders:
        for _ in range(20):
            await senders.send(demand("a"))
        assert senders.published() == {"a": FLOOR}
        await senders.answer("a")
        assert senders.published() == {"a": FLOOR}
        await senders.answer_all()
        assert all(task.done() for _, task in senders.tasks)


@pytest.mark.anyio
async def test_window_holds_what_workers_do_in_time() -> None:
    """At 100 items/s, items spend 0.3 s at the broker and 0.2 s in two batches."""
    with ended(Senders(window_of(items_per_s=100))) as senders:
        for _ in range(80):
            await senders.send(demand("a"))
        assert senders.published() == {"a": 50}
        await senders.answer_all()


@pytest.mark.anyio
async def test_newcomer_publishes_at_once_up_to_its_part() -> None:
    with ended(Senders(window_of())) as senders:
        for tenant in ("a", "d"):
            for _ in range(20):
                await senders.send(demand(tenant))
        assert senders.published() == {"a": FLOOR, "d": int(FLOOR * 4 / 5)}
        for _ in range(8):
            await senders.answer("a")
        assert senders.published() == {"a": 2, "d": 6}
        await senders.answer_all()


@pytest.mark.anyio
async def test_one_job_of_a_tenant_always_leaves_however_large() -> None:
    with ended(Senders(window_of())) as senders:
        await senders.send(demand("a", 100))
        await senders.send(demand("b", 100))
        await senders.send(demand("b", 1))
        assert senders.published() == {"a": 100, "b": 100}
        await senders.answer_all()


@pytest.mark.anyio
async def test_earliest_deadline_of_a_tenant_leaves_first() -> None:
    with ended(Senders(window_of(floor=1))) as senders:
        await senders.send(demand("a", 1))
        await senders.send(demand("a", 2), FAR_S + 3)
        await senders.send(demand("a", 3), FAR_S + 1)
        await senders.send(demand("a", 4), FAR_S + 2)
        order = []
        while senders.left:
            order += [one.items for one in senders.left]
            await senders.answer("a")
        assert order == [1, 3, 4, 2]


@pytest.mark.anyio
@pytest.mark.parametrize("is_canceled", [True, False])
async def test_job_that_gives_up_leaves_no_trace(is_canceled: bool) -> None:
    with ended(Senders(window_of(floor=1))) as senders:
        await senders.send(demand("a"))
        until_s = FAR_S if is_canceled else time.time() - 1
        waiting = await senders.send(demand("a", 5), until_s)
        behind = await senders.send(demand("a"))
        if is_canceled:
            waiting.cancel()
        await asyncio.wait([waiting], timeout=WAIT_LIMIT_S)
        assert waiting.cancelled() or isinstance(waiting.exception(), DeadlineExceeded)
        assert senders.window.held == 1
        await senders.answer("a")
        assert behind.done()
        await senders.answer_all()


@pytest.mark.anyio
async def test_job_canceled_just_before_it_may_leave_lets_the_next_one_leave() -> None:
    with ended(Senders(window_of(floor=1))) as senders:
        await senders.send(demand("a"))
        canceled = await senders.send(demand("a"))
        await senders.send(demand("a"))
        canceled.cancel()
        await senders.answer("a")
        assert canceled.cancelled()
        assert senders.published() == {"a": 1}
        await senders.answer_all()


@pytest.mark.anyio
async def test_job_canceled_in_the_moment_it_may_leave_gives_its_place_back() -> None:
    with ended(Senders(window_of(floor=1))) as senders:
        await senders.send(demand("a"))
        chosen, behind = await senders.send(demand("a")), await senders.send(demand("a"))
        senders.left.clear()
        senders.window.release(demand("a"))
        chosen.cancel()
        await asyncio.wait([chosen, behind], timeout=WAIT_LIMIT_S)
        assert chosen.cancelled()
        assert behind.done()
        await senders.answer_all()


@pytest.mark.anyio
async def test_what_other_instances_have_counts() -> None:
    elsewhere = Elsewhere(1, size=32.0, published=32, tenants={digest_of("b"): (1.0, 64)})
    with ended(Senders(window_of(floor=1))) as senders:
        senders.window.update(elsewhere)
        for _ in range(40):
            await senders.send(demand("a"))
        assert 16 <= senders.published()["a"] <= 17, "half of the window"
        senders.window.update(Elsewhere(1, size=32.0, published=4))
        await senders.settle()
        assert senders.published()["a"] > 17, "the other one has nothing any more"
        await senders.answer_all()


@pytest.mark.anyio
async def test_room_goes_to_the_tenant_that_has_least_for_its_weight() -> None:
    with ended(Senders(window_of())) as senders:
        for tenant, jobs in (("a", 20), ("c", 5)):
            for _ in range(jobs):
                await senders.send(demand(tenant))
        for _ in range(5):
            await senders.answer("c")
        for _ in range(20):
            await senders.send(demand("c"))
        assert senders.published() == {"a": 8, "c": 5}
        senders.window.update(Elsewhere(1, size=16.0))
        await senders.settle()
        assert senders.published() == {"a": 8, "c": 11}, "its part, and nothing for the other"
        await senders.answer_all()


@pytest.mark.anyio
async def test_part_of_a_tenant_is_divided_among_instances() -> None:
    """Both tenants use all instances, and this instance has a quarter of tenant `a`'s items."""
    tenants = {digest_of("a"): (1.0, 60), digest_of("b"): (1.0, 80)}
    with ended(Senders(window_of(floor=1))) as senders:
        senders.window.update(Elsewhere(3, size=80.0, published=80, tenants=tenants))
        for _ in range(20):
            await senders.send(demand("a"))
        assert senders.published() == {"a": 10}
        await senders.answer_all()


@pytest.mark.anyio
async def test_weights_add_up_whatever_comes_and_goes() -> None:
    with ended(Senders(window_of())) as senders:
        await senders.send(demand("a"))
        senders.window.update(Elsewhere(1, 0.0, 0, {digest_of("a"): (1.0, 3)}, other_weights=2.0))
        await senders.send(demand("b"))
        await senders.answer("a")
        assert senders.window.weights == pytest.approx(1 + 1 + 2)
        await senders.answer_all()
        assert senders.window.weights == pytest.approx(1 + 2)
        senders.window.update(Elsewhere())
        assert senders.window.weights == 0


class Publishing(RuleBasedStateMachine):
    """Tenants publish, receive replies and give up."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.senders = Senders(window_of())

    def run(self, coroutine: object) -> None:
        self.loop.run_until_complete(coroutine)  # type: ignore[arg-type]

    @rule(
        tenant=st.sampled_from("abcd"),
        items=st.integers(1, 5),
        until_s=st.integers(0, 9).map(lambda more: FAR_S + more),
    )
    def send(self, tenant: str, items: int, until_s: float) -> None:
        had_any = tenant in self.senders.published()
        self.run(self.senders.send(demand(tenant, items), until_s))
        assert had_any or tenant in self.senders.published()

    @precondition(lambda self: self.senders.left)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.run(self.senders.answer(data.draw(st.sampled_from(sorted(self.senders.published())))))

    @precondition(lambda self: any(not task.done() for _, task in self.senders.tasks))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        waiting = [task for _, task in self.senders.tasks if not task.done()]
        data.draw(st.sampled_from(waiting)).cancel()
        self.run(self.senders.settle())

    @invariant()
    def counts_are_right(self) -> None:
        published = self.senders.published()
        waiting = Counter[str]()
        for one, task in self.senders.tasks:
            waiting[one.tenant] += 0 if task.done() else one.items
        assert self.senders.window.published == sum(published.values())
        assert self.senders.window.held == waiting.total()
        assert set(+waiting) <= set(published), "who waits has something published"
        if waiting.total():
            assert self.senders.window.published > FLOOR - 5, "nothing waits while there is room"

    @invariant()
    def nobody_has_more_than_the_window_and_a_job(self) -> None:
        assert all(items < FLOOR + 5 for items in self.senders.published().values())
        assert self.senders.window.published < 2 * FLOOR + 4 * 5

    def teardown(self) -> None:
        self.run(self.senders.answer_all())
        assert all(task.done() for _, task in self.senders.tasks)
        assert self.senders.window.is_idle
        self.loop.close()


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(deadline=None, stateful_step_count=40, max_examples=examples(50))


@pytest.mark.anyio
async def test_job_that_is_late_or_unwanted_in_the_window_is_not_published(tmp_path: Path) -> None:
    """In that case the API writes the rows, because no worker saw the items."""
    async with running_dispatcher(tmp_path, window_floor=1) as harness:
        harness.worker.go.clear()
        first = harness.ask("first")
        await harness.worker.until_taken(1)
        # Longer than a busy machine may pause, because admission rejects requests that would be
        # late.
        late = harness.ask("late", deadline_in_s=LATE_S)
        unstarted = harness.ask("unstarted", queue_limit_s=LATE_S)
        gone = harness.ask("gone")
        outcomes = [(await one).outcomes[0] for one in (late, unstarted)]
        gone.cancel()
        await asyncio.wait([gone], timeout=WAIT_LIMIT_S)
        harness.worker.go.set()
        await first
        assert [one.status for one in outcomes] == ["expired", "expired"]
        reasons = [one.error.message for one in outcomes if one.error is not None]
        assert f"deadline of {LATE_S:g} s" in reasons[0]
        assert f"queue limit of {LATE_S:g} s" in reasons[1]
        assert len(harness.worker.jobs) == 1
        assert sorted((row.status, row.published_at_s) for row in harness.rows) == [
            ("canceled", None),
            ("expired", None),
            ("expired", None),
        ]
        assert harness.is_idle()


@pytest.mark.anyio
async def test_time_in_the_window_is_part_of_the_queue_time(tmp_path: Path) -> None:
    async with running_dispatcher(tmp_path, window_floor=1) as harness:
        harness.worker.go.clear()
        first, second = harness.ask("first"), harness.ask("second")
        await harness.worker.until_taken(1)
        await asyncio.sleep(0.05)
        harness.worker.go.set()
        assert (await second).queue_ms >= 50
        await first
