"""The heap of due times."""

from functools import partial

from pubsub_emulator.state.timers import Timers


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_actions_run_in_order_of_their_due_time_not_before() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)
    timers.at(2, lambda: ran.append("late"))
    timers.at(1, lambda: ran.append("early"))
    timers.at(1, lambda: ran.append("second at once"))
    timers.run_due()
    assert ran == []
    clock.now_s = 2
    timers.run_due()
    assert ran == ["early", "second at once", "late"]
    assert timers.next_due_s is None


def test_cancelled_action_does_not_run() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)
    timer = timers.at(1, lambda: ran.append("never"))
    timers.at(2, lambda: ran.append("runs"))
    timer.cancel()
    timer.cancel()
    assert timers.next_due_s == 2
    clock.now_s = 3
    timers.run_due()
    assert ran == ["runs"]


def test_waiter_is_told_only_when_something_earlier_is_due() -> None:
    timers, wakes = Timers(Clock()), []
    timers.on_earlier = lambda: wakes.append(timers.next_due_s)
    timers.at(5, lambda: None)
    timers.at(7, lambda: None)
    timers.at(3, lambda: None)
    assert wakes == [5, 3]


def test_action_may_schedule_another_that_is_due() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)

    def chain() -> None:
        timers.at(0, lambda: ran.append("chained"))

    timers.at(0, chain)
    timers.run_due()
    assert ran == ["chained"]


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers(Clock())
    for _ in range(100_000):
        timers.at(60, lambda: None).cancel()
    assert len(timers) < 5_000


def test_rebuilding_keeps_what_is_alive() -> None:
    clock, ran = Clock(), list[int]()
    timers = Timers(clock)
    for number in range(5_000):
        timer = timers.at(number, partial(ran.append, number))
        if number % 10:
            timer.cancel()
    clock.now_s = 5_000
    timers.run_due()
    assert ran == list(range(0, 5_000, 10))
