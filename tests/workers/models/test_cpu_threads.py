from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.models.cpu_threads import CpuThreads

STEP_S = 0.1


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """A process of four threads, and leaves as many as there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Machine:
    """Cores of which some are free, and one process that computes."""

    def __init__(self, free: float) -> None:
        self.free = free
        self.now_s = self.cpu_s = 0.0
        self.threads = CpuThreads(lambda: self.now_s, lambda: self.cpu_s)

    def compute(self, seconds: float) -> list[int]:
        """Computes for so long. Returns the threads that torch had in each step."""
        counts, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            with self.threads.computing():
                counts.append(torch.get_num_threads())
                self.now_s += STEP_S
                self.cpu_s += STEP_S * min(counts[-1], self.free)
        return counts

    def rest(self, seconds: float) -> None:
        """Nothing is computed."""
        self.now_s += seconds


def test_free_cores_are_all_computed_on() -> None:
    assert set(Machine(free=4).compute(20)) == {4}


def test_a_little_beside_it_takes_no_thread() -> None:
    assert set(Machine(free=3.2).compute(20)) == {4}


def test_two_workers_on_the_same_cores_take_half_of_them_each() -> None:
    machine = Machine(free=2)
    assert machine.compute(1)[-1] == 2
    late = machine.compute(1000)
    assert late.count(4) / len(late) < 0.02
    assert set(late) == {2, 4}


def test_one_thread_is_left_whatever_else_runs() -> None:
    machine = Machine(free=0.1)
    assert machine.compute(1)[-1] == 1


def test_cores_that_are_free_again_are_taken_within_the_longest_pause() -> None:
    machine = Machine(free=1)
    machine.compute(500)
    machine.free = 4
    machine.compute(64)
    assert set(machine.compute(20)) == {4}


def test_a_burst_beside_it_is_forgotten_within_seconds() -> None:
    machine = Machine(free=1)
    machine.compute(1)
    machine.free = 4
    machine.compute(4)
    assert set(machine.compute(20)) == {4}


def test_a_process_that_rested_begins_with_all_threads() -> None:
    machine = Machine(free=1)
    machine.compute(1)
    machine.rest(100)
    assert machine.compute(STEP_S) == [4]


def test_other_models_of_the_process_have_all_threads_between_and_after_a_failure() -> None:
    machine = Machine(free=1)
    machine.compute(1)
    assert torch.get_num_threads() == 4
    with pytest.raises(ZeroDivisionError):
        fail_with_one_thread(machine.threads)
    assert torch.get_num_threads() == 4


def fail_with_one_thread(threads: CpuThreads) -> None:
    with threads.computing():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError


@given(most=st.integers(1, 8), free=st.floats(0, 16), seconds=st.floats(0.1, 100))
def test_there_are_one_to_all_threads_and_none_waits_for_a_core_for_long(
    most: int, free: float, seconds: float
) -> None:
    torch.set_num_threads(most)
    counts = Machine(free).compute(seconds)
    assert all(1 <= count <= most for count in counts)
    waiting = sum(count > 1 and count * 0.75 > free for count in counts)
    assert waiting <= 8 * (1 + seconds / 30)


def test_a_process_of_one_thread_is_left_alone() -> None:
    torch.set_num_threads(1)
    assert set(Machine(free=0.1).compute(20)) == {1}
