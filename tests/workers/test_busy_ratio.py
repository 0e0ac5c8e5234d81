"""The fraction of time that model processes are busy, as the autoscaler reads it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.plan import Priority
from tests.clock import Clock
from workers.metrics import FADE_S, BusyRatio


def test_worker_without_work_is_idle() -> None:
    busy = BusyRatio(1, Clock())
    assert (busy.read("interactive"), busy.read("batch")) == (0.0, 0.0)


def test_batch_counts_while_it_runs() -> None:
    clock = Clock()
    busy = BusyRatio(1, clock)
    busy.start(["interactive"])
    clock.now_s += FADE_S
    assert busy.read("interactive") == pytest.approx(1 - math.exp(-1), abs=1e-3)
    clock.now_s += 20 * FADE_S
    assert busy.read("interactive") == 1.0


def test_idle_worker_comes_to_exactly_nothing() -> None:
    # Otherwise the model would never be scaled to zero.
    clock = Clock()
    busy = BusyRatio(1, clock)
    parts = busy.start(["interactive"])
    clock.now_s += 3600
    busy.end(parts)
    clock.now_s += 8 * FADE_S
    assert busy.read("interactive") == 0.0


def test_looking_changes_nothing() -> None:
    clock, looked_at_clock = Clock(), Clock()
    busy, looked_at = BusyRatio(1, clock), BusyRatio(1, looked_at_clock)
    for one in (busy, looked_at):
        one.start(["interactive"])
    for _ in range(100):
        looked_at_clock.now_s += 0.5
        looked_at.read("interactive")
    clock.now_s += 50
    assert looked_at.read("interactive") == busy.read("interactive")


def test_priorities_have_their_parts_of_a_batch() -> None:
    clock = Clock()
    busy = BusyRatio(2, clock)
    busy.start(["interactive", "batch", "batch", "batch"])
    clock.now_s += 3600
    assert (busy.read("interactive"), busy.read("batch")) == (0.125, 0.375)


def test_what_was_spare_is_not_busy() -> None:
    clock = Clock()
    busy = BusyRatio(2, clock)
    parts = busy.start(["interactive", "interactive", "interactive", "batch"])
    for _ in range(1000):
        clock.now_s += 1
        busy.spare(parts, 0.8)
    # A fifth of one process's time, averaged over two processes, less than one report later.
    # Callers account for three-quarters of the time.
    assert busy.read("interactive") == pytest.approx(0.2 / 2 * 3 / 4, abs=0.01)
    assert busy.read("batch") == pytest.approx(0.2 / 2 / 4, abs=0.01)
    clock.now_s += 1000
    assert busy.read("interactive") == pytest.approx(3 / 8), "nothing more was spare"


PRIORITIES = st.sampled_from(["interactive", "batch"])


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.lists(PRIORITIES, min_size=1, max_size=9),
            st.floats(0, 100),
            st.floats(0, 1),
        ),
        max_size=40,
    )
)
def test_one_process_is_never_more_than_busy(
    runs: list[tuple[float, list[Priority], float, float]],
) -> None:
    clock = Clock()
    busy = BusyRatio(1, clock)
    for idle_s, priorities, run_s, spare in runs:
        clock.now_s += idle_s
        parts = busy.start(priorities)
        clock.now_s += run_s
        busy.spare(parts, spare * run_s)
        assert min(busy.read("interactive"), busy.read("batch")) >= 0.0
        busy.end(parts)
        both = busy.read("interactive") + busy.read("batch")
        assert 0.0 <= both <= 1.001
    clock.now_s += 100 * FADE_S
    assert (busy.read("interactive"), busy.read("batch")) == (0.0, 0.0)
