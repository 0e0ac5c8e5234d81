"""A budget set in the middle of a month includes amounts spent earlier."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis.asyncio

from api.limits import budget_marks
from api.limits.accounts import LimitStore, budget_name
from api.limits.budget_marks import BudgetMarks
from api.limits.counters import ALONE, Ask, month_of
from api.limits.restore import restore
from api.limits.spent import SpentQuestion
from shared.errors import Unavailable
from shared.tenants.directory import BudgetHolder
from shared.tenants.plan import Limits, Plan
from shared.usage.row import Row
from tests.api.ledger import LedgerWorld, ledger_world
from tests.api.limits.clocks import CLOCK, T0_MS, Clock
from tests.api.row_sums import RowSums
from tests.api.test_ledger import words
from tests.faults.links import Links
from tests.keys import keys_url, stored
from tests.limits import REDIS_LIMIT_S, WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

WORD_USD = 0.004
TENANT = "globex"
HOLDER = BudgetHolder(TENANT)


class ArrivingRows:
    """Rows that arrive in BigQuery when the test adds them."""

    def __init__(self) -> None:
        self.arrived: list[Row] = []
        self.is_away = False
        self.is_broken = False
        self.failures = 0

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        if self.is_away:
            raise Unavailable("BigQuery is away")
        if self.is_broken:
            self.failures += 1
            raise RuntimeError("a client library has a bug")
        return RowSums([self.arrived]).read(month, questions)


@dataclass
class Deployment:
    """Two API instances whose tenants have no budget yet."""

    world: LedgerWorld
    rows: ArrivingRows
    folder: Path

    async def set_keys(self, **given: Any) -> None:
        """Replaces the key file. `other` is one of globex's keys, and `one` is one of acme's."""
        own = given.pop("limits", None)
        tenant_of = {"other": TENANT, "one": "acme", "two": "acme", "poor": "initech"}
        keys = [
            stored(name, tenant, limits=own if name == "other" else None)
            for name, tenant in tenant_of.items()
        ]
        keys_url(self.folder, keys=keys, **given)
        for api in self.world.ledger.apis:
            await api.dependencies.access.refresh()
        await self._end_passes()

    async def _end_passes(self) -> None:
        """Waits for a budget pass that began with the previous keys to finish."""
        async with (
            asyncio.timeout(WAIT_LIMIT_S),
            LimitStore(self.world.ledger.redis_url, "test", timeout_s=REDIS_LIMIT_S) as store,
        ):
            while not await store.lock_marks():  # noqa: ASYNC110 - as instances do
                await asyncio.sleep(0.01)
            await store.unlock_marks()

    async def set_budget(self, usd: float) -> None:
        await self.set_keys(
            plans={"poor": Plan(budget_usd_per_month=usd)}, tenants={TENANT: "poor"}
        )

    async def spend(self, texts: Sequence[str], key: str = "other") -> None:
        answer = await self.world.ledger.embed(key, list(texts))
        assert answer.status_code == 200, answer.text
        await self.world.ledger.until_idle()

    def arrive(self) -> None:
        """Makes all rows written so far arrive."""
        self.rows.arrived[:] = [row for rows in self.world.ledger.row_lists for row in rows]

    async def counted(self, holder: BudgetHolder = HOLDER) -> float:
        client: Any
        async with redis.asyncio.Redis.from_url(self.world.ledger.redis_url) as client:
            used = await client.hget(f"penstock:limits:month:{budget_name(holder)}", "used")
        return float(used or 0)

    async def until_counted(self, usd: float, holder: BudgetHolder = HOLDER) -> None:
        await _until(self.counted, usd, holder)

    async def marks(self) -> dict[str, bytes]:
        return await self.world.api.dependencies.limiter.store.marks()

    async def until_marked(self, *, is_marked: bool = True) -> None:
        """Waits until an instance has seen that the tenant has a budget, or that it doesn't."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (budget_name(HOLDER) in await self.marks()) is not is_marked:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def refusal(self, at: int = 0) -> str:
        """The error code for a request that costs a tenth of a budget. Empty if it is accepted."""
        answer = await self.world.ledger.embed("other", ["zzzz"], at=at)
        return "" if answer.is_success else str(answer.json()["error"]["code"])


async def _until(
    counted: Callable[[BudgetHolder], Awaitable[float]], usd: float, holder: BudgetHolder
) -> None:
    used_usd = -1.0
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while abs(used_usd - usd) > 1e-9:
                await asyncio.sleep(0.02)
                used_usd = await counted(holder)
    except TimeoutError:
        pytest.fail(f"{used_usd} USD are counted, not {usd}")


@pytest.fixture
async def deployed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deployment]:
    monkeypatch.setattr(budget_marks, "POLL_S", 0.02)
    monkeypatch.setattr(budget_marks, "PASS_S", 0.05)
    monkeypatch.setattr(budget_marks, "CHECKS_AFTER_S", (0.01,) * 10_000)
    monkeypatch.setattr(budget_marks, "RETRY_S", 0.01)
    monkeypatch.setattr(budget_marks, "SETTLE_S", 0.0)
    rows = ArrivingRows()
    async with ledger_world(redis_url, tmp_path, instances=2, spent=rows) as world:
        made = Deployment(world, rows, tmp_path)
        await made.set_keys()
        # The ledger's own keys have budgets. Until their marks are gone, a new budget would not get
        # a new mark.
        await made.until_marked(is_marked=False)
        yield made


async def test_budget_set_below_what_is_spent_refuses(deployed: Deployment) -> None:
    await deployed.spend(words(10))
    deployed.arrive()
    await deployed.set_budget(10 * WORD_USD)
    await deployed.until_counted(10 * WORD_USD)
    assert await deployed.refusal(at=0) == "insufficient_quota"
    assert await deployed.refusal(at=1) == "insufficient_quota"


async def test_budget_of_a_key_starts_at_what_the_key_has_spent(deployed: Deployment) -> None:
    await deployed.spend(words(3))
    await deployed.spend(words(2), key="one")
    deployed.arrive()
    await deployed.set_keys(limits=Limits(budget_usd_per_month=3 * WORD_USD))
    [row, *_] = [row for row in deployed.rows.arrived if row.tenant == TENANT]
    await deployed.until_counted(3 * WORD_USD, BudgetHolder(TENANT, row.key_id or ""))
    assert await deployed.refusal() == "insufficient_quota"


async def test_tenant_moved_to_a_plan_with_a_budget_starts_at_what_it_spent(
    deployed: Deployment,
) -> None:
    plans = {"free": Plan(), "poor": Plan(budget_usd_per_month=2 * WORD_USD)}
    await deployed.set_keys(plans=plans, tenants={TENANT: "free"})
    await deployed.spend(words(2))
    deployed.arrive()
    await deployed.set_keys(plans=plans, tenants={TENANT: "poor"})
    await deployed.until_counted(2 * WORD_USD)
    assert await deployed.refusal() == "insufficient_quota"


async def test_budget_that_was_away_for_a_while_counts_that_time_too(deployed: Deployment) -> None:
    await deployed.set_budget(1.0)
    await deployed.spend(words(1))
    await deployed.set_keys()
    await deployed.spend(words(2, 10))
    deployed.arrive()
    await deployed.until_marked(is_marked=False)
    await deployed.set_budget(1.0)
    await deployed.until_counted(3 * WORD_USD)


async def test_rows_that_arrive_late_count(deployed: Deployment) -> None:
    await deployed.spend(words(1))
    deployed.arrive()
    await deployed.spend(words(2, 10))
    deployed.rows.is_away = True
    await deployed.set_budget(1.0)
    await deployed.until_marked()
    await deployed.spend(words(1, 20))
    deployed.rows.is_away = False
    await deployed.until_counted(2 * WORD_USD)
    deployed.arrive()
    await deployed.until_counted(4 * WORD_USD)
    await deployed.spend(words(1, 30))
    deployed.arrive()
    await deployed.until_counted(5 * WORD_USD)


async def test_marks_are_checked_again_after_an_error_nobody_expected(
    deployed: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    await deployed.spend(words(4))
    deployed.arrive()
    deployed.rows.is_broken = True
    await deployed.set_budget(1.0)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while deployed.rows.failures < 2:  # noqa: ASYNC110 - once per instance, at least
            await asyncio.sleep(0.02)
    deployed.rows.is_broken = False
    await deployed.until_counted(4 * WORD_USD)
    assert "a client library has a bug" in caplog.text


async def test_budget_whose_mark_is_damaged_is_marked_again(deployed: Deployment) -> None:
    await deployed.set_budget(1.0)
    await deployed.until_marked()
    store = deployed.world.api.dependencies.limiter.store
    await store.put_marks({budget_name(HOLDER): b'{"at_s":'})
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (await deployed.marks())[budget_name(HOLDER)] == b'{"at_s":':  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await deployed.spend(words(2))
    deployed.arrive()
    await deployed.until_counted(2 * WORD_USD)


async def test_budgets_come_back_by_themselves_after_redis_lost_them(deployed: Deployment) -> None:
    await deployed.set_budget(1.0)
    await deployed.spend(words(4))
    deployed.arrive()
    await deployed.until_counted(4 * WORD_USD)
    client: Any
    async with redis.asyncio.Redis.from_url(deployed.world.ledger.redis_url) as client:
        await client.flushall()
    await deployed.until_counted(4 * WORD_USD)


async def test_what_is_in_flight_while_rows_are_added_counts_once(deployed: Deployment) -> None:
    """A request's row can exist before its reservation is settled, and vice versa."""
    await deployed.spend(words(3))
    deployed.arrive()
    deployed.world.harness.process.gate.clear()
    waiting = asyncio.create_task(deployed.world.ledger.embed("other", words(5, 50)))
    await deployed.world.harness.process.started.wait()
    await deployed.set_budget(1.0)
    counted = asyncio.create_task(deployed.world.ledger.embed("other", words(5, 60)))
    await deployed.until_marked()
    deployed.world.harness.process.gate.set()
    assert [(await one).status_code for one in (waiting, counted)] == [200, 200]
    await deployed.world.ledger.until_idle()
    deployed.arrive()
    await deployed.until_counted(13 * WORD_USD)


class RowSumsOf:
    """Rows that add up to the same amount for every query."""

    def __init__(self, usd: float) -> None:
        self._usd = usd

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        return [(self._usd, 0.0) for _ in questions]


class MeetingRows:
    """Rows for $5 that several readers receive before any of them has added the rows."""

    def __init__(self, readers: int) -> None:
        self._met = threading.Barrier(readers, timeout=WAIT_LIMIT_S)

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        self._met.wait()
        return [(5.0, 1.0) for _ in questions]


async def test_spending_without_redis_counts_once_after_redis_lost_its_data(
    redis_url: str, clock: Clock
) -> None:
    """An instance reports the spending after another instance has noticed that Redis is back."""
    rows = RowSumsOf(5.0)
    month, budgets = month_of(T0_MS / 1000), frozenset({HOLDER})
    ask = Ask(budget_name(HOLDER), "month", 100.0, 0.0, month=month)
    async with LimitStore(redis_url, "a", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as store:
        marks = BudgetMarks(store, lambda: budgets, rows, clock=clock)
        assert not await marks.check()
        clock.advance(2)
        assert not await marks.check()
        await store.take([msgspec.structs.replace(ask, returns=[(ALONE, -2.0)])])
        clock.advance(budget_marks.SETTLE_S)
        assert await marks.check()
        [now] = await store.take([ask])
    assert now.used == 5.0


async def test_lock_whose_answer_was_lost_is_taken_again(redis_url: str) -> None:
    """Otherwise, no instance would check budgets for three minutes."""
    async with (
        LimitStore(redis_url, "a", timeout_s=REDIS_LIMIT_S) as store,
        LimitStore(redis_url, "b", timeout_s=REDIS_LIMIT_S) as other,
    ):
        assert await store.lock_marks()  # pretend that this response never arrived
        assert await store.lock_marks()
        assert not await other.lock_marks()
        await store.unlock_marks()
        assert await other.lock_marks()


class HeldRows:
    """Rows that a reader waits for until `arrived` is set."""

    def __init__(self) -> None:
        self.asked, self.arrived = threading.Event(), threading.Event()

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        self.asked.set()
        assert self.arrived.wait(WAIT_LIMIT_S)
        return [(0.0, 0.0) for _ in questions]


async def test_instance_can_stop_during_a_check_while_redis_is_unreachable(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_marks, "SETTLE_S", 0.0)
    port, rows = urlsplit(redis_url).port, HeldRows()
    assert port is not None
    with Links({"a": port}) as links:
        url = f"redis://127.0.0.1:{links.port('a')}/0"
        async with asyncio.timeout(WAIT_LIMIT_S), LimitStore(url, "a", timeout_s=1.0) as store:
            await store.wait_up(WAIT_LIMIT_S)
            async with BudgetMarks(store, lambda: frozenset({HOLDER}), rows):
                await asyncio.to_thread(rows.asked.wait, WAIT_LIMIT_S)
                links.cut("a")
            rows.arrived.set()


async def test_operators_at_once_add_rows_once(redis_url: str, clock: Clock) -> None:
    """A command and an instance read the same rows while a request is spending."""
    rows = MeetingRows(3)
    async with LimitStore(redis_url, "a", clock=CLOCK, timeout_s=REDIS_LIMIT_S) as store:
        await store.read_age_s()
        clock.advance(budget_marks.SETTLE_S)
        month = month_of(T0_MS / 1000)
        marks = BudgetMarks(store, lambda: frozenset({HOLDER}), rows, clock=clock)
        at_once = [
            asyncio.create_task(marks.check()),
            *(asyncio.create_task(restore(store, rows, [HOLDER], now_s=clock())) for _ in range(2)),
        ]
        await store.take([Ask(budget_name(HOLDER), "month", 100.0, 2.0, month=month)])
        await asyncio.gather(*at_once)
        [now] = await store.take([Ask(budget_name(HOLDER), "month", 100.0, 0.0, month=month)])
        [before] = await store.take(
            [Ask(budget_name(HOLDER), "month", 100.0, 0.0, month=month - 1)]
        )
    assert now.used in (5.0, 7.0), "the request was counted before the first reading, or after it"
    assert before.used == 1.0
