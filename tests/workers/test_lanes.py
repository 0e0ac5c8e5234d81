"""Whoever waits beside an item that kills its model process is answered, whatever happens; the item
is given up.
"""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.job import QueuedItem
from workers.models.base import PreparedText
from workers.scheduling.lanes import LaneQueue


class Trial:
    """Items that wait, and a model process that runs whatever it is given until nothing waits.

    Args:
        size: items that are there at first, and fill one batch.
        poisons: which of them kill the process.
        killed_runs: runs that somebody else's hand ends.
    """

    def __init__(self, size: int, poisons: set[int], killed_runs: set[int]) -> None:
        self.waiting = LaneQueue(budget=10**6, max_items=size)
        self.answered: list[int] = []
        self.given_up: list[int] = []
        self.deaths = self.runs = 0
        self._poisons = poisons
        self._killed_runs = killed_runs
        for number in range(size):
            self.add(number)

    def add(self, number: int) -> None:
        prepared = PreparedText(key="", length=1, ids=number.to_bytes(4, "little"))
        self.waiting.add(QueuedItem(prepared, None, float(number), []))

    def run(self) -> None:
        """One batch."""
        batch = self.waiting.take(1, lambda entry: True)
        assert batch, "something waits, so there is a batch"
        numbers = [number_of(entry) for entry in batch]
        self.runs += 1
        if self._poisons.isdisjoint(numbers) and self.runs not in self._killed_runs:
            self.waiting.batch_ended(batch)
            self.answered += numbers
        else:
            self.deaths += 1
            self.given_up += [number_of(entry) for entry in self.waiting.batch_died(batch)]

    def run_all(self) -> None:
        while len(self.waiting):
            self.run()


def number_of(entry: QueuedItem) -> int:
    assert isinstance(entry.prepared, PreparedText)
    return int.from_bytes(entry.prepared.ids, "little")


def deaths_at_most(size: int) -> int:
    """What one poison among `size` items may cost: a death for each halving, and one or two more of
    it alone.
    """
    return max(1, ceil(log2(size))) + 2


@given(data=st.data(), size=st.integers(1, 40))
def test_every_poison_is_given_up_and_nobody_else(data: st.DataObject, size: int) -> None:
    poisons = data.draw(st.sets(st.integers(0, size - 1), max_size=min(2, size)))
    trial = Trial(size, poisons, set())
    trial.run_all()
    assert sorted(trial.given_up) == sorted(poisons)
    assert sorted(trial.answered) == sorted(set(range(size)) - poisons)
    assert trial.deaths <= len(poisons) * deaths_at_most(size)
    assert trial.runs <= 2 * trial.deaths + 1


@given(data=st.data(), size=st.integers(1, 40), killed_run=st.integers(1, 12))
def test_a_kill_by_another_hand_costs_no_innocent_its_answer(
    data: st.DataObject, size: int, killed_run: int
) -> None:
    poisons = data.draw(st.sets(st.integers(0, size - 1), max_size=min(2, size)))
    trial = Trial(size, poisons, {killed_run})
    trial.run_all()
    assert sorted(trial.given_up) == sorted(poisons)
    assert sorted(trial.answered) == sorted(set(range(size)) - poisons)
    assert trial.deaths <= len(poisons) * deaths_at_most(size) + 1


@pytest.mark.parametrize("size", [2, 16, 33])
def test_who_only_was_there_waits_for_two_batches(size: int) -> None:
    trial = Trial(size, set(), {1})
    trial.run_all()
    assert (trial.runs, trial.deaths) == (3, 1)


def test_others_take_turns_with_the_suspects_of_a_death() -> None:
    trial = Trial(4, {0}, set())
    trial.run()
    for number in range(4, 8):
        trial.add(number)
    trial.run()
    trial.run()
    assert (trial.deaths, sorted(trial.answered)) == (2, [4, 5, 6, 7])


def test_suspects_run_one_group_at_a_time() -> None:
    trial = Trial(4, {0}, set())
    trial.run()
    taken = trial.waiting.take(2, lambda entry: True)
    assert len(taken) == 2
    assert len(trial.waiting) == 0
    trial.waiting.batch_ended(taken)
    assert len(trial.waiting) == 2
