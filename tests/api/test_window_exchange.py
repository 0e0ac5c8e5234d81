"""Instances share the contents of their publish windows through a real Redis."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import redis

from api.dispatch.model_window import (
    LEASE_PAUSES,
    MAX_TENANTS,
    PAUSE_S,
    Elsewhere,
    ModelWindow,
    PublishWindow,
    WindowExchange,
    combined,
    digest_of,
    report_of,
)
from api.fair_room import Demand
from shared.models.catalog_file import read_catalog
from shared.models.service_rate import ServiceRate
from shared.models.tasks.base import FirstGuesses
from shared.stores.redis_client import NO_REDIS
from shared.tenants.plan import Priority
from tests.limits import WAIT_LIMIT_S

MODEL = read_catalog(Path("models.yaml")).default("embedding")
FAR_S = 1e10


class Instance:
    """An API instance's windows, and its jobs in flight."""

    def __init__(self, name: str, redis_url: str) -> None:
        self.windows = PublishWindow([MODEL], lambda _: ServiceRate(FirstGuesses()), 0.5)
        self.exchange = WindowExchange(self.windows, redis_url, name)
        self.left: list[Demand] = []

    async def send(self, tenant: str, jobs: int, priority: Priority = "interactive") -> None:
        for _ in range(jobs):
            demand = Demand(MODEL.name, 1, tenant, 1.0, priority)
            await self.windows.take(demand, FAR_S)
            self.left.append(demand)

    async def answer_all(self) -> None:
        while self.left:
            self.windows.release(self.left.pop(), is_in_topic=False)

    def elsewhere(self, priority: Priority = "interactive") -> Elsewhere:
        return self.windows.of[MODEL.name, priority].elsewhere


@asynccontextmanager
async def instances(count: int, redis_url: str) -> AsyncIterator[list[Instance]]:
    async with AsyncExitStack() as opened:
        made = [Instance(f"api-{number}", redis_url) for number in range(count)]
        for one in made:
            await opened.enter_async_context(one.exchange)
        yield made


@pytest.mark.anyio
async def test_each_learns_what_the_others_have(redis_url: str) -> None:
    async with instances(3, redis_url) as (first, second, third):
        await first.send("a", 3)
        await second.send("a", 4)
        await second.send("b", 5)
        await third.send("c", 1)
        for one in (first, second, third) * 2:
            await one.exchange.exchange()
        heard = first.elsewhere()
        assert (heard.instances, heard.published, heard.size) == (2, 10, 10.0)
        assert heard.tenants == {
            digest_of("a"): (1.0, 4),
            digest_of("b"): (1.0, 5),
            digest_of("c"): (1.0, 1),
        }
        await second.answer_all()
        await second.exchange.exchange()
        await first.exchange.exchange()
        assert first.elsewhere().tenants == {digest_of("c"): (1.0, 1)}


@pytest.mark.anyio
async def test_priorities_are_apart(redis_url: str) -> None:
    async with instances(2, redis_url) as (first, second):
        await first.send("a", 3, "batch")
        await second.send("a", 4)
        for one in (first, second) * 2:
            await one.exchange.exchange()
        assert first.elsewhere("batch").instances == 0


@pytest.mark.anyio
async def test_instance_that_dies_is_forgotten_with_its_lease(redis_url: str) -> None:
    async with instances(2, redis_url) as (first, dead):
        await first.send("a", 1)
        await dead.send("b", 7)
        await dead.exchange.exchange()
        await first.exchange.exchange()
        assert first.elsewhere().published == 7
        await dead.answer_all()
        key = f"penstock:window:interactive:{MODEL.name}"
        with redis.Redis.from_url(redis_url) as client:
            left_ms = client.pttl(key)
            assert 0 < left_ms <= LEASE_PAUSES * PAUSE_S * 1000
            ends, _, told = client.hget(key, "api-1").partition(b" ")
            now_s, micros = client.time()
            assert 0 < int(ends) - (now_s * 1000 + micros / 1000) <= LEASE_PAUSES * PAUSE_S * 1000
            client.hset(key, "api-1", b"1 " + told)
            await first.exchange.exchange()
            assert client.hget(key, "api-1") is None
        assert first.elsewhere().published == 0


@pytest.mark.anyio
async def test_who_has_no_work_tells_and_asks_nothing(redis_url: str) -> None:
    async with instances(1, redis_url) as (only,):
        with redis.Redis.from_url(redis_url) as client:

            async def check_asks_nothing() -> None:
                before = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
                assert not await only.exchange.exchange()
                after = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
                assert after == before
                assert client.keys("penstock:window:*") == []

            await check_asks_nothing()
            await only.send("a", 1)
            await only.exchange.exchange()
            await only.answer_all()
            await only.exchange.exchange()
            await check_asks_nothing()


@pytest.mark.anyio
async def test_what_another_release_tells_is_passed_over(redis_url: str) -> None:
    async with instances(1, redis_url) as (only,):
        await only.send("a", 1)
        key = f"penstock:window:interactive:{MODEL.name}"
        with redis.Redis.from_url(redis_url) as client:
            client.hset(key, mapping={"x": "9999999999999 {}", "y": "9999999999999 [1]", "z": ""})
        await only.exchange.exchange()
        assert only.elsewhere().published == 0


@pytest.mark.anyio
async def test_without_redis_an_instance_goes_on_alone() -> None:
    async with instances(1, NO_REDIS) as (only,):
        await only.send("a", 1)
        await only.exchange.exchange()
        await only.send("a", 100)
        assert only.windows.of[MODEL.name, "interactive"].published == 101
        await only.answer_all()


@pytest.mark.anyio
async def test_last_known_instances_divide_the_smallest_window() -> None:
    window = ModelWindow(ServiceRate(FirstGuesses(gap_s=3600.0)), 40, 0.5)
    window.update(Elsewhere(3, is_guess=True))
    for _ in range(10):
        await window.take(Demand("m", 1, "a"), FAR_S)
    async with asyncio.timeout(WAIT_LIMIT_S):
        with pytest.raises(Exception, match="passed"):
            await window.take(Demand("m", 1, "a"), 0.0)
    for _ in range(10):
        window.release(Demand("m", 1, "a"))


@pytest.mark.anyio
async def test_what_is_told_has_a_bound() -> None:
    window = ModelWindow(ServiceRate(FirstGuesses()), 4096, 0.5)
    demands = [Demand("m", 1 + number % 50, f"t{number}") for number in range(1000)]
    for demand in demands:
        await window.take(demand, FAR_S)
    told = report_of(window)
    assert len(told.tenants) == MAX_TENANTS
    assert min(items for _, _, items in told.tenants) == 49
    assert told.other_weights == 1000 - MAX_TENANTS
    assert combined([told, told]).other_weights == 2 * (1000 - MAX_TENANTS)
    for demand in demands:
        window.release(demand)


class Topic:
    """A topic and its workers, which process ITEMS_PER_S in order of arrival, from any
    publisher.
    """

    ITEMS_PER_S = 200

    def __init__(self, tenants: list[dict[str, float]], jobs: int) -> None:
        self.now_s = 0.0
        self.line: deque[tuple[ModelWindow, Demand]] = deque()
        self.done = Counter[str]()
        self.rates = [ServiceRate(FirstGuesses()) for _ in tenants]
        self.windows = [ModelWindow(rate, 16, 0.5) for rate in self.rates]
        self.rate_of = dict(zip(self.windows, self.rates, strict=True))
        self.in_flight = Counter[ModelWindow]()
        self.tasks = set[asyncio.Task[None]]()
        for window, here in zip(self.windows, tenants, strict=True):
            self.rate_of[window].start_busy_period(0.0)
            for tenant, weight in here.items():
                for _ in range(jobs):
                    self.send(window, Demand("m", 1, tenant, weight))

    def send(self, window: ModelWindow, demand: Demand) -> None:
        async def publish() -> None:
            await window.take(demand, FAR_S)
            self.line.append((window, demand))

        self.in_flight[window] += 1
        task = asyncio.create_task(publish())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, seconds: float) -> None:
        """Each finished job is followed by another from the same tenant."""
        self.done.clear()
        for step in range(int(seconds * self.ITEMS_PER_S)):
            for _ in range(3):
                await asyncio.sleep(0)
            self.now_s += 1 / self.ITEMS_PER_S
            window, demand = self.line.popleft()
            self.rate_of[window].record_completed(self.now_s, 1, self.in_flight[window], 0.05)
            self.in_flight[window] -= 1
            self.done[demand.tenant] += 1
            window.release(demand)
            self.send(window, demand)
            if step % (self.ITEMS_PER_S // 4) == 0:
                self.exchange()

    def exchange(self) -> None:
        told = {window: report_of(window) for window in self.windows}
        for window in self.windows:
            window.update(combined(told[other] for other in self.windows if other is not window))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "tenants",
    [
        [{"a": 1.0, "b": 2.0, "c": 4.0}],
        [{"a": 1.0}, {"b": 2.0}, {"c": 4.0}],
        [{"a": 1.0}, {"a": 1.0}, {"a": 1.0, "b": 2.0}, {"c": 4.0}],
        [{"a": 1.0, "c": 4.0}] + [{"b": 2.0}] * 5,
    ],
)
async def test_work_follows_weights_over_all_instances(tenants: list[dict[str, float]]) -> None:
    topic = Topic(tenants, jobs=400)
    await topic.run(12)
    await topic.run(12)
    await topic.stop()
    total = topic.done.total()
    shares = {tenant: topic.done[tenant] / total for tenant in "abc"}
    # A window is divided into whole jobs, and other instances' counts can be a quarter of a second
    # old. Workers are more precise: they take the jobs they hold in order of work.
    assert shares == pytest.approx({"a": 1 / 7, "b": 2 / 7, "c": 4 / 7}, rel=0.25)
    assert len(topic.line) < 0.5 * topic.ITEMS_PER_S * 1.5


@pytest.mark.anyio
async def test_newcomer_waits_a_moment_behind_a_tenant_with_thousands() -> None:
    topic = Topic([{"busy": 1.0}, {}], jobs=3000)
    await topic.run(10)
    topic.send(topic.windows[1], Demand("m", 1, "quiet"))
    await topic.run(1)
    assert topic.done["quiet"]
    await topic.stop()
