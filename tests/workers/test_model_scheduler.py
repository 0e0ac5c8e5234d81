"""The choice of which model runs next: each rule, and a bound on waiting under any traffic."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.model_scheduler import (
    MIN_WAIT_S,
    SWITCH_SHARE,
    URGENT_SHARE,
    Idle,
    ModelScheduler,
)

NEVER_S = float("inf")


@dataclass
class Line:
    """A queue of arrival times; a batch takes up to `size` of them."""

    size: int = 4
    arrivals: deque[float] = field(default_factory=deque)
    deadlines: list[float] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.arrivals)

    @property
    def oldest_s(self) -> float:
        return self.arrivals[0]

    def earliest_deadline_s(self, after_s: float) -> float:
        return min((one for one in self.deadlines if one >= after_s), default=NEVER_S)

    def take(self) -> None:
        for _ in range(min(self.size, len(self.arrivals))):
            self.arrivals.popleft()


def line(*arrivals: float, deadlines: tuple[float, ...] = ()) -> Line:
    return Line(arrivals=deque(arrivals), deadlines=list(deadlines))


def scheduler(*load_s: float, processes: int = 1) -> ModelScheduler:
    made = ModelScheduler(len(load_s), processes)
    made.update_load_times(dict(enumerate(load_s)))
    return made


def test_nothing_waits() -> None:
    assert scheduler(1, 1).choose({0}, 0.0, [line(), line()], 5.0) == Idle(None)


def test_what_is_resident_runs_before_what_is_not() -> None:
    assert scheduler(1, 1).choose({1}, 0.0, [line(0.0, 0.0, 0.0), line(1.0)], 1.0) == 1


def test_residents_take_turns() -> None:
    made, lines, taken = scheduler(1, 1, 1), [line(*[0.0] * 9), line(*[0.0] * 9), line()], []
    for step in range(4):
        choice = made.choose({0, 1}, 0.0, lines, step / 10)
        assert isinstance(choice, int)
        made.batch_started(choice, step / 10)
        taken.append(choice)
    assert taken == [0, 1, 0, 1]


def test_a_model_that_is_not_resident_is_due_after_the_wait() -> None:
    made = scheduler(0.5, 0.7)
    wait_s = 1.2 / SWITCH_SHARE
    assert made.switch_wait_s == pytest.approx(wait_s)
    lines = [line(1.0), line(1.0)]
    assert made.choose({0}, 1.0, lines, 0.99 + wait_s) == 0
    made.batch_started(0, 0.99 + wait_s)
    assert made.choose({0}, 1.0, lines, 1.01 + wait_s) == 1


def test_more_processes_shorten_the_wait_to_its_floor() -> None:
    assert scheduler(1, 1, processes=2).switch_wait_s == pytest.approx(1 / SWITCH_SHARE)
    assert scheduler(0, 0).switch_wait_s == MIN_WAIT_S


def test_a_model_that_another_process_serves_is_not_due() -> None:
    made = scheduler(1, 1)
    made.batch_started(1, 99.0)
    assert made.choose({0}, 0.0, [line(99.5), line(0.0)], 100.0) == 0


def test_an_idle_process_switches_once_waiting_costs_more_than_loading() -> None:
    made = scheduler(1, 1)
    assert made.choose({0}, 10.0, [line(), line(4.0)], 10.0) == Idle(11.0)
    assert made.choose({0}, 10.0, [line(), line(4.0)], 11.0) == 1
    assert made.choose({0}, 10.0, [line(), line(*[4.0] * 10)], 10.0) == Idle(10.1)
    assert made.choose({0}, 10.0, [line(), line(12.0)], 12.5) == Idle(13.0)


def test_a_deadline_that_can_be_met_is_due_earlier() -> None:
    made = scheduler(1, 1)
    made.batch_finished(0.5)
    lines = [line(0.0), line(0.0, deadlines=(10.0,))]
    assert made.choose({0}, 0.0, lines, 7.9) == 0
    assert made.choose({0}, 0.0, lines, 8.0) == 1
    assert made.choose({0}, 0.0, lines, 9.5) == 0, (
        "loading takes longer than is left: nobody gains by a switch"
    )


def test_deadlines_may_not_take_more_than_their_share() -> None:
    made = scheduler(1, 1)
    made.batch_started(1, 10.0)
    lines = [line(10.0), line(10.0, deadlines=(14.5,))]
    assert made.choose({0}, 0.0, lines, 13.0) == 0
    assert made.choose({0}, 0.0, lines, 10.0 + 2 / URGENT_SHARE) == 0, "by then it cannot be met"
    lines[1].deadlines = [15.0]
    assert made.choose({0}, 0.0, lines, 10.0 + 2 / URGENT_SHARE) == 1


traffic = st.lists(
    st.tuples(st.integers(0, 3), st.floats(0, 3), st.none() | st.floats(0.1, 40)),
    min_size=1,
    max_size=150,
)


@given(
    traffic,
    st.lists(st.floats(0.01, 5), min_size=4, max_size=4),
    st.integers(1, 3),
    st.floats(0.01, 2),
)
def test_once_due_a_model_waits_for_one_batch_of_each_other_at_most(
    arrivals: list[tuple[int, float, float | None]], load_s: list[float], room: int, batch_s: float
) -> None:
    """One process has `room` for some of four models and drops the least recently used, under any
    traffic with deadlines.
    """
    made, lines, resident = scheduler(*load_s), [Line() for _ in load_s], list(range(room))
    due_since: dict[int, int] = {}
    now_s = free_since_s = last_s = 0.0
    coming = deque[tuple[int, float, float | None]]()
    for model, gap_s, left_s in arrivals:
        last_s += gap_s
        coming.append((model, last_s, left_s))
    batches = 0
    while coming or any(one.waiting for one in lines):
        while coming and coming[0][1] <= now_s:
            model, arrived_s, left_s = coming.popleft()
            lines[model].arrivals.append(arrived_s)
            if left_s is not None:
                lines[model].deadlines.append(arrived_s + left_s)
        for model, one in enumerate(lines):
            if one.waiting and one.oldest_s + made.switch_wait_s <= now_s:
                due_since.setdefault(model, batches)
        choice = made.choose(resident, free_since_s, lines, now_s)
        if isinstance(choice, Idle):
            ends = [
                end_s
                for end_s in (choice.until_s, coming[0][1] if coming else None)
                if end_s is not None
            ]
            assert ends, "jobs wait and nobody will ever look again"
            assert min(ends) > now_s or min(ends) == pytest.approx(now_s)
            now_s = max(now_s + 1e-9, min(ends))
            continue
        others = batches - due_since.pop(choice, batches)
        assert others < len(lines), f"{others} batches of others ran after model {choice} was due"
        made.batch_started(choice, now_s)
        now_s += (0.0 if choice in resident else load_s[choice]) + batch_s
        resident = [*[model for model in resident if model != choice], choice][-room:]
        lines[choice].take()
        lines[choice].deadlines.clear()
        made.batch_finished(batch_s)
        free_since_s = now_s
        batches += 1


@given(st.floats(0.01, 1.0), st.integers(2, 4))
def test_full_queues_leave_no_more_than_the_share_to_switching(load_s: float, models: int) -> None:
    """All queues are always full, and only one model fits: the most expensive traffic."""
    made, resident, now_s, loading_s = scheduler(*[load_s] * models), {0}, 0.0, 0.0
    lines = [line(*[0.0] * 1000) for _ in range(models)]
    while now_s < 40 * made.switch_wait_s:
        choice = made.choose(resident, now_s, lines, now_s)
        assert isinstance(choice, int)
        made.batch_started(choice, now_s)
        if choice not in resident:
            loading_s += load_s
            now_s += load_s
        resident = {choice}
        now_s += made.switch_wait_s / 50
    assert loading_s <= 1.1 * SWITCH_SHARE * now_s


@pytest.mark.parametrize("load_s", [0.05, 0.5, 3.0])
def test_nine_to_one_leaves_nine_tenths_to_computing_and_the_rare_within_the_bound(
    load_s: float,
) -> None:
    """There is room for one of two models; the common model's queue is never empty, and the rare
    one gets a tenth of the traffic.
    """
    batch_s, item_s = 0.1, 0.1 / 16
    made, lines = scheduler(load_s, load_s), [line(*[0.0] * 10**6), Line(size=16)]
    resident, now_s, loading_s, next_s, waits = {0}, 0.0, 0.0, 0.0, list[float]()
    while now_s < 40 * made.switch_wait_s:
        while next_s <= now_s:
            lines[1].arrivals.append(next_s)
            next_s += 10 * item_s
        choice = made.choose(resident, now_s, lines, now_s)
        assert isinstance(choice, int)
        made.batch_started(choice, now_s)
        if choice not in resident:
            loading_s, now_s, resident = loading_s + load_s, now_s + load_s, {choice}
        if choice == 1:
            waits += [now_s - arrived_s for arrived_s in list(lines[1].arrivals)[:16]]
            lines[1].take()
        now_s += batch_s
        made.batch_finished(batch_s)
    assert loading_s <= 1.1 * SWITCH_SHARE * now_s
    first_s = made.switch_wait_s + batch_s + (load_s + batch_s) + load_s
    assert max(waits) <= 1.2 * first_s, (
        "what queued up behind the first job is a tenth of the traffic in that time"
    )
