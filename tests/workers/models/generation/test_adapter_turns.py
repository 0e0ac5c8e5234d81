"""Texts with different adapters take turns in an engine that can't compute them together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from workers.models.base import PreparedPrompt
from workers.models.engines.dialect import (
    EngineDialect,
    EngineRequest,
    Hardware,
    Launch,
    Post,
    Reply,
    TakeReplies,
)
from workers.models.engines.generation import EngineGeneration
from workers.models.engines.slots import AdapterPermits, EngineSlots, ReadingPermits
from workers.models.generation.vocabulary import Vocabulary

pytestmark = [pytest.mark.slow(about_s=5), pytest.mark.anyio]

PART_TOKENS = 64


class OneAtATime(EngineDialect):
    """An engine that computes only texts with the same adapter together.

    `on_read`: called with each prompt that is being read in parts, and the end of the part.
    """

    mixes_adapters = False

    def launch(self, hardware: Hardware) -> Launch:
        raise NotImplementedError

    def can_stream(self, item: PreparedPrompt, *, has_written: bool) -> bool:
        return True

    async def on_read(self, item: PreparedPrompt, end: int) -> None:
        await asyncio.sleep(0)

    async def ask(self, post: Post, item: PreparedPrompt, request: EngineRequest) -> Reply:
        await self.on_read(item, len(request.ids))
        return Reply(cached_tokens=0)

    async def stream(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, take: TakeReplies
    ) -> None:
        for _ in range(request.tokens):
            await asyncio.sleep(0)
            if take([Reply([7], cached_tokens=0)]):
                return


async def test_a_long_prompt_that_waits_to_be_read_gives_its_turn_to_others(
    folder: Path,
) -> None:
    """The second text waits to have its last part read while a text with another adapter arrives.

    Each of the two could wait for what the other one has.
    """
    dialect = OneAtATime(tiny.entry(), Vocabulary(folder))
    slots, permits, turns = EngineSlots(3), ReadingPermits(PART_TOKENS), AdapterPermits()
    running: list[asyncio.Task[None]] = []

    def start(parts: int, **fields: Any) -> EngineGeneration:
        item = tiny.prompt([9] * (parts * PART_TOKENS), 40, **fields)
        generation = EngineGeneration(len(running), item, dialect.vocabulary)
        computing = generation.compute(
            dialect,
            None,  # type: ignore[arg-type]
            slots,
            permits,
            turns,
            PART_TOKENS,
            lambda slot, tokens, steps: None,
        )
        running.append(asyncio.create_task(computing))
        return generation

    async def on_read(item: PreparedPrompt, end: int) -> None:
        await asyncio.sleep(0)
        if item is first.item and end == 2 * PART_TOKENS:
            texts.append(start(2, owner="b"))
            await asyncio.sleep(0)  # the text starts to wait for its turn
            assert turns.are_others_waiting

    dialect.on_read = on_read  # type: ignore[method-assign]
    first = start(3, owner="a", adapter="law")
    texts = [first, start(2, owner="a", adapter="law")]
    async with asyncio.timeout(WAIT_LIMIT_S):
        while len(texts) < 3 or running:
            await asyncio.gather(*running)
            running = [task for task in running if not task.done()]
    assert [len(text.writing.ids) for text in texts] == [40] * 3
