"""Admission alone, with a clock of the test's own."""

import pytest

from api.admission import FIRST_GUESS_S, LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission
from shared.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_room_for_one_is_room_for_a_whole_request() -> None:
    admission = Admission(max_in_flight=10)
    admission.admit("m", 9)
    admission.admit("m", 2048)
    with pytest.raises(Overloaded):
        admission.admit("m", 1)
    admission.release("m", 2048, answered=True)
    admission.admit("m", 1)
    assert admission.in_flight == 10


def test_retry_is_told_from_measured_speed_and_backlog() -> None:
    clock = Clock()
    admission = Admission(max_in_flight=10, clock=clock)
    admission.admit("m", 20)
    assert admission.retry_after_s() == pytest.approx(20 * FIRST_GUESS_S)
    clock.now_s += 5.0
    admission.release("m", 10, answered=True)  # half a second for each
    assert admission.retry_after_s() == pytest.approx(10 * 0.5)


def test_given_up_items_say_nothing_about_speed() -> None:
    clock = Clock()
    admission = Admission(max_in_flight=10, clock=clock)
    admission.admit("m", 20)
    clock.now_s += 500.0
    admission.release("m", 10, answered=False)
    assert admission.retry_after_s() == pytest.approx(10 * FIRST_GUESS_S)


def test_idle_time_is_not_work() -> None:
    clock = Clock()
    admission = Admission(max_in_flight=10, clock=clock)
    for _ in range(30):
        clock.now_s += 1000.0
        admission.admit("m", 1)
        clock.now_s += 2.0
        admission.release("m", 1, answered=True)
    admission.admit("m", 4)
    assert admission.retry_after_s() == pytest.approx(8.0)


def test_the_model_that_is_done_first_makes_room() -> None:
    clock = Clock()
    admission = Admission(max_in_flight=10, clock=clock)
    admission.admit("slow", 10)
    clock.now_s += 30.0
    admission.release("slow", 5, answered=True)
    admission.admit("quick", 10)
    assert admission.retry_after_s() == pytest.approx(10 * FIRST_GUESS_S)


def test_retry_is_bounded() -> None:
    clock = Clock()
    admission = Admission(max_in_flight=10, clock=clock)
    assert admission.retry_after_s() == SHORTEST_RETRY_S
    admission.admit("m", 1000)
    clock.now_s += 1000.0
    admission.release("m", 1, answered=True)
    assert admission.retry_after_s() == LONGEST_RETRY_S
