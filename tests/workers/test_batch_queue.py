"""The rules of the batch queue, each as a property over any arrivals."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.batch_queue import BatchQueue


@dataclass(eq=False)
class Entry:
    number: int
    length: int
    key: str = ""


Arrivals = list[tuple[int, str]]
arrivals = st.lists(st.tuples(st.integers(1, 300), st.sampled_from("abc")), min_size=1, max_size=60)


def queue_of(
    lengths_and_keys: Arrivals, budget: int, max_items: int
) -> tuple[BatchQueue[Entry], list[Entry]]:
    queue: BatchQueue[Entry] = BatchQueue(budget, max_items)
    entries = [Entry(number, length, key) for number, (length, key) in enumerate(lengths_and_keys)]
    for entry in entries:
        queue.add(entry)
    return queue, entries


def drain(queue: BatchQueue[Entry]) -> list[list[Entry]]:
    batches = []
    while batch := queue.take(1000):
        batches.append(batch)
    return batches


@given(arrivals, st.integers(1, 2000), st.integers(1, 20))
def test_every_entry_is_taken_once(lengths_and_keys: Arrivals, budget: int, max_items: int) -> None:
    queue, entries = queue_of(lengths_and_keys, budget, max_items)
    taken = [entry.number for batch in drain(queue) for entry in batch]
    assert sorted(taken) == [entry.number for entry in entries]
    assert len(queue) == 0


@given(arrivals, st.integers(1, 2000), st.integers(1, 20))
def test_batch_keeps_budget_and_key(
    lengths_and_keys: Arrivals, budget: int, max_items: int
) -> None:
    queue, _ = queue_of(lengths_and_keys, budget, max_items)
    for batch in drain(queue):
        assert len({entry.key for entry in batch}) == 1
        assert len(batch) <= max_items
        # One entry above the budget still runs, alone: refusing it is admission's business.
        assert len(batch) == 1 or sum(entry.length for entry in batch) <= budget


@given(arrivals, st.integers(1, 2000), st.integers(1, 20), st.integers(1, 20))
def test_batch_is_filled_in_order_of_arrival(
    lengths_and_keys: Arrivals, budget: int, max_items: int, at_most: int
) -> None:
    queue, entries = queue_of(lengths_and_keys, budget, max_items)
    taken = list[int]()
    while batch := queue.take(at_most):
        total = sum(entry.length for entry in batch)
        assert len(batch) <= min(at_most, max_items)
        assert len(batch) == 1 or total <= budget
        same_key = [
            entry for entry in entries if entry.key == batch[0].key and entry.number not in taken
        ]
        assert batch[0] is same_key[0], "the oldest is always in the batch"
        left_out = [
            one
            for one in same_key[:max_items]
            if one.number < batch[-1].number and one not in batch
        ]
        assert all(one.length + total > budget for one in left_out)
        taken += [entry.number for entry in batch]
    assert sorted(taken) == [entry.number for entry in entries]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 2000), st.integers(1, 20)
)
def test_order_of_arrival_is_kept_within_one_batch(
    lengths: list[int], budget: int, max_items: int
) -> None:
    queue, entries = queue_of([(length, "") for length in lengths], budget, max_items)
    waiting = [entry.number for entry in entries]
    while batch := queue.take(max_items):
        numbers = [entry.number for entry in batch]
        assert numbers[0] == waiting[0], "the oldest is always in the batch"
        assert numbers == sorted(numbers)
        assert set(numbers) <= set(waiting[:max_items]), (
            "company comes from the oldest max_items only"
        )
        waiting = [number for number in waiting if number not in numbers]


def test_nobody_is_overtaken_by_what_came_more_than_a_batch_later() -> None:
    """Eight too long to share a batch wait; after each batch, as many short ones come as would have
    room.
    """
    max_items = 8
    queue: BatchQueue[Entry] = BatchQueue(100, max_items)
    for number in range(max_items):
        queue.add(Entry(number, 60))
    arrived, taken = max_items, list[int]()
    for turn in range(max_items):
        taken += [entry.number for entry in queue.take(max_items)]
        for _ in range(turn + 1):
            queue.add(Entry(arrived, 10))
            arrived += 1
    for place, number in enumerate(taken):
        assert all(number < later + max_items for later in taken[place + 1 :])


@given(arrivals, st.integers(1, 5))
def test_keys_take_turns(lengths_and_keys: Arrivals, max_items: int) -> None:
    queue, entries = queue_of(lengths_and_keys, 10**9, max_items)
    batches = drain(queue)
    keys = {entry.key for entry in entries}
    first_turns = [batch[0].key for batch in batches[: len(keys)]]
    assert sorted(first_turns) == sorted(keys), "every key has had a turn before any has a second"


def test_equal_lengths_fill_the_budget() -> None:
    queue, _ = queue_of([(10, "")] * 50, budget=100, max_items=64)
    assert [len(batch) for batch in drain(queue)] == [10, 10, 10, 10, 10]


@given(arrivals, st.integers(1, 20))
def test_sift_leaves_what_is_wanted(lengths_and_keys: Arrivals, max_items: int) -> None:
    queue, entries = queue_of(lengths_and_keys, 10**9, max_items)
    queue.discard_unwanted(lambda entry: entry.number % 3 == 0)
    wanted = [entry for entry in entries if entry.number % 3 == 0]
    assert sorted(entry.number for entry in queue) == [entry.number for entry in wanted]
    assert {entry.number for entry in queue.oldest_of_each_key()} == {
        min(entry.number for entry in wanted if entry.key == key)
        for key in {entry.key for entry in wanted}
    }
    assert sorted(entry.number for batch in drain(queue) for entry in batch) == [
        entry.number for entry in wanted
    ]
