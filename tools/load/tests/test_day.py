"""A day matches its parameters exactly, down to the request."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_load.day import DAY_S, Day, DayModel, arrivals_of
from shared.errors import BadInput
from tests.tiers import examples

shares = st.floats(0.0, 0.5)
days = st.builds(
    Day,
    requests=st.integers(1, 3000),
    tenants=st.integers(1, 30).map(lambda count: [f"tenant-{number}" for number in range(count)]),
    models=st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.builds(
            DayModel,
            share=st.floats(0.01, 100),
            sizes=st.just(((0.6, 5, 15), (0.4, 36, 88))),
        ),
        min_size=1,
    ),
    seed=st.integers(0, 2**32),
    zipf=st.floats(0.0, 3.0),
    swing=st.floats(0.0, 1.0),
    rush_share=shares,
    bursts=st.integers(0, 10),
    burst_share=shares,
    repeat_share=st.floats(0.0, 1.0),
    cancel_share=st.floats(0.0, 1.0),
    batch_share=st.floats(0.0, 1.0),
)


@given(days)
@settings(max_examples=examples(60))
def test_a_day_has_what_it_promises(day: Day) -> None:
    arrivals = arrivals_of(day)
    assert len(arrivals) == day.requests
    assert all(0 <= arrival.at_s <= DAY_S for arrival in arrivals)
    assert all(first.at_s <= second.at_s for first, second in pairwise(arrivals))
    of_tenant = Counter(arrival.tenant for arrival in arrivals)
    for tenant, share in zip(day.tenants, day.tenant_shares(), strict=True):
        assert abs(of_tenant[tenant] - share * day.requests) < 1
    of_model, weight = (
        Counter(arrival.model for arrival in arrivals),
        sum(m.share for m in day.models.values()),
    )
    for name, model in day.models.items():
        assert abs(of_model[name] - model.share / weight * day.requests) < 1
    canceled = sum(arrival.cancel_after_s is not None for arrival in arrivals)
    assert canceled == round(day.cancel_share * day.requests)
    assert sum(arrival.priority == "batch" for arrival in arrivals) == round(
        day.batch_share * day.requests
    )
    assert all(5 <= arrival.size <= 15 or 36 <= arrival.size <= 88 for arrival in arrivals)


@given(days)
@settings(max_examples=examples(60))
def test_repeats_ask_for_the_same(day: Day) -> None:
    first: dict[str, tuple[str, str, int, int]] = {}
    repeats = 0
    for arrival in arrivals_of(day):
        whose = (arrival.tenant, arrival.model, arrival.size, arrival.items)
        repeats += arrival.group in first
        assert first.setdefault(arrival.group, whose) == whose
    # A request can't repeat anything if its tenant and model have no earlier request.
    assert repeats <= round(day.repeat_share * day.requests)
    assert repeats >= round(day.repeat_share * day.requests) - 2 * len(day.tenants) * len(
        day.models
    )


@given(days)
@settings(max_examples=examples(60))
def test_hours_follow_the_curve(day: Day) -> None:
    steady = day.requests - day.in_bursts
    hours = day.slots().reshape(24, -1).sum(axis=1)
    assert hours.sum() == steady
    rush = round(day.rush_share * day.requests)
    for hour, count in enumerate(hours):
        waved = _wave(day, hour + 1) - _wave(day, hour)
        rushed = rush / 2 if hour in (12, 13) else 0
        assert abs(count - (steady - rush) * waved - rushed) <= 1


def _wave(day: Day, hour: int) -> float:
    """Returns how much of the wave has passed by a given hour: the integral of 1 - swing cos."""
    turn = hour / 24
    return turn - day.swing * math.sin(2 * math.pi * turn) / (2 * math.pi)


def test_bursts_are_short_and_mostly_of_one_tenant() -> None:
    tenants = [f"tenant-{number}" for number in range(20)]
    model = DayModel(share=1, sizes=((1.0, 5, 15),))
    day = Day(requests=100_000, tenants=tenants, models={"a": model}, zipf=0, rush_share=0, swing=0)
    minutes = Counter(int(arrival.at_s // 60) for arrival in arrivals_of(day))
    # 3,000 requests in six two-minute periods, versus 67 per minute for the rest of the day.
    busy = [minute for minute, count in minutes.items() if count > 150]
    assert 12 <= len(busy) <= 18
    whose = Counter(
        arrival.tenant for arrival in arrivals_of(day) if int(arrival.at_s // 60) in busy
    )
    # Other tenants have about 50 requests in these minutes.
    assert len([tenant for tenant, count in whose.items() if count > 400]) in (1, 2)


def test_the_same_day_is_the_same() -> None:
    model = DayModel(share=1, sizes=((1.0, 5, 15),))
    day = Day(requests=500, tenants=["a", "b"], models={"m": model}, seed=7)
    assert arrivals_of(day) == arrivals_of(day)
    assert arrivals_of(day) != arrivals_of(
        Day(requests=500, tenants=["a", "b"], models={"m": model}, seed=8)
    )


@pytest.mark.parametrize(
    "wrong", [{"repeat_share": 1.1}, {"requests": 0}, {"rush_share": 0.6, "burst_share": 0.6}]
)
def test_impossible_days_are_refused(wrong: dict[str, float]) -> None:
    given_: dict[str, object] = {"requests": 10, "tenants": ["a"]} | wrong
    model = DayModel(share=1, sizes=((1.0, 5, 15),))
    with pytest.raises(BadInput):
        Day(models={"m": model}, **given_)  # type: ignore[arg-type]
