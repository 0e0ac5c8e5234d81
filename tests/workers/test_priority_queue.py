"""Interactive work runs ahead of `batch` priority work, which never stops entirely.

An item that kills its model process is eventually abandoned, and every other item gets a result.
"""

from __future__ import annotations

from itertools import combinations
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.broker.transport import ReceivedMessage
from shared.messages import Envelope, Item, Job, JobBody
from shared.models.tasks.embedding import TextInput
from shared.tenants.plan import Priority
from workers.models.base import PreparedText
from workers.scheduling.job import PulledJob, QueuedItem
from workers.scheduling.priority_queue import (
    BATCH_SHARE,
    FILL_S,
    RECENT_S,
    TURN_S,
    URGENT_TURN,
    PriorityQueue,
)

NOW_S = 1000.0


def waiter(
    tenant: str = "t",
    priority: Priority = "interactive",
    deadline_s: float = 1e9,
    start_by_s: float = 0.0,
) -> tuple[PulledJob, Item]:
    item = Item(0, TextInput("a cat"))
    envelope = Envelope(
        request_id="r", part=0, model="m", tenant=tenant, priority=priority, deadline_s=deadline_s,
        start_by_s=start_by_s, received_at_s=0.0, published_at_s=0.0,
    )  # fmt: skip
    message = ReceivedMessage(b"", {}, "1", "1")
    return PulledJob(Job(envelope, JobBody([item])), message, None, 0.0), item  # type: ignore[arg-type]


def text(
    length: int,
    priority: Priority = "interactive",
    queued_at_s: float = NOW_S,
    *,
    room: float = 0,
    **fields: float,
) -> QueuedItem:
    prepared = PreparedText(key="", length=length, room=int(room), ids=b"")
    return QueuedItem(prepared, None, queued_at_s, [waiter(priority=priority, **fields)])  # type: ignore[arg-type]


class Priorities:
    """A model process that computes `speed` units of work per second, and a clock."""

    def __init__(self, budget: int = 1000, speed: float = 10_000.0, fixed_s: float = 0.0) -> None:
        self.queue = PriorityQueue(budget, max_items=64)
        self.speed, self.now_s = speed, NOW_S
        for work in (1, budget):
            self.queue.observe_batch([text(work)], fixed_s + work / speed)

    def add(
        self, count: int, length: int, priority: Priority = "interactive", **fields: float
    ) -> None:
        for _ in range(count):
            self.queue.add(text(length, priority, self.now_s, **fields))

    def run(self) -> dict[str, int]:
        """Runs the next batch. Returns the work, keyed by priority."""
        batch = self.queue.take(1, lambda queued: True, self.now_s)
        work = {"interactive": 0, "batch": 0}
        for queued in batch:
            work[queued.priority] += queued.length
        self.now_s += sum(work.values()) / self.speed
        self.queue.batch_ended(batch)
        return work


def test_batch_priority_fills_the_room_that_hardly_lengthens_an_interactive_batch() -> None:
    priorities = Priorities()
    priorities.add(20, 10, "batch")
    priorities.add(10, 10)
    assert priorities.run() == {"interactive": 100, "batch": FILL_S * priorities.speed}


def test_batch_priority_waits_while_interactive_work_fills_the_budget() -> None:
    priorities = Priorities()
    priorities.add(20, 10, "batch")
    priorities.add(150, 10)
    assert priorities.run() == {"interactive": 640, "batch": 0}  # max_items


def test_batch_of_the_priority_is_short_while_there_is_interactive_traffic() -> None:
    priorities = Priorities()
    priorities.add(1, 10)
    priorities.run()
    priorities.add(300, 10, "batch")
    assert priorities.run()["batch"] == pytest.approx(TURN_S * priorities.speed, abs=10)
    priorities.now_s += RECENT_S
    assert priorities.run() == {"interactive": 0, "batch": 640}


@pytest.mark.parametrize("fixed_s", [0.0, 0.3])
@pytest.mark.parametrize("length", [50, 300, 2000])
def test_batch_priority_gets_a_small_share_of_the_work_while_interactive_items_wait(
    fixed_s: float, length: int
) -> None:
    """This holds even if the shortest batch takes longer than a turn may, or an item is larger than
    a batch.
    """
    priorities, work = Priorities(fixed_s=fixed_s), {"interactive": 0, "batch": 0}
    priorities.add(800, length, "batch")
    priorities.add(20, 50)
    for _ in range(500):
        priorities.add(20, 50)
        for priority, taken in priorities.run().items():
            work[priority] += taken
    share = work["batch"] / sum(work.values())
    assert share == pytest.approx(BATCH_SHARE, rel=0.15)


def test_job_of_batch_priority_gets_a_turn_when_its_deadline_calls_for_it() -> None:
    priorities = Priorities()
    priorities.add(50, 500)
    priorities.add(5, 500, "batch", deadline_s=1e6)
    for left_s in (0.45, 0.8, 1.15):
        priorities.add(1, 500, "batch", deadline_s=priorities.now_s + left_s)
    turns = "".join("b" if priorities.run()["batch"] else "i" for _ in range(3 * URGENT_TURN))
    # A full batch takes 0.1 s, so a deadline within 0.2 s makes it urgent.
    assert turns.count("b") == 3, turns
    assert not any("b" in turns[i + 1 : i + URGENT_TURN] for i, t in enumerate(turns) if t == "b")


def test_queue_limit_counts_as_a_deadline() -> None:
    assert text(1, deadline_s=50.0, start_by_s=20.0).deadline_s == 20.0


def test_item_of_batch_priority_that_an_interactive_job_joins_is_interactive() -> None:
    priorities = Priorities()
    priorities.add(1, 900)
    queued = text(500, "batch")
    priorities.queue.add(queued)
    queued.waiters.append(waiter("other"))
    priorities.queue.update(queued)
    assert queued.tenant == "t", "the first pays"
    assert [priorities.run(), priorities.run()] == [
        {"interactive": 900, "batch": 0},
        {"interactive": 500, "batch": 0},
    ]


def test_items_that_a_second_job_joins_stay_ahead_of_later_items() -> None:
    queue = PriorityQueue(10, max_items=64)
    items = [text(10) for _ in range(4)]
    queue.add(*items)
    queue.add(later := text(10))
    for joined in (items[1], items[2]):
        joined.waiters.append(waiter())
        queue.update(joined)
    order = [queue.take(1, lambda queued: True, NOW_S) for _ in range(5)]
    assert order == [[items[1]], [items[2]], [items[0]], [items[3]], [later]]


def test_item_whose_interactive_waiters_leave_is_of_batch_priority_again() -> None:
    priorities = Priorities()
    queued = text(500, "batch")
    queued.waiters.append(waiter("other"))
    priorities.queue.add(queued)
    queued.waiters.pop()
    priorities.queue.discard_unwanted(lambda queued: True)
    priorities.add(1, 900)
    assert [priorities.run(), priorities.run()] == [
        {"interactive": 900, "batch": 0},
        {"interactive": 0, "batch": 500},
    ]


def test_item_whose_first_waiter_leaves_is_charged_to_the_next() -> None:
    priorities = Priorities()
    queued = text(500)
    queued.waiters.append(waiter("other"))
    priorities.queue.add(queued)
    priorities.add(40, 500)
    queued.waiters.pop(0)
    priorities.queue.discard_unwanted(lambda queued: True)
    taken = [priorities.queue.take(1, lambda one: True, NOW_S) for _ in range(2)]
    assert queued in [one for batch in taken for one in batch]


def test_items_that_are_not_wanted_leave_their_room_to_others() -> None:
    priorities = Priorities()
    priorities.add(20, 100)
    unwanted = set(list(priorities.queue)[:5])
    batch = priorities.queue.take(1, lambda queued: queued not in unwanted, NOW_S)
    assert (len(batch), len(priorities.queue)) == (10, 5)


class Trial:
    """Waiting items, and a model process that runs everything it is given until nothing is left.

    Args:
        size: number of initial items, which fill one batch.
        poisons: the items that kill the process.
        killed_runs: runs that are killed by something external.
    """

    def __init__(self, size: int, poisons: set[int], killed_runs: set[int]) -> None:
        self.waiting = PriorityQueue(budget=10**6, max_items=size)
        self.answered: list[int] = []
        self.given_up: list[int] = []
        self.deaths = self.runs = 0
        self._poisons = poisons
        self._killed_runs = killed_runs
        for number in range(size):
            self.add(number)

    def add(self, number: int) -> None:
        prepared = PreparedText(key="", length=1, ids=number.to_bytes(4, "little"))
        self.waiting.add(QueuedItem(prepared, None, float(number), [waiter()]))

    def run(self) -> None:
        batch = self.waiting.take(1, lambda entry: True, NOW_S)
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
    """The maximum number of deaths caused by one poison item among `size` items: one per halving,
    and one or two more when it runs on its own.
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


@pytest.mark.parametrize("size", range(1, 9))
def test_a_kill_by_another_hand_costs_no_other_item_its_answer(size: int) -> None:
    for count in range(3):
        for poisons in map(set, combinations(range(size), count)):
            undisturbed = Trial(size, poisons, set())
            undisturbed.run_all()
            for killed_run in range(1, undisturbed.runs + 1):
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
    taken = trial.waiting.take(2, lambda entry: True, NOW_S)
    assert len(taken) == 2
    assert len(trial.waiting) == 0
    trial.waiting.batch_ended(taken)
    assert len(trial.waiting) == 2


def joined(
    queue: PriorityQueue, inside: list[QueuedItem], now_s: float = NOW_S
) -> list[QueuedItem]:
    return queue.admit(inside, 1, lambda queued: True, now_s)


def test_who_joins_has_room_and_is_next_in_turn() -> None:
    queue = PriorityQueue(100, max_items=3)
    small, large, other = text(30), text(80), text(10)
    for queued in (small, large, other):
        queue.add(queued)
    assert joined(queue, []) == [small], "the large one does not fit, and lets nobody pass"
    assert joined(queue, [small]) == []
    queue.batch_ended([small])
    assert joined(queue, []) == [large, other]


def test_places_that_are_taken_let_nobody_join() -> None:
    queue = PriorityQueue(100, max_items=2)
    for _ in range(3):
        queue.add(text(1))
    inside = joined(queue, [])
    assert len(inside) == 2
    assert joined(queue, inside) == []
    queue.batch_ended(inside[:1])
    assert len(joined(queue, inside[1:])) == 1


def test_batch_priority_leaves_places_to_interactive_items() -> None:
    queue = PriorityQueue(1000, max_items=8)
    first = text(10)
    queue.add(first)
    for _ in range(8):
        queue.add(text(10, "batch"))
    inside = joined(queue, [])
    assert [queued.priority for queued in inside] == ["interactive", "batch", "batch"]
    assert joined(queue, inside) == []
    quiet_s = NOW_S + RECENT_S + 1
    assert len(joined(queue, inside, quiet_s)) == 5


def test_nothing_joins_a_suspect_nor_while_one_waits() -> None:
    queue = PriorityQueue(1000, max_items=8)
    queue.add(text(10))
    inside = joined(queue, [])
    suspect, good = text(10), text(10)
    suspect.deaths = 1
    queue.add(suspect)
    queue.add(good)
    assert joined(queue, inside) == []
    queue.batch_ended(inside)
    assert joined(queue, []) == [suspect]
    assert joined(queue, [suspect]) == []
    queue.batch_ended([suspect])
    assert joined(queue, []) == [good]


def test_an_item_larger_than_a_halved_budget_runs_alone() -> None:
    queue = PriorityQueue(100, max_items=4)
    for _ in range(3):
        queue.adjust_budget(was_short=True)
    large = text(80)
    queue.add(large)
    queue.add(text(5))
    assert joined(queue, []) == [large]


def test_beside_an_item_larger_than_the_whole_budget_only_small_ones_join() -> None:
    queue = PriorityQueue(100, max_items=4)
    oversized, half, small, late = text(101), text(50), text(20), text(10)
    for queued in (oversized, small, late):
        queue.add(queued)
    assert joined(queue, []) == [oversized, small]
    assert joined(queue, [oversized, small]) == []
    queue.batch_ended([small])
    assert joined(queue, [oversized]) == [late]
    queue.add(half)
    assert joined(queue, [oversized]) == []
    queue.batch_ended([oversized])
    assert joined(queue, []) == [half]


def test_room_and_not_work_decides_who_joins() -> None:
    """A long item that runs with others takes no more room than a short one of the same size."""
    queue = PriorityQueue(100, max_items=4)
    items = [text(length, room=40) for length in (90, 90, 5)]
    for queued in items:
        queue.add(queued)
    assert len(joined(queue, [])) == 2
