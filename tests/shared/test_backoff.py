"""Pauses between attempts grow, stay within their bounds, and differ from one another."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from shared.process.concurrency import add_jitter, backoff


@given(first_s=st.floats(0.001, 10), longest_s=st.floats(0.001, 100))
def test_pauses_stay_within_doubling_bounds(first_s: float, longest_s: float) -> None:
    for attempt, pause_s in enumerate(islice(backoff(first_s, longest_s), 40)):
        assert 0 <= pause_s <= min(first_s * 2**attempt, longest_s)


def test_pauses_use_their_whole_range() -> None:
    firsts = [next(backoff(1.0, 8.0)) for _ in range(500)]
    assert min(firsts) < 0.1
    assert max(firsts) > 0.9
    lasts = list(islice(backoff(1.0, 8.0), 500))[3:]
    assert max(lasts) > 7


def test_no_bound_is_no_pause() -> None:
    assert list(islice(backoff(0.0, 0.0), 3)) == [0, 0, 0]


@given(st.floats(0, 1000))
def test_jittered_period_is_at_most_a_tenth_shorter(period_s: float) -> None:
    assert 0.9 * period_s <= add_jitter(period_s) <= period_s
