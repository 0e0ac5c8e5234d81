from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.models.device import CpuThreads, idle_s

pytestmark = pytest.mark.slow

STEP_S = 0.1


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """A process with four threads; the number of threads is restored afterward."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Machine:
    """Several cores, some of them idle, and one busy process."""

    def __init__(self, free: float) -> None:
        self.free = free
        self.is_told = True
        self.now_s = self.cpu_s = self.idle_s = 0.0
        self.threads = CpuThreads(lambda: self.now_s, lambda: self.cpu_s, lambda: self.idle_s)

    def compute(self, seconds: float) -> list[int]:
        """Computes for `seconds`. Returns torch's thread count at each step."""
        counts, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            with self.threads.computing():
                counts.append(torch.get_num_threads())
                self.now_s += STEP_S
                used = min(counts[-1], self.free)
                self.cpu_s += STEP_S * used
                self.idle_s += STEP_S * (self.free - used if self.is_told else 60)
        return counts

    def rest(self, seconds: float) -> None:
        self.now_s += seconds
        self.idle_s += seconds * self.free


def settled(free: float) -> Machine:
    """A machine that has computed long enough to determine how many cores are free."""
    machine = Machine(free)
    machine.compute(10)
    return machine


def test_free_cores_are_all_computed_on_after_the_first_look() -> None:
    machine = Machine(free=4)
    assert machine.compute(1)[0] == 1
    assert set(machine.compute(20)) == {4}


def test_a_little_beside_it_takes_no_thread() -> None:
    machine = settled(free=4)
    machine.free = 3.2
    assert set(machine.compute(20)) == {4}


def test_what_others_need_is_left_to_them_and_not_tried_again() -> None:
    machine = settled(free=4)
    machine.free = 2
    machine.compute(1)
    assert set(machine.compute(1000)) == {2}


def test_one_thread_is_left_whatever_else_runs() -> None:
    machine = settled(free=4)
    machine.free = 0.1
    machine.compute(1)
    assert set(machine.compute(1000)) == {1}


def test_a_quota_that_idle_cores_do_not_show_is_tried_each_minute_at_most() -> None:
    machine = settled(free=2)
    machine.is_told = False
    machine.compute(200)
    late = machine.compute(1000)
    assert 0 < len([count for count in late if count > 2]) / len(late) < 0.02


def test_cores_that_are_free_again_are_taken_in_seconds() -> None:
    machine = settled(free=4)
    machine.free = 1
    machine.compute(500)
    machine.free = 4
    machine.compute(5)
    assert set(machine.compute(20)) == {4}


def test_a_process_that_rested_has_the_threads_of_before() -> None:
    machine = settled(free=4)
    machine.rest(100)
    assert machine.compute(STEP_S) == [4]


def test_other_models_of_the_process_have_all_threads_between_and_after_a_failure() -> None:
    machine = settled(free=1)
    assert torch.get_num_threads() == 4
    with pytest.raises(ZeroDivisionError):
        fail_with_one_thread(machine.threads)
    assert torch.get_num_threads() == 4


def test_the_system_tells_how_long_cores_were_idle() -> None:
    before_s = idle_s()
    assert before_s > 0
    assert idle_s() >= before_s


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
    assert waiting == 0


def test_a_process_of_one_thread_is_left_alone() -> None:
    torch.set_num_threads(1)
    assert set(Machine(free=0.1).compute(20)) == {1}
