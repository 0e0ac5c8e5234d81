"""The views for dashboards and for tenants' analysts match the results computed in plain Python."""

import datetime as dt
import re
from pathlib import Path
from string import Template
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud import bigquery

from infra import bigquery as tables
from shared.reports.day_tables import BillingDay, DayTables
from shared.reports.definitions import ReportQuestion
from tests.bigquery_client import rows_of
from tests.infra.reports import expected
from tests.infra.reports.conftest import DATASET, load
from tests.infra.reports.generated import AFTER, FIRST, TENANTS, Fields
from tests.infra.reports.test_other_tables import worker_hour

pytestmark = pytest.mark.slow

DASHBOARDS = ("usage_hourly", "latency_hourly", "costs_daily", "worker_hours_hourly")
SINCE, UNTIL = dt.date(2026, 10, 15), dt.date(2026, 10, 25)
DAYS = f"day BETWEEN '{SINCE}' AND '{UNTIL}'"
ASKED = ReportQuestion(
    dt.datetime(2026, 10, 15, tzinfo=dt.UTC), dt.datetime(2026, 10, 26, tzinfo=dt.UTC)
)
KEYS = ("tenant", "key_id", "plan", "model", "region", "priority")


def tenant_views(project: str, dataset: str) -> dict[str, str]:
    """The views for the analysts of acme, as Terraform fills them in (platform/analysts.tf)."""
    folder = Path("infra/bigquery")
    files = [*folder.glob("views/*.sql"), *folder.glob("tenant_views/*.sql")]
    names = {"project": project, "dataset": dataset, "only": "tenant = 'acme'"}
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(files)}
    return {
        name: Template(sql).substitute(names) for name, sql in texts.items() if "${only}" in sql
    }


def asked(client: bigquery.Client, sql: str) -> list[Fields]:
    return [dict(row.items()) for row in client.query(sql).result()]


def by_hour(rows: list[Fields], *keys: str) -> dict[tuple[Any, ...], list[Fields]]:
    return expected.grouped(
        rows,
        lambda row: (expected.hour_of(row["received_at"]), *(row.get(key) for key in keys)),
    )


def check_usage(lines: list[Fields], rows: list[Fields]) -> None:
    """Checks that lines in usage_hourly match these rows."""
    groups = by_hour(rows, *KEYS)
    found = {(line["hour"], *(line[key] for key in KEYS)): line for line in lines}
    assert found.keys() == groups.keys()
    assert len(found) == len(lines)
    for key, members in groups.items():
        line = found[key]
        assert line["day"] == key[0].date()
        # A request's items may be in several regions. The request is counted in the region of its
        # first item.
        wanted = expected.counts(members) | {"requests": sum(r["item"] == 0 for r in members)}
        wanted |= expected.text_tokens(members)
        for column, value in wanted.items():
            assert line[column] == pytest.approx(value, rel=1e-9, abs=1e-12), (key, column)


def test_usage_hourly(loaded: bigquery.Client, made_rows: list[Fields]) -> None:
    lines = asked(loaded, f"SELECT * FROM {DATASET}.usage_hourly WHERE {DAYS}")
    check_usage(lines, expected.once(made_rows, ASKED))


def test_latency_hourly(loaded: bigquery.Client, made_rows: list[Fields]) -> None:
    lines = asked(loaded, f"SELECT * FROM {DATASET}.latency_hourly WHERE {DAYS}")
    rows = [row for row in expected.once(made_rows, ASKED) if row["status"] == "succeeded"]
    groups = by_hour(rows, "model", "priority")
    found = {(line["hour"], line["model"], line["priority"]): line for line in lines}
    assert found.keys() == groups.keys()
    for key, members in groups.items():
        assert found[key]["items"] == len(members)
        for column in tables.view_columns("latency_hourly"):
            if named := re.fullmatch(r"(\w+)_p(\d+)_ms", column):
                near = expected.near(members, f"{named[1]}_ms", int(named[2]) / 100)
                assert near == found[key][column], (key, column)


def test_costs_daily_are_those_of_daily_usage(
    loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    day = BillingDay(dt.date(2026, 10, 16), "Europe/Berlin")
    DayTables(loaded, DATASET).write_usage(day)
    lines = asked(loaded, f"SELECT * FROM {DATASET}.costs_daily WHERE day = '{day.day}'")
    rows = expected.once(made_rows, ReportQuestion(day.since, day.until))
    for tenant in TENANTS:
        own = [line["cost_usd"] for line in lines if line["tenant"] == tenant]
        wanted = expected.exact((row for row in rows if row["tenant"] == tenant), "cost_usd")
        assert sum(own) == pytest.approx(wanted, rel=1e-9)
        assert wanted > 0


def test_worker_hours_hourly(empty: bigquery.Client) -> None:
    report = worker_hour("w1", gpu_type="l4", spot=None, device_share=0.5)
    hours = [
        report,
        report,  # written twice
        worker_hour("w2", gpu_type="l4", spot=False, device_share=1.0),
        worker_hour("w3", gpu_type=None, spot=None),
        worker_hour("w4", gpu_type="l4", spot=True, device_share=4.0),
    ]
    load(empty, "worker_hours", hours)
    price, price_of_several = (
        rows_of(
            empty,
            f"SELECT usd_per_hour FROM {DATASET}.gpu_prices WHERE gpu_type = 'l4' AND {kind}"
            f" AND region = '{report['region']}' AND valid_from <= '{report['hour']}'"
            " ORDER BY valid_from DESC LIMIT 1",
        )[0][0]
        for kind in ("NOT spot AND NOT has_several_gpus", "spot AND has_several_gpus")
    )
    lines = asked(
        empty, f"SELECT * FROM {DATASET}.worker_hours_hourly WHERE day = '{report['hour'].date()}'"
    )
    found = {(line["gpu_type"], line["spot"]): line for line in lines}
    total_s = report["busy_s"] + report["idle_s"] + report["loading_s"]
    half, whole, none = found["l4", None], found["l4", False], found[None, None]
    four = found["l4", True]
    assert half["busy_hours"] == pytest.approx(report["busy_s"] * 0.5 / 3600)
    assert half["cost_usd"] == pytest.approx(total_s * 0.5 / 3600 * price)
    assert whole["cost_usd"] == pytest.approx(total_s / 3600 * price)
    assert none["cost_usd"] is None
    assert four["cost_usd"] == pytest.approx(total_s * 4 / 3600 * price_of_several)
    assert [line["workers"] for line in (half, whole, none, four)] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_columns_are_those_of_the_head_and_documented(name: str, empty: bigquery.Client) -> None:
    result = empty.query(f"SELECT * FROM {DATASET}.{name} WHERE day = '2026-10-15'").result()
    assert [field.name for field in result.schema] == list(tables.view_columns(name))


@pytest.mark.parametrize("name", ["usage_hourly", "latency_hourly", "costs_daily"])
def test_view_needs_a_filter_on_its_partitions(name: str, loaded: bigquery.Client) -> None:
    with pytest.raises(BadRequest, match="without a filter"):
        loaded.query(f"SELECT * FROM {DATASET}.{name}").result()


@pytest.fixture
def acme(loaded: bigquery.Client) -> str:
    """The dataset for acme's analysts, as Terraform creates it."""
    dataset = f"{DATASET}_tenant_acme"
    loaded.create_dataset(dataset, exists_ok=True)
    for name, sql in tenant_views(loaded.project, DATASET).items():
        view = bigquery.Table(f"{loaded.project}.{dataset}.{name}")
        view.view_query = sql
        loaded.create_table(view, exists_ok=True)
    return dataset


def test_analysts_see_the_rows_of_their_tenant_each_once(
    acme: str, loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    lines = asked(
        loaded,
        f"SELECT * FROM {acme}.rows WHERE received_at >= '{FIRST}' AND received_at < '{AFTER}'",
    )
    own = expected.once(made_rows, ReportQuestion(FIRST, AFTER, tenants=("acme",)))
    assert sorted(line["row_id"] for line in lines) == sorted(row["row_id"] for row in own)
    assert list(lines[0]) == list(tables.view_columns("rows"))
    hidden = {"worker", "api_instance", "device", "device_share", "batch_size", "tenant"}
    assert hidden & set(lines[0]) == set()


def test_analysts_see_the_usage_of_their_tenant(
    acme: str, loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    lines = asked(loaded, f"SELECT * FROM {acme}.usage_hourly WHERE {DAYS}")
    check_usage(lines, expected.once(made_rows, ASKED._replace(tenants=("acme",))))


def test_analysts_see_the_latency_and_costs_of_their_tenant(
    acme: str, loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    DayTables(loaded, DATASET).write_usage(BillingDay(dt.date(2026, 10, 17), "UTC"))
    (items,) = rows_of(loaded, f"SELECT SUM(items) FROM {acme}.latency_hourly WHERE {DAYS}")
    own = expected.once(made_rows, ASKED._replace(tenants=("acme",)))
    assert items[0] == sum(row["status"] == "succeeded" for row in own) > 0
    tenants = rows_of(
        loaded, f"SELECT DISTINCT tenant FROM {acme}.costs_daily WHERE day = '2026-10-17'"
    )
    assert tenants == [("acme",)]


def test_every_view_of_a_tenant_has_its_condition_beside_each_table() -> None:
    found = tenant_views("p", "d")
    assert set(found) == {"rows", "usage_hourly", "latency_hourly", "costs_daily"}
    for name, sql in found.items():
        reads = len(re.findall(r"`p\.d\.\w+`", sql))
        assert len(re.findall(r"`p\.d\.\w+`\n\s*WHERE tenant = 'acme'\n", sql)) == reads == 1, name
