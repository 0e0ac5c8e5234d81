"""Taking turns for places: no caller holds them all, none is forgotten, and a request that leaves
takes no place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.process.concurrency import FairPermits

PLACES = 4
OWNERS = "abc"
_steps = st.lists(
    st.tuples(st.sampled_from(["come", "come", "leave", "give"]), st.sampled_from(OWNERS)),
    max_size=40,
)


class Line:
    """Tasks that are waiting for a slot or already have one."""

    def __init__(self) -> None:
        self._turns = FairPermits(PLACES)
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.placed: Counter[str] = Counter()

    async def step(self, what: str, owner: str) -> None:
        if what == "come":
            self.waiting.append((owner, asyncio.create_task(self._turns.take(owner))))
        elif what == "give" and self.placed[owner]:
            self.placed[owner] -= 1
            self._turns.give(owner)
        elif what == "leave":
            for name, task in self.waiting:
                if name == owner:
                    task.cancel()
                    break
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for owner, task in [*self.waiting]:
            if task.done():
                self.waiting.remove((owner, task))
                self.placed[owner] += not task.cancelled()

    def check(self) -> None:
        free = PLACES - self.placed.total()
        assert free >= 0
        assert not any(self.placed[owner] < free for owner, _ in self.waiting)

    async def empty(self) -> None:
        for _ in range(200):
            if not (self.waiting or self.placed.total()):
                return
            for owner in OWNERS:
                await self.step("give", owner)
        raise AssertionError("somebody never had a turn")


@given(_steps)
def test_place_that_may_be_had_is_given_and_everybody_gets_one(
    steps: Sequence[tuple[str, str]],
) -> None:
    async def run() -> None:
        line = Line()
        for what, owner in steps:
            await line.step(what, owner)
            line.check()
        await line.empty()

    asyncio.run(run())


@pytest.mark.anyio
async def test_owner_alone_has_half_and_leaves_half() -> None:
    line = Line()
    for _ in range(PLACES):
        await line.step("come", "a")
    assert line.placed == {"a": PLACES // 2}
    await line.step("come", "b")
    assert line.placed == {"a": PLACES // 2, "b": 1}
