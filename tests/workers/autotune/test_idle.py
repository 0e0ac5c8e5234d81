"""Waiting for the machine to be idle, on a scripted clock: two cores' idle seconds, sample by
sample.
"""

from collections.abc import Iterator

import pytest

from workers.autotune.search import await_quiet, idle_core_s

pytestmark = pytest.mark.slow


class Script:
    """A clock that each sleep advances, and how much of two cores is idle during each sleep."""

    def __init__(self, *shares: float) -> None:
        self._shares: Iterator[float] = iter(shares)
        self.now_s = 100.0
        self.idle_s = 50.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.idle_s += 2 * seconds * next(self._shares)

    def wait(self, limit_s: float = 5.0) -> bool:
        return await_quiet(
            2,
            limit_s=limit_s,
            idle_s=lambda: self.idle_s,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_two_quiet_samples_in_a_row_end_the_wait() -> None:
    script = Script(0.0, 1.0, 0.2, 0.9, 0.95, 0.0)
    assert script.wait()
    assert script.now_s == pytest.approx(100.0 + 5 * 0.3)


def test_the_wait_is_bounded() -> None:
    script = Script(*[0.5] * 100)
    assert not script.wait(limit_s=3.0)
    assert script.now_s <= 100.0 + 3.0 + 0.31


def test_where_nothing_tells_nothing_is_waited_for() -> None:
    assert await_quiet(2, idle_s=lambda: None, sleep=lambda seconds: None)


def test_this_machine_tells() -> None:
    idle = idle_core_s()
    assert idle is None or idle >= 0
