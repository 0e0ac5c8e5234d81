"""Admissions, steps, drops and reads in any order."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.models.tasks.text import TokenChunk
from tests.workers.models.generation import tiny
from workers.models.base import OutOfMemory, PreparedPrompt
from workers.models.generation.model import GenerationModel

pytestmark = pytest.mark.slow

ROWS, BUDGET = 5, 640
BEGINNING = list(range(5, 45))


class Machine(RuleBasedStateMachine):
    model: GenerationModel
    folder: Path

    @initialize()
    def start(self) -> None:
        for slot in range(1000):
            self.model.drop(slot)
        self.items: dict[int, PreparedPrompt] = {}
        self.read: dict[int, tuple[list[int], str]] = {}
        self.next_place = 0

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(3, 300), min_size=1, max_size=30),
        max_tokens=st.integers(1, 60),
        owner=st.sampled_from(["", "a", "b"]),
    )
    def admit(self, shared: int, own: list[int], max_tokens: int, owner: str) -> None:
        item = tiny.prompt(
            BEGINNING[:shared] + own, max_tokens, owner=owner, is_streamed=True, stop=["zzz"]
        )
        taken = sum(one.length for one in self.items.values())
        fits = len(self.items) < ROWS and taken + item.length <= BUDGET
        try:
            self.model.admit(self.next_place, item)
        except OutOfMemory:
            assert not fits
            return
        assert fits
        self.items[self.next_place] = item
        self.read[self.next_place] = ([], "")
        self.next_place += 1

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.items)))
        self.model.drop(slot)
        self.model.drop(slot)
        del self.items[slot]

    @precondition(lambda self: self.items)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times if self.items else 0):
            end = self.model.step()
            assert not end.preempted
            for slot, result in end.results.items():
                self.check(self.items.pop(slot), result, *self.read[slot])
            if not self.items:
                return

    def check(self, item: PreparedPrompt, result: Any, ids: list[int], text: str) -> None:
        """Checks that the text is the same as the item's own text, and that readers have seen the
        start of it.
        """
        assert result.text.startswith(text)
        assert result.output_tokens >= len(ids)
        assert 0 <= result.cached_tokens < result.input_tokens or not result.cached_tokens
        assert item.owner or not result.cached_tokens
        if item.ids + bytes([item.max_tokens]) not in ALONE:
            ALONE[item.ids + bytes([item.max_tokens])] = tiny.run(OTHER[0], item)[0].text
        assert result.text == ALONE[item.ids + bytes([item.max_tokens])]

    @rule()
    def take_chunks(self) -> None:
        chunks: dict[int, TokenChunk] = self.model.take_chunks()
        assert set(chunks) <= set(self.items)
        for slot, chunk in chunks.items():
            ids, text = self.read[slot]
            assert chunk.first == len(ids)
            self.read[slot] = ([*ids, *chunk.ids], text + chunk.text)

    @invariant()
    def rows_are_those_of_the_items(self) -> None:
        if hasattr(self, "items"):
            taken = [row for row in self.model._rows.all if row.is_taken]
            assert len(taken) == len(self.items)
            assert [row.number for row in self.model._rows.all] == list(range(ROWS))


ALONE: dict[bytes, str] = {}
OTHER: list[GenerationModel] = []


@pytest.mark.parametrize("lookup_tokens", [0, 6])
def test_any_order_gives_each_text_as_alone(folder: Path, lookup_tokens: int) -> None:
    ALONE.clear()
    OTHER[:] = [tiny.open_model(folder)]
    Machine.model = tiny.open_model(folder, lookup_tokens=lookup_tokens)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
