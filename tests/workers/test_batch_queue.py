"""The batch queue's rules, each stated as a property that holds for any arrivals."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from shared.tenants.plan import HEAVIEST
from workers.scheduling.batch_queue import IDLE_MAX, BatchQueue

BUDGET, LONGEST = 1000, 300
QUANTUM = BUDGET / HEAVIEST
"""The quantum for a tenant with weight 1."""


@dataclass(eq=False)
class Entry:
    number: int
    length: int
    key: str = ""
    tenant: str = "t"
    weight: float = 1.0
    deadline_s: float = 1e9

    def __len__(self) -> int:
        return 1

    @property
    def lengths(self) -> list[int]:
        return [self.length]

    @property
    def order(self) -> tuple[float, int]:
        return self.deadline_s, self.number

    def cut(self, start: int, stop: int) -> Entry:
        raise AssertionError("it has only one item")


lengths = st.integers(1, LONGEST)
WEIGHTS = (0.01, 0.3, 1.0, 2.0, 4.0, HEAVIEST)
weights = st.sampled_from(WEIGHTS)


def queue_of(entries: Iterable[Entry], max_items: int = 64) -> BatchQueue[Entry]:
    queue: BatchQueue[Entry] = BatchQueue(BUDGET, max_items)
    for entry in entries:
        queue.add(entry)
    return queue


def entries_of(
    tenant: str, lengths: Iterable[int], weight: float = 1.0, key: str = ""
) -> list[Entry]:
    return [Entry(n, length, key, tenant, weight) for n, length in enumerate(lengths)]


def drain(queue: BatchQueue[Entry], at_most: int = 64, spare: float = inf) -> list[list[Entry]]:
    batches = []
    while batch := queue.take(at_most, spare=spare):
        batches.append(batch)
    return batches


class Model(RuleBasedStateMachine):
    """Compares the queue with a list of waiting items, over any sequence of calls."""

    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.model: list[Entry] = []
        self.arrived = 0

    @initialize(budget=st.integers(1, 2000), max_items=st.integers(1, 12))
    def start(self, budget: int, max_items: int) -> None:
        self.queue: BatchQueue[Entry] = BatchQueue(budget, max_items)
        self.budget, self.max_items = budget, max_items

    @rule(
        target=waiting,
        length=lengths,
        key=st.sampled_from("abc"),
        tenant=st.sampled_from("tuvw"),
        weight=weights,
        deadline_s=st.integers(0, 9),
    )
    def add(self, length: int, key: str, tenant: str, weight: float, deadline_s: int) -> Entry:
        entry = Entry(self.arrived, length, key, tenant, weight, deadline_s)
        self.arrived += 1
        self.model.append(entry)
        self.queue.add(entry)
        return entry

    @rule(entry=waiting, tenant=st.sampled_from("tuvw"), deadline_s=st.integers(0, 9))
    def change(self, entry: Entry, tenant: str, deadline_s: int) -> None:
        if entry in self.model:
            entry.tenant, entry.deadline_s = tenant, deadline_s
            self.queue.update(entry)

    @rule(entry=consumes(waiting))
    def remove(self, entry: Entry) -> None:
        if entry in self.model:
            self.model.remove(entry)
            self.queue.remove(entry)

    @rule(divisor=st.integers(2, 4))
    def discard(self, divisor: int) -> None:
        self.model = [one for one in self.model if one.number % divisor]
        self.queue.discard_unwanted(lambda one: one.number % divisor > 0)

    @rule(
        at_most=st.integers(1, 12),
        room=st.sampled_from([1.0, 200.0, 1e9]),
        spare=st.sampled_from([0.0, 100.0, 1e9]),
        unwanted=st.sampled_from([None, 0, 1]),
    )
    def take(self, at_most: int, room: float, spare: float, unwanted: int | None) -> None:
        dropped = list[Entry]()

        def is_wanted(entry: Entry) -> bool:
            if entry.number % 5 == unwanted:
                dropped.append(entry)
            return entry.number % 5 != unwanted

        batch = self.queue.take(at_most, room=room, spare=spare, is_wanted=is_wanted)
        wanted = [one for one in self.model if one.number % 5 != unwanted]
        assert bool(batch) == bool(wanted)
        assert len(set(dropped)) == len(dropped)
        self.model = [one for one in self.model if one not in dropped]
        if batch:
            self.check(batch, min(at_most, self.max_items), min(room, self.budget))

    def check(self, batch: list[Entry], at_most: int, room: float) -> None:
        key, leader = batch[0].key, batch[0]
        assert {one.key for one in batch} == {key}
        assert len(batch) <= at_most
        # A single item over the budget still runs, on its own, because rejecting it is admission's
        # job.
        assert len(batch) == 1 or sum(one.length for one in batch) <= room
        of_leader = [one for one in self.model if one.tenant == leader.tenant]
        assert leader is min(of_leader, key=lambda one: one.order), "its tenant's first"
        for tenant in {one.tenant for one in batch}:
            taken = [one for one in batch if one.tenant == tenant]
            could = [one for one in self.model if one.tenant == tenant and one.key == key]
            assert taken == sorted(could, key=lambda one: one.order)[: len(taken)]
        for one in batch:
            self.model.remove(one)  # fails if it was already taken

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "queue"):
            assert set(self.queue) == set(self.model)
            assert len(self.queue) == len(self.model)
            assert all(one in self.queue for one in self.model)
            firsts = [one.order for one in self.model]
            earliest = self.queue.earliest()
            assert earliest is None or earliest.order in firsts

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            for batch in drain(self.queue):
                self.check(batch, self.max_items, self.budget)
            assert not self.model


TestModel = Model.TestCase


class Together:
    """Items that arrived together, each with a number."""

    deadline_s = 1e9

    def __init__(self, tenant: str, key: str, lengths: list[int], numbers: list[int]) -> None:
        self.tenant, self.key = tenant, key
        self.weight = {"t": 1.0, "u": 0.5, "v": 2.0}[tenant]
        self.lengths, self.numbers = lengths, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def cut(self, start: int, stop: int) -> Together:
        some = Together(self.tenant, self.key, self.lengths[start:stop], self.numbers[start:stop])
        del self.lengths[start:stop], self.numbers[start:stop]
        return some


class PartsAgainstItems(RuleBasedStateMachine):
    """Batches are the same as if each item were queued separately."""

    def __init__(self) -> None:
        super().__init__()
        # With this quantum and these weights, sums are exact in any order.
        self.parts: BatchQueue[Together] = BatchQueue(int(HEAVIEST), 64)
        self.items: BatchQueue[Together] = BatchQueue(int(HEAVIEST), 64)
        self.arrived = count()

    @rule(
        tenant=st.sampled_from("tuv"),
        key=st.sampled_from("ab"),
        length=st.integers(1, 150),
        items=st.integers(1, 40),
    )
    def add(self, tenant: str, key: str, length: int, items: int) -> None:
        lengths = [length + number % 3 for number in range(items)]
        numbers = [next(self.arrived) for _ in lengths]
        for number, length in zip(numbers, lengths, strict=True):
            self.items.add(Together(tenant, key, [length], [number]))
        self.parts.add(Together(tenant, key, lengths, numbers))

    @rule(
        at_most=st.integers(1, 80),
        room=st.sampled_from([1.0, 200.0, inf]),
        spare=st.sampled_from([0.0, 100.0, inf]),
    )
    def take(self, at_most: int, room: float, spare: float) -> None:
        taken, expected = (
            [
                number
                for part in queue.take(at_most, room=room, spare=spare)
                for number in part.numbers
            ]
            for queue in (self.parts, self.items)
        )
        assert taken == expected

    @rule(at_most=st.integers(1, 10), room=st.integers(1, BUDGET))
    def take_in_turn(self, at_most: int, room: int) -> None:
        taken, expected = (
            [part.numbers for part in queue.take_in_turn(at_most, room)]
            for queue in (self.parts, self.items)
        )
        assert taken == expected

    @invariant()
    def agree(self) -> None:
        assert len(self.parts) == len(self.items)
        assert self.parts.is_full == self.items.is_full


TestPartsAgainstItems = PartsAgainstItems.TestCase


def difference_of_rivals(rng: random.Random, weight: tuple[float, float], keys: str) -> list[float]:
    """Two tenants whose items are always waiting, and others that come and go.

    Returns work_0 / weight_0 - work_1 / weight_1 after each item.
    """
    queue: BatchQueue[Entry] = BatchQueue(BUDGET, 16)
    arrived, left, apart = count(), [70, 70], [0.0]

    def add(tenant: str, weight: float) -> None:
        length = rng.choice([1, LONGEST, rng.randint(1, LONGEST)])
        queue.add(Entry(next(arrived), length, rng.choice(keys), tenant, weight))

    for number in [0, 1] * 70:
        add(f"rival {number}", weight[number])
    while True:
        for _ in range(rng.randint(0, 3)):
            add(f"other {rng.randint(0, 4)}", rng.choice(WEIGHTS))
        for one in queue.take(rng.randint(1, 16)):
            if one.tenant.startswith("rival"):
                rival = int(one.tenant[-1])
                work = one.length / weight[rival]
                apart.append(apart[-1] + (work if rival == 0 else -work))
                left[rival] -= 1
                if not left[rival]:
                    return apart


def test_a_tenant_that_loses_its_turns_changes_nothing_for_the_others() -> None:
    """Neither one that arrives later nor the loser itself makes up for its turns afterward."""
    queue: BatchQueue[Entry] = BatchQueue(BUDGET, 16)
    arrived, held_up = count(), {"loser"}

    def add(tenant: str) -> None:
        for _ in range(600):
            queue.add(Entry(next(arrived), 1, "a", tenant, 1.0))

    def take(items: int) -> Counter[str]:
        taken: list[Entry] = []
        while len(taken) < items:
            taken += queue.take_in_turn(1, inf, may_take=lambda entry: entry.tenant not in held_up)
        return Counter(entry.tenant for entry in taken)

    add("loser")
    add("early")
    assert take(300) == {"early": 300}
    add("late")
    of_two = take(300)
    assert abs(of_two["early"] - of_two["late"]) <= 2 * QUANTUM + 2
    held_up.clear()
    of_three = take(300)
    assert max(of_three.values()) - min(of_three.values()) <= 2 * QUANTUM + 2


@pytest.mark.parametrize("keys", ["a", "abc"])
@given(seed=st.integers(0, 2**32), weight=st.tuples(weights, weights))
def test_two_tenants_that_wait_all_the_time_get_work_by_their_weights(
    seed: int, weight: tuple[float, float], keys: str
) -> None:
    """Over any interval, work deviates from the weights by no more than the documented bound."""
    apart = difference_of_rivals(random.Random(seed), weight, keys)
    ahead = LONGEST + (BUDGET if len(keys) > 1 else 0)
    bound = 2 * QUANTUM + ahead / weight[0] + ahead / weight[1]
    assert max(apart) - min(apart) <= bound * (1 + 1e-9)


@given(
    st.lists(st.tuples(weights, st.lists(lengths, min_size=1, max_size=30)), max_size=5),
    st.integers(0, 20),
    st.integers(1, 16),
    st.data(),
)
def test_newcomer_waits_for_a_bounded_part_of_the_work_of_others(
    others: list[tuple[float, list[int]]], turns: int, at_most: int, data: st.DataObject
) -> None:
    queue = queue_of(
        one
        for number, (weight, lengths) in enumerate(others)
        for one in entries_of(f"other {number}", lengths, weight)
    )
    for _ in range(turns):
        queue.take(at_most)
    newcomer = Entry(0, data.draw(lengths), tenant="newcomer", weight=data.draw(weights))
    queue.add(newcomer)
    for number in range(3):  # later arrivals come after it
        queue.add(Entry(0, data.draw(lengths), tenant=f"late {number}", weight=data.draw(weights)))
    work: dict[str, float] = defaultdict(float)
    order = [one for batch in drain(queue, at_most) for one in batch]
    for one in order[: order.index(newcomer)]:
        work[one.tenant] += one.length
    for number, (weight, _) in enumerate(others):
        assert work[f"other {number}"] <= 2 * QUANTUM * weight + LONGEST
    assert not any(name.startswith("late") for name in work)


def test_keys_gain_a_tenant_nothing() -> None:
    """One tenant sends each item with a different key, so each leads a batch; the other uses one
    key.
    """
    queue = queue_of([])
    work = {"many": 0, "one": 0}
    for number in range(400):
        queue.add(Entry(number, 100, f"key {number}", "many"))
        queue.add(Entry(number, 100, "", "one"))
    for _ in range(200):
        for one in queue.take(64):
            work[one.tenant] += one.length
    assert abs(work["many"] - work["one"]) <= 2 * (QUANTUM + BUDGET + 100)
    assert min(work.values()) > 5 * BUDGET


@pytest.mark.parametrize("attackers", [1, 5])
def test_no_key_starves(attackers: int) -> None:
    """This holds no matter how many items with other keys or from other tenants arrive first."""
    queue = queue_of([])
    for number in range(40):
        queue.add(Entry(number, 10, f"key {number % 7}", f"attacker {number % attackers}"))
    victim = Entry(0, LONGEST, "victim", "victim")
    queue.add(victim)
    for turn in range(2 * attackers + 1):
        if victim in queue.take(16):
            return
        for number in range(16):
            queue.add(Entry(turn, 10, f"key {number % 7}", f"attacker {number % attackers}"))
            queue.add(Entry(turn, 10, f"key {number % 7}", f"newcomer {turn} {number}"))
    pytest.fail("each other tenant may lead once in this round and once in the next")


def test_sending_one_item_at_a_time_gains_nothing() -> None:
    """A tenant's excess work is remembered while it has no items in the queue."""
    queue = queue_of(entries_of("steady", [10] * 2000))
    work = {"steady": 0, "single": 0}
    for turn in range(300):
        if not any(one.tenant == "single" for one in queue):
            queue.add(Entry(turn, LONGEST, tenant="single"))
        for one in queue.take(1):
            work[one.tenant] += one.length
    assert work["single"] - work["steady"] <= 2 * QUANTUM + LONGEST + 10


def test_idle_tenant_keeps_no_deficit() -> None:
    """A tenant that was idle for a long time gets its share from now on, but nothing extra."""
    queue = queue_of([*entries_of("away", [1]), *entries_of("busy", [10] * 1000)])
    for _ in range(5):
        queue.take(64)
    for entry in entries_of("away", [10] * 100):
        queue.add(entry)
    taken = [one.tenant for one in queue.take(64)]
    assert abs(taken.count("away") - taken.count("busy")) <= 2


def test_memory_is_bounded_whatever_tenants_are_called() -> None:
    queue = queue_of(entries_of("busy", [1] * 40))
    for number in range(5 * IDLE_MAX):
        queue.add(Entry(number, LONGEST, f"key {number}", f"tenant {number}"))
        queue.take(1)
        assert queue.tenants <= len(queue) + IDLE_MAX + 1
    drain(queue)
    queue.add(Entry(0, 1))
    assert queue.tenants == 1


def test_tenant_with_a_long_queue_does_not_lengthen_the_batch_of_another() -> None:
    queue = queue_of(entries_of("noisy", [100] * 50))
    assert len(queue.take(64, spare=50)) == 10, "alone it gets the whole budget"
    queue.add(Entry(0, 20, tenant="quiet"))
    batch = queue.take(64, spare=50)
    assert {one.tenant for one in batch} == {"noisy", "quiet"}
    assert sum(one.length for one in batch) <= 20 + 100 + 100
    assert len(queue.take(64, spare=50)) == 10


def test_batches_are_full_where_nobody_has_a_long_queue() -> None:
    queue = queue_of(
        one for n in range(30) for one in entries_of(f"tenant {n}", [50] * (1 + n % 3))
    )
    sizes = [len(batch) for batch in drain(queue, spare=0)]
    assert sizes == [20, 20, 20]


def test_deadlines_order_a_tenants_items_and_arrival_those_of_equal_deadline() -> None:
    entries = [Entry(n, 10, deadline_s=deadline) for n, deadline in enumerate([5, 3, 5, 1, 3])]
    queue = queue_of(entries)
    assert [one.number for one in queue.take(64)] == [3, 1, 4, 0, 2]


def test_item_whose_deadline_or_tenant_changes_is_filed_again() -> None:
    first, second = entries_of("a", [10, 10])
    queue = queue_of([first, second])
    second.deadline_s = 1.0
    queue.update(second)
    assert queue.take(1) == [second]
    first.tenant = "b"
    queue.update(first)
    assert (queue.take(1), len(queue)) == ([first], 0)


def test_another_queues_batch_is_filled_with_what_is_compatible_and_has_room() -> None:
    queue = queue_of(
        [*entries_of("a", [10, 10]), *entries_of("b", [10, 30]), *entries_of("c", [1], key="other")]
    )
    batch = [Entry(0, 500)]
    queue.fill(batch, room=35)
    assert [one.tenant for one in batch[1:]] == ["a", "b", "a"]
    assert len(queue) == 2
    queue.fill(batch, room=29)
    assert len(queue) == 2


def test_first_can_be_chosen_and_is_charged() -> None:
    queue = queue_of([*entries_of("a", [100] * 30), *entries_of("b", [100] * 30)])
    for entry in list(queue)[30:]:
        entry.deadline_s = 5.0
        queue.update(entry)
    urgent = 0
    while (first := queue.earliest()) is not None and first.tenant == "b":
        assert queue.take(1, first=first) == [first]
        urgent += 1
    assert urgent == BUDGET // 100, "it may run ahead of its turn by one batch"
    assert {one.tenant for one in queue.take(5)} == {"a"}
