"""Time zones in literals, parameters, and columns, with DST changes and extreme timestamps."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud import bigquery
from google.cloud.bigquery import QueryJobConfig, ScalarQueryParameter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo")
CHANGES = [
    dt.datetime(2024, 3, 31, 2, 30),  # does not exist in Berlin
    dt.datetime(2024, 10, 27, 2, 30),  # occurs twice
    dt.datetime(2024, 11, 3, 1, 30),
    dt.datetime(2024, 4, 7, 1, 45),  # occurs twice, because clocks are set back by half an hour
    dt.datetime(2018, 11, 4),
]
FORMS = (
    "TIMESTAMP(@local, @zone)",
    "TIMESTAMP(@local, '{zone}')",
    "(SELECT TIMESTAMP(l, @zone) FROM UNNEST([@local]) AS l)",
    "(SELECT TIMESTAMP(@local, z) FROM UNNEST([@zone]) AS z)",
)


def asked(client: bigquery.Client, sql: str, local: dt.datetime, zone: str) -> list[object]:
    parameters = [
        ScalarQueryParameter("local", "DATETIME", local),
        ScalarQueryParameter("zone", "STRING", zone),
    ]
    (row,) = client.query(sql, job_config=QueryJobConfig(query_parameters=parameters)).result()
    return list(row)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    local=st.sampled_from(CHANGES) | st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2018, 1, 1)),
    zone=st.sampled_from(ZONES),
)
def test_a_local_time_is_the_same_moment_in_every_form(
    client: bigquery.Client, local: dt.datetime, zone: str
) -> None:
    sql = "SELECT " + ", ".join(form.format(zone=zone) for form in FORMS)
    first, *others = asked(client, sql, local, zone)
    assert others == [first] * 3
    moment = local.replace(tzinfo=ZoneInfo(zone), fold=0).astimezone(dt.UTC)
    if moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None) == local:
        assert first == moment, "the first, where clocks show it twice"


def test_a_statement_that_is_kept_takes_every_kind_of_zone(client: bigquery.Client) -> None:
    noon = dt.datetime(2024, 7, 1, 12)
    sql = "SELECT TIMESTAMP(@local, @zone), @zone"
    for zone, hour in (("Europe/Berlin", 10), ("+02:00", 10), ("UTC", 12), ("-3", 15)):
        at = dt.datetime(2024, 7, 1, hour, tzinfo=dt.UTC)
        assert asked(client, sql, noon, zone) == [at, zone]
    for wrong in ("Europe/Atlantis", "PST", "utc", ""):
        with pytest.raises(BadRequest, match="Invalid time zone"):
            asked(client, sql, noon, wrong)
    safe = "SELECT SAFE.TIMESTAMP(@local, @zone)"
    assert asked(client, safe, noon, "PST") == [None]
    assert asked(client, safe, noon, "UTC") == [noon.replace(tzinfo=dt.UTC)]


@pytest.mark.parametrize("form", FORMS)
def test_moments_end_with_the_year_9999(client: bigquery.Client, form: str) -> None:
    last = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)
    sql = f"SELECT {form.format(zone='UTC')}"
    assert asked(client, sql, last, "UTC") == [last.replace(tzinfo=dt.UTC)]
    sql = f"SELECT {form.format(zone='America/New_York')}"
    with pytest.raises(BadRequest, match="out of allowed range"):
        asked(client, sql, last, "America/New_York")
