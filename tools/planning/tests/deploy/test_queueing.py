"""Known values from Erlang's formulas, and properties that hold for any number of servers."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_planning.deploy.sizing import erlang_c, late, mean_wait_s, servers_needed

needed = partial(servers_needed, late_share=0.001)
loads = st.floats(0.001, 200)


@pytest.mark.parametrize(
    ("servers", "load", "share"),
    [
        (1, 0.5, 0.5),  # M/M/1: the share of time during which the server is busy
        (2, 1.0, 1 / 3),
        (3, 2.0, 4 / 9),
        (10, 8.0, 0.4092),
    ],
)
def test_share_that_waits_is_erlangs(servers: int, load: float, share: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(share, abs=5e-5)


def test_waits_are_those_of_one_server() -> None:
    # M/M/1: P(W > t) = rho exp(-(1 - rho) t / s), mean wait rho s / (1 - rho).
    assert late(1, 0.8, service_s=2.0, wait_s=5.0) == pytest.approx(0.8 * math.exp(-0.2 * 5 / 2))
    assert mean_wait_s(1, 0.8, service_s=2.0) == pytest.approx(8.0)


def test_without_load_there_is_no_server() -> None:
    assert needed(0.0, 1.0, 1.0) == 0
    assert mean_wait_s(0, 0.0, 1.0) == 0.0


def test_too_few_servers_are_always_late() -> None:
    assert late(2, 2.0, 1.0, 100.0) == 1.0


@settings(deadline=None)
@given(loads, st.floats(0.01, 60), st.floats(0.01, 300))
def test_both_bounds_are_kept(load: float, service_s: float, wait_s: float) -> None:
    servers = needed(load, service_s, wait_s)
    assert servers >= 1
    assert load / servers <= 0.7 + 1e-9
    assert late(servers, load, service_s, wait_s) <= 0.001


@settings(deadline=None)
@given(loads, st.floats(1, 3), st.floats(0.01, 60), st.floats(0.01, 300))
def test_more_load_never_takes_fewer(
    load: float, times: float, service_s: float, wait_s: float
) -> None:
    few = needed(load, service_s, wait_s)
    assert needed(load * times, service_s, wait_s) >= few


@settings(deadline=None)
@given(loads, st.floats(0.01, 60), st.floats(0.01, 300), st.floats(1, 10))
def test_more_time_to_wait_never_takes_more(
    load: float, service_s: float, wait_s: float, times: float
) -> None:
    many = needed(load, service_s, wait_s)
    assert needed(load, service_s, wait_s * times) <= many
