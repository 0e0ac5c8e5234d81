"""Only a few usage queries run at a time, and their results are cached in memory for a while."""

from __future__ import annotations

import asyncio
import threading

import pytest

from api.usage.rows import UsageLine, UsageQuery, UsageRows
from api.usage.service import KEEP_S, MAX_OF_ONE_TENANT, MAX_RUNNING, QueryPermits, UsageService
from shared.errors import Overloaded, Unavailable
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


class Rows(UsageRows):
    """Returns rows once `go` is set, and counts the queries."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[UsageQuery] = []
        self.running = self.most = 0
        self.is_broken = False

    def read(self, query: UsageQuery) -> list[UsageLine]:
        self.asked.append(query)
        self.running += 1
        self.most = max(self.most, self.running)
        self.go.wait()
        self.running -= 1
        if self.is_broken:
            raise Unavailable("broken")
        return []


def question(number: int) -> UsageQuery:
    return UsageQuery(number, number + 1, 1, tenants=("acme",))


async def test_same_question_is_asked_once_in_a_while() -> None:
    rows, now = Rows(), [0.0]
    service = UsageService(rows, QueryPermits(), lambda: now[0])
    rows.go.set()
    await asyncio.gather(*(service.read(question(1), "acme") for _ in range(3)))
    now[0] = KEEP_S - 1
    assert (await service.read(question(1), "acme")).read_at_s == 0.0
    assert len(rows.asked) == 1
    now[0] = KEEP_S
    assert (await service.read(question(1), "acme")).read_at_s == KEEP_S
    assert len(rows.asked) == 2


async def test_one_tenant_takes_not_all_places() -> None:
    rows = Rows()
    service = UsageService(rows, QueryPermits())
    waiting = [
        asyncio.create_task(service.read(question(number), "acme"))
        for number in range(MAX_OF_ONE_TENANT)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await service.read(question(99), "acme")
    other = asyncio.create_task(service.read(question(100), "other"))
    await asyncio.sleep(0)
    rows.go.set()
    await asyncio.gather(*waiting, other)
    assert rows.most <= MAX_RUNNING
    await service.read(question(99), "acme")


async def test_slow_questions_of_one_tenant_hold_up_nobody() -> None:
    slow, quick, turns = Rows(), Rows(), QueryPermits()
    quick.go.set()
    asked = UsageService(slow, turns)
    waiting = [
        asyncio.create_task(asked.read(question(number), "acme"))
        for number in range(MAX_OF_ONE_TENANT)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_LIMIT_S):
        for number in range(20):
            await UsageService(quick, turns).read(question(number), "other")
    assert not any(task.done() for task in waiting)
    assert slow.most <= MAX_RUNNING // 2
    slow.go.set()
    await asyncio.gather(*waiting)


async def test_tenants_that_wait_take_turns() -> None:
    turns, order, go = QueryPermits(), [], asyncio.Event()

    async def ask(tenant: str) -> None:
        turns.claim(tenant)
        async with turns.hold_turn(tenant):
            order.append(tenant)
            await go.wait()

    tenants = [f"busy-{number}" for number in range(MAX_RUNNING)]
    asked = [asyncio.create_task(ask(tenant)) for tenant in tenants * MAX_OF_ONE_TENANT]
    await asyncio.sleep(0)
    gone = asyncio.create_task(ask("gone"))
    asked.append(asyncio.create_task(ask("quiet")))
    await asyncio.sleep(0)
    gone.cancel()
    go.set()
    await asyncio.gather(*asked)
    assert "gone" not in order
    assert order.index("quiet") <= 2 * MAX_RUNNING
    assert len(order) == MAX_RUNNING * MAX_OF_ONE_TENANT + 1
    await ask("gone")


async def test_failure_is_not_kept() -> None:
    rows = Rows()
    rows.go.set()
    rows.is_broken = True
    service = UsageService(rows, QueryPermits())
    with pytest.raises(Unavailable):
        await service.read(question(1), "acme")
    rows.is_broken = False
    assert (await service.read(question(1), "acme")).lines == []
