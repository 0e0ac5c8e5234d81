"""Runs each usage dashboard query, with Grafana's macros expanded, on the embedded BigQuery.

https://github.com/grafana/google-bigquery-datasource/blob/main/pkg/bigquery/macros_test.go
"""

import datetime as dt
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from google.cloud import bigquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import bigquery as grafana_bigquery
from grafana_foundation_sdk.models import dashboard as grafana_models

from infra import bigquery as tables
from penstock_monitoring.grafana_usage import usage_dashboard
from shared.reports.day_tables import BillingDay, DayTables
from shared.reports.definitions import ReportQuestion
from tests.bigquery_client import connected
from tests.infra.reports import expected, generated
from tests.infra.reports.conftest import DATASET, load
from tests.infra.reports.test_daily_tables import HOUR, hourly
from tests.infra.reports.test_other_tables import worker_hour
from tools.monitoring.tests.test_files import missing

pytestmark = pytest.mark.slow

Fields = dict[str, Any]
SINCE = dt.datetime(2026, 10, 12, tzinfo=dt.UTC)
UNTIL = dt.datetime(2026, 10, 26, 23, 59, 59, 999000, tzinfo=dt.UTC)
ASKED = ReportQuestion(SINCE, UNTIL + dt.timedelta(milliseconds=1))
PANELS = {panel["title"]: panel for panel in usage_dashboard()["panels"] if panel["type"] != "row"}
INTERVALS_MS = {"1h": 3_600_000, "6h": 21_600_000, "1d": 86_400_000}


def expanded(sql: str, interval: str = "1h", **variables: str) -> str:
    """Expands a query the way Grafana does: first variables, with their syntax, then macros."""
    values_of = {"dataset": DATASET, "tenant": "", "model": ""} | variables
    for name, value in values_of.items():
        quoted = value.replace('"', '\\"')
        sql = sql.replace(f"${{{name}:doublequote}}", f'"{quoted}"')
        sql = sql.replace(f"${{{name}}}", value)
    for name, moment in (("$__from", SINCE), ("$__to", UNTIL)):
        sql = sql.replace(name, str(int(moment.timestamp() * 1000)))
    sql = sql.replace("$__interval", interval)
    first, last = (f"{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in (SINCE, UNTIL))
    sql = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 >= '{first}' AND \1 <= '{last}'", sql)
    step = INTERVALS_MS[interval]
    sql = re.sub(
        r"\$__timeGroup\((\w+), (\w+)\)",
        rf"TIMESTAMP_MILLIS(DIV(UNIX_MILLIS(\1), {step}) * {step})",
        sql,
    )
    assert "$" not in sql
    return sql


@pytest.fixture(scope="module")
def made() -> list[Fields]:
    return generated.rows()


@pytest.fixture(scope="module")
def client(bigquery_endpoint: str, made: list[Fields]) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as opened:
        tables.create(opened, DATASET)
        load(opened, "rows", made)
        load(opened, "rows", hourly(BillingDay(dt.date(2026, 10, 22), "UTC"), seed=3))
        at = dt.datetime(2026, 10, 20, 5, tzinfo=dt.UTC)
        load(opened, "worker_hours", [worker_hour("w1", gpu_type="l4", hour=at, since=at)])
        days = DayTables(opened, DATASET)
        days.write_usage(BillingDay(dt.date(2026, 10, 20), "UTC"))
        day = BillingDay(dt.date(2026, 10, 22), "UTC")
        days.write_anomalies(day, day.until)
        yield opened


def answer(client: bigquery.Client, title: str, interval: str = "1h", **given: str) -> list[Fields]:
    sql = PANELS[title]["targets"][0]["rawSql"]
    rows = client.query(expanded(sql, interval, **given)).result()
    return [dict(row.items()) for row in rows]


@pytest.mark.parametrize("title", PANELS)
@pytest.mark.parametrize("interval", ["1h", "1d"])
def test_query_answers_something(title: str, interval: str, client: bigquery.Client) -> None:
    rows = answer(client, title, interval)
    assert rows
    if PANELS[title]["type"] == "timeseries":
        assert list(rows[0]) == ["time", "metric", "value"]
        keys = [(row["time"], row["metric"]) for row in rows]
        assert keys == sorted(keys, key=lambda key: (key[0], key[1] or ""))
        assert len(set(keys)) == len(keys)
        assert all(isinstance(row["value"], int | float | None) for row in rows)


@pytest.mark.parametrize("interval", INTERVALS_MS)
def test_charges_are_those_of_the_rows_at_each_step(
    interval: str, client: bigquery.Client, made: list[Fields]
) -> None:
    rows = expected.once(made + hourly(BillingDay(dt.date(2026, 10, 22), "UTC"), seed=3), ASKED)
    step = dt.timedelta(milliseconds=INTERVALS_MS[interval])
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    groups = expected.grouped(
        rows, lambda row: (row["received_at"] - (row["received_at"] - epoch) % step, row["tenant"])
    )
    charges = {
        (row["time"], row["metric"]): row["value"]
        for row in answer(client, "Charged, by tenant", interval)
    }
    assert charges.keys() == groups.keys()
    for key, members in groups.items():
        assert charges[key] == pytest.approx(expected.exact(members, "cost_usd"), abs=1e-9), key


def test_variables_choose_a_tenant_and_a_model(client: bigquery.Client) -> None:
    rows = answer(client, "Requests, by tenant", tenant="acme", model="draw")
    assert {row["metric"] for row in rows} == {"acme"}
    every = answer(client, "Requests, by tenant")
    assert sum(row["value"] for row in rows) < sum(
        row["value"] for row in every if row["metric"] == "acme"
    )
    assert answer(client, "Requests, by tenant", tenant='a" OR TRUE OR "') == []


def test_unusual_hours_are_those_of_the_table(client: bigquery.Client) -> None:
    nine = dt.datetime(2026, 10, 22, tzinfo=dt.UTC) + 9 * HOUR
    hours = {(row["hour"], row["tenant"]) for row in answer(client, "Unusual hours")}
    assert {(nine, "acme"), (nine, "(all)")} <= hours


def test_grafana_knows_every_field() -> None:
    """Grafana's own models parse it, dropping unknown fields, and serialize it again."""
    original = json.loads(json.dumps(usage_dashboard()))
    again = json.loads(JSONEncoder().encode(grafana_models.Dashboard.from_json(original)))
    for dashboard in (original, again):  # queries use different Grafana models than dashboards
        for panel in dashboard["panels"]:
            panel.pop("targets", None)
    assert missing(original, again) == []
    for panel in PANELS.values():
        (target,) = panel["targets"]
        query = grafana_bigquery.Dataquery.from_json(target)
        assert missing(target, json.loads(JSONEncoder().encode(query))) == []
    ids = [panel["id"] for panel in original["panels"]]
    assert len(ids) == len(set(ids))
