"""Receivers that do not respond delay only their own tenant's deliveries, and only a few at a
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.webhooks.event import BudgetEvent
from shared.webhooks.publisher import WebhookPublisher
from tests.limits import WAIT_LIMIT_S
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.world import World
from workers.functions.receiver_permits import (
    MAX_OF_RECEIVER,
    MAX_OF_TENANT,
    MAX_PAUSE_S,
    MAX_UNPROVEN,
    MIN_PAUSE_S,
    QUICK_S,
    ReceiverBusy,
    ReceiverPermits,
)

pytestmark = pytest.mark.anyio
HUNG = [f"https://hung-{number}.example/hook" for number in range(200)]
QUICK = "https://quick.example/hook"
LIMIT_S = 20.0
METRIC = "penstock_functions_webhooks_total"


class Stage:
    """Permits, with a clock that the test advances and deliveries that the test finishes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = ReceiverPermits(lambda: self.now_s, wait_limit_s=0.001)
        self.held = AsyncExitStack()

    async def hold(self, tenant: str, url: str) -> None:
        """Starts a delivery that gets no response before the test ends."""
        await self.held.enter_async_context(self.turns.hold_turn(tenant, url))

    async def deliver(
        self, tenant: str, url: str, *, takes_s: float = 0.125, is_lost: bool = False
    ) -> None:
        async with self.turns.hold_turn(tenant, url) as turn:
            with turn.posting():
                self.now_s += takes_s
                if is_lost:
                    raise Unavailable("no answer")

    async def lose(self, tenant: str, url: str) -> None:
        with pytest.raises(Unavailable, match="no answer"):
            await self.deliver(tenant, url, takes_s=LIMIT_S, is_lost=True)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    found = Stage()
    async with found.held:
        yield found


async def test_hung_receivers_hold_few_places_and_no_other_tenant(stage: Stage) -> None:
    for url in HUNG[:MAX_UNPROVEN]:
        await stage.hold("worst", url)
    for url in HUNG[MAX_UNPROVEN:]:
        with pytest.raises(ReceiverBusy):
            await stage.hold("worst", url)
    for _ in range(100):
        await stage.deliver("quiet", QUICK)
    # Another tenant's use of the same receiver is separate.
    await stage.deliver("quiet", HUNG[0])


async def test_a_tenant_whose_receivers_never_answer_gets_one_place(stage: Stage) -> None:
    for url in HUNG[:4]:
        await stage.lose("worst", url)
    await stage.hold("worst", HUNG[4])
    with pytest.raises(ReceiverBusy):
        await stage.hold("worst", HUNG[5])


async def test_a_quick_receiver_has_room_beside_hung_ones_of_its_tenant(stage: Stage) -> None:
    await stage.deliver("mixed", QUICK)
    for url in HUNG[:MAX_UNPROVEN]:
        await stage.hold("mixed", url)
    await stage.deliver("mixed", QUICK)


async def test_receiver_that_hangs_is_left_alone_for_longer_each_time(stage: Stage) -> None:
    await stage.deliver("t", QUICK)
    pauses_s = []
    for _ in range(8):
        await stage.lose("t", QUICK)
        since_s = stage.now_s
        while True:
            try:
                await stage.hold("t", QUICK)
            except ReceiverBusy:
                stage.now_s += 1
            else:
                break
        with pytest.raises(ReceiverBusy):  # one at a time until it responds
            await stage.hold("t", QUICK)
        pauses_s.append(stage.now_s - since_s)
        await stage.held.aclose()
    assert pauses_s[0] == MIN_PAUSE_S
    assert pauses_s[-1] == MAX_PAUSE_S
    assert all(first <= second for first, second in pairwise(pauses_s))
    stage.now_s += MAX_PAUSE_S
    await stage.deliver("t", QUICK)
    for _ in range(MAX_OF_RECEIVER):
        await stage.hold("t", QUICK)


async def test_receiver_that_refuses_at_once_is_not_left_alone(stage: Stage) -> None:
    for _ in range(3):
        with pytest.raises(Unavailable, match="no answer"):
            await stage.deliver("t", QUICK, is_lost=True)


async def test_slow_answers_bring_no_pause_and_little_room(stage: Stage) -> None:
    await stage.deliver("t", QUICK, takes_s=2 * QUICK_S)
    for _ in range(MAX_UNPROVEN):
        await stage.hold("t", QUICK)
    with pytest.raises(ReceiverBusy):
        await stage.hold("t", QUICK)


async def test_burst_to_a_quick_receiver_waits_for_its_turn() -> None:
    turns, go = ReceiverPermits(wait_limit_s=WAIT_LIMIT_S), asyncio.Event()
    async with turns.hold_turn("t", QUICK) as turn:
        with turn.posting():
            pass

    async def deliver() -> None:
        async with turns.hold_turn("t", QUICK) as turn:
            with turn.posting():
                await go.wait()

    tasks = [asyncio.create_task(deliver()) for _ in range(MAX_OF_RECEIVER + 4)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.booleans(), st.booleans())))
def test_no_tenant_holds_more_than_its_places(
    steps: list[tuple[str, int, bool, bool]],
) -> None:
    async def run() -> None:
        stage, held = Stage(), {"a": 0, "b": 0}
        async with stage.held:
            for tenant, number, holds, is_lost in steps:
                stage.now_s += MIN_PAUSE_S
                try:
                    if holds:
                        await stage.hold(tenant, HUNG[number])
                        held[tenant] += 1
                    else:
                        await stage.deliver(tenant, HUNG[number], is_lost=is_lost)
                except (Unavailable, ReceiverBusy):
                    pass
                assert held[tenant] <= MAX_OF_TENANT
        stage.now_s += 10 * MAX_PAUSE_S
        for tenant in held:  # nothing is left over
            for number in range(10):
                await stage.deliver(tenant, HUNG[number])

    asyncio.run(run())


@asynccontextmanager
async def hung_ports(count: int) -> AsyncIterator[list[int]]:
    """Servers that accept POST requests but don't respond until the block ends."""
    over = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    servers = [await asyncio.start_server(take, "127.0.0.1", 0) for _ in range(count)]
    try:
        yield [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        over.set()
        for server in servers:
            server.close()


def warnings(tenant: str, urls: list[str]) -> Iterator[BudgetEvent]:
    for number, url in enumerate(urls):
        yield BudgetEvent(
            tenant=tenant,
            key_id=str(number),
            url=url,
            month="2026-11",
            share=0.8,
            budget_usd=100.0,
            spent_usd=80.5,
            created_at_s=1_790_000_000.5,
        )


async def test_forty_hung_receivers_hold_up_no_other_tenants_event(
    world: World, receiver: Receiver
) -> None:
    publisher, before = WebhookPublisher(world.broker), await world.count(METRIC, "deferred", 0)
    async with hung_ports(40) as ports:
        urls = [f"http://127.0.0.1:{port}/hook" for port in ports]
        for event in warnings(f"worst-{world.request_id}", urls):
            await publisher.publish_budget(event)
        await world.count(METRIC, "deferred", before + 1)
        for number in range(5):
            for event in warnings(f"quiet-{number}-{world.request_id}", [receiver.url]):
                await publisher.publish_budget(event)
            # Half of the 20 s for which a hung delivery keeps its slot.
            assert await receiver.wait(number + 1, limit_s=10.0)
