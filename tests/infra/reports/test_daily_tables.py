"""`daily_usage` and `anomalies` match the results computed in plain Python from the same rows."""

import datetime as dt
import random
from collections import Counter, defaultdict
from statistics import median
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from google.cloud import bigquery

from shared.errors import Unavailable
from shared.reports.day_tables import BillingDay, DayTables
from shared.reports.definitions import ReportQuestion
from tests.bigquery_client import rows_of
from tests.infra.reports import expected
from tests.infra.reports.conftest import DATASET, load
from tests.infra.reports.generated import TENANTS, Fields

pytestmark = pytest.mark.slow

KEYS = ("tenant", "key_id", "plan", "model", "price_version")
HOUR, WEEK = dt.timedelta(hours=1), dt.timedelta(days=7)


def day_of(text: str, tz: str = "UTC") -> BillingDay:
    return BillingDay(dt.date.fromisoformat(text), tz)


def kept(client: bigquery.Client, table: str, where: str) -> list[Fields]:
    found = client.query(f"SELECT * FROM {DATASET}.{table} WHERE {where}").result()
    return [dict(row.items()) for row in found]


@pytest.fixture
def tables(loaded: bigquery.Client) -> DayTables:
    return DayTables(loaded, DATASET)


@pytest.mark.parametrize(
    "day",
    [
        day_of("2026-10-07"),
        day_of("2026-10-25", "Europe/Berlin"),
        day_of("2026-11-01", "America/New_York"),
        day_of("2026-10-15", "Asia/Kolkata"),
        day_of("2026-10-21", "Europe/Berlin"),
    ],
    ids=lambda day: f"{day.day} {day.tz}",
)
def test_day_is_what_plain_python_computes(
    day: BillingDay, tables: DayTables, loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    tables.write_usage(day)
    rows = expected.once(made_rows, ReportQuestion(day.since, day.until))
    groups = expected.grouped(rows, lambda row: tuple(row.get(key) for key in KEYS))
    found = {
        tuple(line[key] for key in KEYS): line
        for line in kept(loaded, "daily_usage", f"day = '{day.day}'")
    }
    assert found.keys() == groups.keys()
    for key, members in groups.items():
        line = found[key]
        wanted = expected.counts(members) | expected.text_tokens(members)
        wanted |= {
            "charged_tokens": expected.charged(members, "tokens"),
            "charged_pixel_steps": expected.charged(members, "pixel_steps"),
            "list_price_usd": expected.exact(members, "list_price_usd"),
            "late_rows": sum(row["replied_at"] >= day.until for row in members),
            **{
                status: sum(row["status"] == status for row in members)
                for status in ("failed", "expired", "canceled")
            },
        }
        for column, value in wanted.items():
            assert line[column] == pytest.approx(value, rel=1e-9, abs=1e-12), (key, column)
        assert (line["day"], line["tz"]) == (day.day, day.tz)


def test_day_that_is_repeated_replaces_itself_and_no_other(
    empty: bigquery.Client, made_rows: list[Fields]
) -> None:
    load(empty, "rows", made_rows)
    tables, day, other = DayTables(empty, DATASET), day_of("2026-10-14"), day_of("2026-10-15")
    for one in (other, day):
        tables.write_usage(one)

    def cost(of: BillingDay) -> float:
        lines = kept(empty, "daily_usage", f"day = '{of.day}'")
        return float(sum(line["cost_usd"] for line in lines))

    before, untouched = cost(day), cost(other)
    late = next(row for row in made_rows if day.since <= row["received_at"] < day.until)
    load(empty, "rows", [late | {"row_id": "late:0", "request_id": "late", "cost_usd": 7.0}])
    for _ in range(2):
        tables.write_usage(day)
    assert cost(day) == pytest.approx(before + 7)
    assert cost(other) == untouched


def test_day_that_fails_stays_as_it_was(empty: bigquery.Client, made_rows: list[Fields]) -> None:
    load(empty, "rows", made_rows)
    day = day_of("2026-10-14")
    DayTables(empty, DATASET).write_usage(day)
    before = kept(empty, "daily_usage", f"day = '{day.day}'")
    with pytest.raises(Unavailable, match="bytes billed"):
        DayTables(empty, DATASET, most_bytes=1).write_usage(day)
    assert kept(empty, "daily_usage", f"day = '{day.day}'") == before != []


def test_summaries_add_up_to_the_month(
    tables: DayTables, loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    for number in range(1, 9):
        tables.write_usage(day_of(f"2026-11-{number:02}"))
    lines = tables.summary(dt.date(2026, 11, 8))
    november = ReportQuestion(
        dt.datetime(2026, 11, 1, tzinfo=dt.UTC), dt.datetime(2026, 11, 9, tzinfo=dt.UTC)
    )
    for tenant in TENANTS:
        own = [line for line in lines if line["tenant"] == tenant]
        month = expected.once(made_rows, november._replace(tenants=(tenant,)))
        total = expected.exact(month, "cost_usd")
        assert sum(line["month_usd"] for line in own) == pytest.approx(total)
        first = expected.exact((r for r in month if r["received_at"].day == 1), "cost_usd")
        assert sum(line["week_ago_usd"] for line in own) == pytest.approx(first)
        assert 0 < first < total


def hourly(day: BillingDay, seed: int) -> list[Fields]:
    """Rows for one weekday over seven weeks: steady, with spikes, a lull, and a new tenant."""
    drawn, found = random.Random(seed), []
    for week in range(7):
        one = BillingDay(day.day - week * WEEK, day.tz)
        for number in range((one.until - one.since) // HOUR):
            hour = one.since + number * HOUR
            usual = 5 + 10 * (8 <= number <= 18)
            costs = {"acme": usual * drawn.uniform(0.8, 1.2), "globex": 3.0}
            if week <= 2:  # the zeros from before it existed would make it look unusual
                costs["newcomer"] = 3.0 if week == 0 else 1.0
            if week == 0 and number == 9:
                costs["acme"] *= 9
            if week == 0 and number == 11:
                costs["globex"] = 0.25
            if week == 3 and number == 12:  # a past outlier doesn't move any band
                costs["acme"] = 900.0
            for tenant, cost in costs.items():
                found.append(_row(tenant, hour + HOUR / 3, cost, "succeeded", drawn))
            failures = drawn.randrange(3) + (40 if (week, number) == (0, 15) else 0)
            found += [_row("acme", hour, 0.0, "failed", drawn) for _ in range(failures)]
    return found


def _row(
    tenant: str, at: dt.datetime, cost_usd: float, status: str, drawn: random.Random
) -> Fields:
    request_id = f"{drawn.getrandbits(64):x}"
    return {
        "row_id": f"{request_id}:0",
        "request_id": request_id,
        "item": 0,
        "tenant": tenant,
        "model": "mini",
        "received_at": at,
        "replied_at": at,
        "attempt": 1,
        "status": status,
        "cost_usd": cost_usd,
    }


def unusual(rows: list[Fields], day: BillingDay, until: dt.datetime) -> set[tuple[Any, ...]]:
    """Anomalies that must be found: hour, tenant, measure, and direction."""
    zone = ZoneInfo(day.tz)
    sums: dict[Any, Counter[dt.datetime]] = defaultdict(Counter)
    for row in rows:
        midnight = dt.datetime.combine(row["received_at"].astimezone(zone).date(), dt.time(), zone)
        start = midnight.astimezone(dt.UTC)
        hour = start + (row["received_at"] - start) // HOUR * HOUR
        for who in (None, row["tenant"]):
            sums[who, "cost_usd"][hour] += row["cost_usd"]
            sums[who, "errors"][hour] += row["status"] == "failed"
    found = set()
    for (who, measure), values in sums.items():
        past = by_clock(values, day, first=min(sums[who, "cost_usd"]))
        for hour in hours(day, until):
            seen = past[hour.astimezone(zone).hour]
            if len(seen) >= 4:
                direction = outside(values[hour], seen, measure)
                found |= {(hour, who, measure, direction)} if direction else set()
    return found


def hours(day: BillingDay, until: dt.datetime) -> list[dt.datetime]:
    return [day.since + number * HOUR for number in range((until - day.since) // HOUR)]


def by_clock(
    values: Counter[dt.datetime], day: BillingDay, first: dt.datetime
) -> dict[int, list[float]]:
    """Earlier weeks' values by hour of the day, starting with the week of the `first` hour."""
    past: dict[int, list[float]] = defaultdict(list)
    for week in range(1, 7):
        one = BillingDay(day.day - week * WEEK, day.tz)
        for hour in hours(one, one.until) if one.until > first else []:
            past[hour.astimezone(ZoneInfo(day.tz)).hour].append(values[hour])
    return past


def outside(value: float, seen: list[float], measure: str) -> str:
    middle = median(seen)
    mad = median(abs(one - middle) for one in seen)
    half = max(3.5 * mad / 0.6745, 0.5 * middle, 1.0 if measure == "cost_usd" else 10.0)
    if value > middle + half:
        return "high"
    return "low" if measure == "cost_usd" and value < middle - half else ""


@pytest.fixture
def judged(empty: bigquery.Client) -> DayTables:
    return DayTables(empty, DATASET)


@pytest.mark.parametrize(
    "day",
    [
        day_of("2026-11-05"),
        day_of("2026-10-25", "Europe/Berlin"),
        day_of("2026-11-01", "Europe/Berlin"),
        day_of("2026-11-05", "Asia/Kolkata"),
    ],
    ids=["UTC", "25 hours", "25 hours a week ago", "off by half an hour"],
)
def test_anomalies_are_what_plain_python_finds(
    day: BillingDay, empty: bigquery.Client, judged: DayTables
) -> None:
    rows = hourly(day, seed=5)
    load(empty, "rows", rows)
    for until in (day.since + 10 * HOUR, day.until):
        judged.write_anomalies(day, until)
        found = judged.anomalies(day.day)
        keys = {(one.hour, one.tenant, one.measure, one.direction) for one in found}
        assert keys == unusual(rows, day, until)
        assert len(keys) == len(found)
    nine = day.since + 9 * HOUR
    assert {key for key in keys if key[0] == nine} >= {
        (nine, "acme", "cost_usd", "high"),
        (nine, None, "cost_usd", "high"),
    }
    assert {key[1:] for key in keys} >= {
        ("acme", "errors", "high"),
        ("globex", "cost_usd", "low"),
    }
    assert "newcomer" not in {key[1] for key in keys}


@pytest.mark.parametrize(
    ("past", "median_usd", "mad_usd", "half_width_usd"),
    [
        # 3.5 / 0.6745 x 0.5 = 2.6 is less than half the median.
        ([10.0, 12.0, 11.0, 13.0, 12.0, 11.0], 11.5, 0.5, 5.75),
        ([10.0, 16.0, 11.0, 17.0, 12.0, 15.0], 13.5, 2.5, 3.5 / 0.6745 * 2.5),
        ([0.1, 0.1, 0.1, 0.1], 0.1, 0.0, 1.0),
    ],
    ids=["share of the median", "deviations", "a dollar"],
)
def test_band_has_the_figures_of_its_formula(
    empty: bigquery.Client,
    judged: DayTables,
    past: list[float],
    median_usd: float,
    mad_usd: float,
    half_width_usd: float,
) -> None:
    day, drawn = day_of("2026-11-05"), random.Random(1)
    rows = [
        _row("acme", day.since - week * WEEK + HOUR / 2, cost, "succeeded", drawn)
        for week, cost in enumerate([80.0, *past])
    ]
    load(empty, "rows", rows)
    judged.write_anomalies(day, day.since + HOUR)
    every, acme = judged.anomalies(day.day)
    band = pytest.approx(
        [max(0, median_usd - half_width_usd), median_usd, median_usd + half_width_usd]
    )
    assert [acme.low, acme.median, acme.high] == band
    if mad_usd:
        assert acme.score == pytest.approx(0.6745 * (80 - median_usd) / mad_usd, abs=0.01)
    else:
        assert acme.score is None
    assert (acme.value, acme.weeks) == (80.0, len(past))
    assert every[4:] == acme[4:]


def test_anomaly_that_late_rows_explain_is_gone(empty: bigquery.Client, judged: DayTables) -> None:
    day, drawn = day_of("2026-11-05"), random.Random(2)
    past = [_row("acme", day.since - week * WEEK, 50.0, "succeeded", drawn) for week in range(1, 7)]
    load(empty, "rows", [*past, _row("acme", day.since, 5.0, "succeeded", drawn)])
    judged.write_anomalies(day, day.until)
    assert {one.direction for one in judged.anomalies(day.day)} == {"low"}
    load(empty, "rows", [_row("acme", day.since + HOUR / 4, 45.0, "succeeded", drawn)])
    judged.write_anomalies(day, day.until)
    assert judged.anomalies(day.day) == []


def test_tables_need_a_filter_on_the_day(empty: bigquery.Client) -> None:
    for table in ("daily_usage", "anomalies"):
        with pytest.raises(Exception, match="filter"):
            rows_of(empty, f"SELECT * FROM {DATASET}.{table}")
