"""Chooses slots for texts by the prefix that they share with the slots' earlier texts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from workers.models.engines.slots import AdapterPermits, EngineSlots

PROMPT = list(range(1000))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 999])
def test_a_slot_knows_the_tokens_before_the_first_that_differs(length: int) -> None:
    slots = EngineSlots(1)
    slot, known = slots.take("ann", PROMPT)
    assert known == 0
    slots.free(slot, PROMPT)
    other = [*PROMPT[:length], -1, *PROMPT[length + 1 :]]
    assert slots.take("ann", other) == (slot, length)


@pytest.mark.parametrize(("computed", "known"), [(PROMPT[:256], 256), ([*PROMPT, 5], 1000)])
def test_a_slot_knows_a_text_that_begins_like_a_shorter_one(
    computed: list[int], known: int
) -> None:
    slots = EngineSlots(1)
    slot, _ = slots.take("ann", computed)
    slots.free(slot, computed)
    assert slots.take("ann", PROMPT) == (slot, known)


def test_a_text_gets_its_owners_slot_with_the_longest_common_prefix() -> None:
    slots = EngineSlots(4)
    taken = [slots.take(owner, PROMPT)[0] for owner in ("ann", "ann", "bob")]
    for slot, length in zip(taken, (200, 500, 900), strict=True):
        slots.free(slot, PROMPT[:length])
    assert slots.take("ann", PROMPT) == (taken[1], 500)


def test_a_text_that_shares_nothing_gets_a_slot_that_was_never_used() -> None:
    slots = EngineSlots(2)
    slot, _ = slots.take("ann", PROMPT)
    slots.free(slot, PROMPT)
    other, known = slots.take("ann", [-1, -2])
    assert (other.number, known) == (1, 0)


@pytest.mark.anyio
async def test_owners_who_share_an_adapter_get_no_more_turns_than_others() -> None:
    permits, ran = AdapterPermits(), Counter[str]()

    async def generate(owner: str, adapter: str) -> None:
        while ran.total() < 90:
            permit = await permits.begin(owner, adapter)
            ran[owner] += 1
            await asyncio.sleep(0)
            permit.end()

    await asyncio.gather(generate("ann", "law"), generate("bob", "law"), generate("cat", ""))
    assert max(ran.values()) - min(ran.values()) <= 2
