"""The days covered by a scheduled run."""

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadInput
from shared.reports.day_tables import (
    AGAIN_DAYS,
    MAX_DAYS,
    SETTLING,
    BillingDay,
    days_asked,
    hours_over,
    months_over,
)

ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Apia", "America/Havana"]
)
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))
NOW = datetime(2026, 11, 3, 4, 30, tzinfo=UTC)


def test_run_without_words_does_the_last_day_and_those_before_again() -> None:
    days = days_asked({}, "Europe/Berlin", NOW)
    assert [str(day.day) for day in days] == [
        "2026-10-30",
        "2026-10-31",
        "2026-11-01",
        "2026-11-02",
    ]
    assert len(days) == AGAIN_DAYS + 1


def test_backfill_has_both_ends() -> None:
    days = days_asked({"from": "2026-10-01", "to": "2026-10-31"}, "UTC", NOW)
    assert [day.day.day for day in days] == list(range(1, 32))
    (one,) = days_asked({"to": "2026-10-05"}, "UTC", NOW)
    assert one == BillingDay(date(2026, 10, 5), "UTC")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"to": "2026-11-03"}, "to: 2026-11-03 is not over yet in UTC"),
        ({"from": "2026-11-03"}, "from: 2026-11-03 must not be after 2026-11-02"),
        ({"from": "2026-10-02", "to": "2026-10-01"}, "from: 2026-10-02 must not be after"),
        ({"from": "2026-10-02"}, "from: the range must be at most 31 days, got 32"),
        ({"from": "2026-10-1"}, "from: must be a date such as 2026-10-01, got '2026-10-1'"),
        ({"from": 20261001}, "from: must be a date such as 2026-10-01, got '20261001'"),
        ({"to": None}, "to: must be a date such as 2026-10-01, got 'None'"),
        ({"from": "9999-12-31"}, "from: must be a date such as 2026-10-01, got '9999-12-31'"),
        ({"day": "2026-10-01"}, "day: is not a valid field"),
    ],
)
def test_wrong_words_are_refused_by_name(asked: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refused:
        days_asked(asked, "UTC", NOW)
    assert refused.value.field == reason.partition(":")[0]


@given(ZONES, MOMENTS)
def test_days_follow_each_other_and_are_over(tz: str, now: datetime) -> None:
    days = days_asked({}, tz, now)
    assert all(one.until == other.since for one, other in pairwise(days))
    assert days[-1].until <= now < days[-1].until + timedelta(days=2)
    assert len(days) <= MAX_DAYS


@given(ZONES, MOMENTS)
def test_judged_hours_are_over_and_the_last_ones(tz: str, now: datetime) -> None:
    day, until = hours_over(tz, now)
    assert day.since < until <= day.until
    assert until <= now - SETTLING < until + timedelta(hours=2)


@pytest.mark.parametrize(
    ("now", "months"),
    [
        ("2026-10-31T23:59:00Z", []),
        ("2026-11-01T04:00:00Z", ["2026-10"]),
        ("2026-11-04T23:00:00Z", ["2026-10"]),
        ("2026-11-05T04:00:00Z", []),
    ],
)
def test_invoices_are_made_once_their_month_is_over_and_while_it_is_done_again(
    now: str, months: list[str]
) -> None:
    moment = datetime.fromisoformat(now)
    assert months_over(days_asked({}, "UTC", moment), moment) == months


def test_a_month_ends_on_clocks_of_the_zone() -> None:
    days = [BillingDay(date(2026, 10, 31), "America/New_York")]
    assert months_over(days, datetime(2026, 11, 1, 3, tzinfo=UTC)) == []
    assert months_over(days, datetime(2026, 11, 1, 4, tzinfo=UTC)) == ["2026-10"]
