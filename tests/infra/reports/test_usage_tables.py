"""The usage table, its views and its reports: a single description, which matches the rows written
by the processes.
"""

import datetime as dt
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from google.api_core.exceptions import BadRequest
from google.cloud import bigquery

from infra import bigquery as usage
from shared.messages import Envelope, ItemOutcome, Receipt
from shared.models.catalog import Model
from shared.models.entry import Batch, Price
from shared.reports.definitions import ReportQuestion, find_report
from shared.reports.runner import ReportRunner
from shared.usage.row import Row, row_of
from shared.usage.writer import fields_of
from tests.bigquery_client import connected, rows_of
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

NOW_S = round(time.time(), 6)
PYTHON_TYPES = {
    "STRING": str,
    "INTEGER": int,
    "FLOAT": float,
    "TIMESTAMP": float,
    "BOOLEAN": bool,
}


def row(request: str, **given: Any) -> dict[str, Any]:
    known = {
        "tenant": "acme",
        "model": "m",
        "received_at_s": NOW_S,
        "status": "succeeded",
        "attempt": 1,
    }
    return fields_of(Row(row_id=f"{request}:0", request_id=request, item=0, **{**known, **given}))


@pytest.fixture
def client(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        yield client


def insert(client: bigquery.Client, *rows: dict[str, Any]) -> None:
    assert client.insert_rows_json("penstock.rows", rows, row_ids=[None] * len(rows)) == []


def report(client: bigquery.Client, name: str, since_s: float = NOW_S - 60) -> list[dict[str, Any]]:
    since, until = (dt.datetime.fromtimestamp(at_s, dt.UTC) for at_s in (since_s, NOW_S + 60))
    runner = ReportRunner(client, "penstock")
    return runner.run(find_report(name), ReportQuestion(since, until)).records()


def test_the_schema_and_the_row_agree() -> None:
    hints = get_type_hints(Row)
    fields = msgspec.structs.fields(Row)
    columns = {name.removesuffix("_s") if name.endswith("_at_s") else name: name for name in hints}
    assert [field["name"] for field in usage.schema()] != []
    assert {field["name"] for field in usage.schema()} == set(columns)
    required = {field.name for field in fields if field.required}
    for field in usage.schema():
        name = columns[field["name"]]
        kinds = set(get_args(hints[name]) or (hints[name],)) - {type(None)}
        assert kinds == {PYTHON_TYPES[field["type"]]}, name
        assert (field["mode"] == "REQUIRED") == (name in required), name
        assert field["description"].endswith("."), name


def test_the_table_is_made_as_described_and_making_it_again_changes_nothing(
    client: bigquery.Client,
) -> None:
    usage.create(client, "penstock")
    insert(client, row("r1"))
    usage.create(client, "penstock")
    table = client.get_table("penstock.rows")
    assert (table.time_partitioning.type_, table.time_partitioning.field) == ("DAY", "received_at")
    assert table.time_partitioning.expiration_ms == 400 * 86_400_000
    assert (table.require_partition_filter, table.clustering_fields) == (
        True,
        ["model", "tenant", "status"],
    )
    assert [field.to_api_repr() for field in table.schema] == usage.schema()
    assert table.num_rows == 1
    assert {item.table_id for item in client.list_tables("penstock")} == {
        *("anomalies", "daily_usage", "rows", "webhook_deliveries", "worker_hours"),
        "worker_starts",
        *usage.views("p", "d"),
    }
    for name in usage.tables():
        found = client.get_table(f"penstock.{name}")
        assert [field.to_api_repr() for field in found.schema] == usage.schema(name)
        assert found.require_partition_filter
        wanted = usage.table_options(name)["timePartitioning"]
        assert found.time_partitioning.field == wanted["field"]


def test_an_older_table_is_brought_up_to_date(client: bigquery.Client) -> None:
    client.create_dataset("penstock")
    old = [
        bigquery.SchemaField.from_api_repr(field)
        for field in usage.schema()
        if field["name"] != "cost_usd"
    ]
    table = bigquery.Table(f"{client.project}.penstock.rows", old)
    table.time_partitioning = bigquery.TimePartitioning(field="received_at")
    client.create_table(table)
    insert(client, row("r1"))
    usage.create(client, "penstock")
    insert(client, row("r2", cost_usd=0.5))
    found = client.get_table("penstock.rows")
    assert (found.num_rows, found.require_partition_filter) == (2, True)


def test_every_field_of_a_row_arrives(empty: bigquery.Client) -> None:
    full: dict[str, Any] = {
        field.name: {str: "x", int: 7, float: NOW_S, bool: True}[
            next(iter(set(get_args(hint) or (hint,)) - {type(None)}))
        ]
        for field, hint in zip(
            msgspec.structs.fields(Row), get_type_hints(Row).values(), strict=True
        )
    }
    sent = fields_of(Row(**full))
    insert(empty, sent)
    (kept,) = empty.query("SELECT * FROM penstock.rows WHERE received_at > '2020-01-01'").result(
        timeout=WAIT_LIMIT_S
    )
    shown = {
        name: round(v.timestamp(), 6) if isinstance(v, dt.datetime) else v
        for name, v in kept.items()
    }
    assert shown == {name: round(v, 6) if name.endswith("_at") else v for name, v in sent.items()}


def test_a_row_written_twice_counts_once(empty: bigquery.Client) -> None:
    insert(empty, row("r1", attempt=1, tokens=3), row("r1", attempt=2), row("r2"), row("r2"))
    sql = (
        "SELECT row_id, status, attempt FROM penstock.rows_deduplicated"
        " WHERE received_at > '2020-01-01' ORDER BY 1"
    )
    assert rows_of(empty, sql) == [("r1:0", "succeeded", 2), ("r2:0", "succeeded", 1)]
    with pytest.raises(BadRequest, match="partition elimination"):
        rows_of(empty, "SELECT * FROM penstock.rows_deduplicated")
    for name in ("usage", "slowest"):
        assert len(report(empty, name)) in (0, 1)
    assert report(empty, "usage")[0]["items"] == 2


def test_a_row_that_says_nothing_was_delivered_counts(empty: bigquery.Client) -> None:
    """Order does not matter.

    If there are several such rows, the worker's row counts, because it has more information.
    """
    worker = {"cost_usd": 0.5, "charged_share": 1.0, "tokens": 3, "inference_ms": 1.5}
    api = {"attempt": None, "status": "canceled", "cost_usd": 0.0, "charged_share": 0.0}
    canceled = {"attempt": 2, "status": "canceled", "cost_usd": 0.0, "steps_saved": 7}
    insert(
        empty,
        row("r1", **worker, replied_at_s=NOW_S + 1),
        row("r1", **api, replied_at_s=NOW_S),
        row("r2", **api, replied_at_s=NOW_S + 1),
        row("r2", **worker, replied_at_s=NOW_S),
        row("r3", **canceled, replied_at_s=NOW_S),
        row("r3", **api, replied_at_s=NOW_S + 1),
    )
    sql = (
        "SELECT row_id, status, attempt, steps_saved FROM penstock.rows_deduplicated"
        " WHERE received_at > '2020-01-01' ORDER BY 1"
    )
    assert rows_of(empty, sql) == [
        ("r1:0", "canceled", None, None),
        ("r2:0", "canceled", None, None),
        ("r3:0", "canceled", 2, 7),
    ]
    [line] = report(empty, "usage")
    assert (line["items"], line["cost_usd"]) == (3, 0)
    [invoiced] = report(empty, "tenants")
    assert invoiced["cost_usd"] == 0


def test_the_id_of_a_prediction_that_comes_again_after_an_hour_counts_again(
    empty: bigquery.Client,
) -> None:
    insert(
        empty,
        row("own_1", received_at_s=NOW_S - 4000, cost_usd=0.25),
        row("own_1", cost_usd=0.25),
    )
    lines = report(empty, "usage", NOW_S - 5000)
    assert (sum(line["items"] for line in lines), sum(line["cost_usd"] for line in lines)) == (
        2,
        0.5,
    )


def test_usage_adds_up_by_day_tenant_and_model(empty: bigquery.Client) -> None:
    computed = {
        "cache": "miss",
        "tokens": 10,
        "batch_size": 4,
        "device_share": 0.5,
        "cost_usd": 0.25,
    }
    rows = [
        row(f"r{n}", queue_ms=float(n), inference_ms=1_000.0, total_ms=float(n), **computed)
        for n in range(100)
    ]
    hits = [
        row("h1", cache="redis", cost_usd=0.0, tokens=10),
        row("h2", cache="memory", cost_usd=0.0),
    ]
    others = [row("o1", tenant="other"), row("o2", received_at_s=NOW_S - 3 * 86_400)]
    insert(empty, *rows, *hits, *others)
    today = dt.datetime.fromtimestamp(NOW_S, dt.UTC).date()
    found = report(empty, "usage")
    assert [(line["day"], line["tenant"], line["items"]) for line in found] == [
        (today, "acme", 102),
        (today, "other", 1),
    ]
    acme = found[0]
    assert (acme["requests"], acme["succeeded"], acme["hit_percent"], acme["joined"]) == (
        102,
        102,
        2.0,
        0,
    )
    assert (acme["queue_p50_ms"], acme["queue_p95_ms"]) == pytest.approx((50, 94), abs=1)
    assert (acme["tokens"], acme["charged_tokens"], acme["pixel_steps"], acme["cost_usd"]) == (
        1_010,
        1_000,
        None,
        25.0,
    )
    assert acme["device_s"] == pytest.approx(100 * 1.0 * 0.5 / 4)
    assert len(report(empty, "usage", NOW_S - 4 * 86_400)) == 3


def test_refused_requests_are_counted_apart_from_items(empty: bigquery.Client) -> None:
    items = [row(f"r{n}", cache="memory", total_ms=10.0, tokens=5) for n in range(4)]
    refused = [
        row(f"f{n}", status="refused", total_ms=0.1, error_code="overloaded", cost_usd=0.0)
        for n in range(6)
    ]
    unknown = row("u", status="refused", model="", error_code="invalid_input")
    insert(empty, *items, *refused, unknown)
    lines = {line["model"]: line for line in report(empty, "usage")}
    known = lines["m"]
    assert (known["items"], known["refused"], known["requests"], known["succeeded"]) == (
        4,
        6,
        10,
        4,
    )
    assert (known["hit_percent"], known["total_p50_ms"], known["tokens"], known["cost_usd"]) == (
        100.0,
        10.0,
        20,
        0.0,
    )
    assert (lines[""]["items"], lines[""]["refused"], lines[""]["hit_percent"]) == (0, 1, None)
    found = {(line["model"], line["error_code"]): line["items"] for line in report(empty, "errors")}
    assert found == {("m", "overloaded"): 6, ("", "invalid_input"): 1}


def test_report_equals_the_same_sums_in_exact_arithmetic(empty: bigquery.Client) -> None:
    """Charged tokens times the price equal the cost, to a double's last digits, for rows from any
    writer.
    """
    drawn = random.Random(16)
    model = Model(
        name="mini",
        task="embedding",
        source="local:x",
        dimensions=1,
        batch=Batch(max_tokens=1),
        price=Price(per_million_tokens_usd=0.013, cached_share=0.3),
    )
    price, shared = Fraction("0.013") / 10**6, Fraction("0.3")
    tokens: dict[str, int] = defaultdict(int)
    charged: dict[str, Fraction] = defaultdict(Fraction)
    sent = []
    for number in range(2_000):
        tenant, cache = (
            drawn.choice(["acme", "other"]),
            drawn.choice(["miss", "none", "memory", "redis", "joined"]),
        )
        status = drawn.choices(["succeeded", "failed", "expired", "canceled"], [12, 1, 1, 1])[0]
        count = (
            drawn.randrange(1, 10**6)
            if status == "succeeded"
            else drawn.choice([None, 7, 10**9 + 7])
        )
        envelope = Envelope(
            request_id=f"r{number}",
            part=0,
            model="mini",
            tenant=tenant,
            deadline_s=NOW_S,
            received_at_s=NOW_S,
            published_at_s=0.0,
        )
        one = row_of(envelope, ItemOutcome(0, status, Receipt(cache, tokens=count)), model)
        tokens[tenant] += count or 0
        if status == "succeeded":
            charged[tenant] += (count or 0) * (1 if cache in ("miss", "none") else shared)
        if cache in ("miss", "none") or status != "succeeded":
            # As an older release's writer left them: charged items were charged in full.
            one.charged_share = drawn.choice([one.charged_share, None])
        sent.append(fields_of(one))
    insert(empty, *sent)
    found = {line["tenant"]: line for line in report(empty, "usage")}
    for tenant in ("acme", "other"):
        line = found[tenant]
        assert line["tokens"] == tokens[tenant]
        assert line["charged_tokens"] == pytest.approx(float(charged[tenant]), rel=1e-12)
        assert line["cost_usd"] == pytest.approx(float(charged[tenant] * price), rel=1e-12)


def test_errors_are_shown_by_code_with_their_share(empty: bigquery.Client) -> None:
    failed = [
        row(f"f{n}", status="failed", error_code="model_failed", attempt=n + 1) for n in range(2)
    ]
    late = row("e1", status="expired", error_code="deadline_exceeded", tenant="other")
    insert(empty, row("ok"), *failed, late, row("x", model="fine"))
    lines = report(empty, "errors")
    assert [
        (line["error_code"], line["items"], line["percent_of_model"], line["most_attempts"])
        for line in lines
    ] == [
        ("model_failed", 2, 50.0, 2),
        ("deadline_exceeded", 1, 25.0, 1),
    ]


def test_the_slowest_come_first(empty: bigquery.Client) -> None:
    insert(empty, *(row(f"r{n}", total_ms=float(n)) for n in range(60)), row("none"))
    lines = report(empty, "slowest")
    assert [line["total_ms"] for line in lines] == [float(n) for n in range(59, 9, -1)]


def test_batches_are_counted_from_their_items(empty: bigquery.Client) -> None:
    batch = {"started_at_s": NOW_S, "batch_wait_ms": 2.0, "inference_ms": 30.0, "worker": "w"}
    of_three = [row(f"a{n}", batch_size=3, **batch) for n in range(3)]
    insert(empty, *of_three, row("b", batch_size=1, **batch), row("hit", cache="redis"))
    (line,) = report(empty, "batches")
    assert (line["items"], line["batches"], line["items_per_batch"], line["workers"]) == (
        4,
        2.0,
        2.0,
        1,
    )
    assert line["inference_ms_per_item"] == pytest.approx((3 * 10 + 30) / 4)


@pytest.mark.parametrize(
    ("unit", "usd", "price"),
    [("pages", 0.001, 0.001), ("seconds", 0.0001, 0.0001), ("characters", 0.000015, 0.000015)],
)
def test_work_with_a_unit_is_billed_in_it(
    empty: bigquery.Client, unit: str, usd: float, price: float
) -> None:
    known = {"task": "custom", "price_version": "1", "work_unit": unit}
    for number, work in enumerate((3, 40, 1000)):
        charge = {"work": work, "list_price_usd": work * usd, "cost_usd": work * usd}
        insert(empty, row(f"r{number}", **known, **charge, charged_share=1.0, cache="miss"))
    shared = {"work": 40, "list_price_usd": 40 * usd, "cost_usd": 0.25 * 40 * usd}
    insert(empty, row("hit", **known, **shared, charged_share=0.25, cache="redis"))
    failed = {"status": "failed", "charged_share": 0.0, "cost_usd": 0.0, "list_price_usd": 0.0}
    insert(empty, row("failed", **known, **failed, work=7, cache="none"))
    old = {"task": "custom", "price_version": "1", "charged_share": 1.0, "cache": "miss"}
    insert(empty, row("old", **old, work=9, list_price_usd=9 * usd, cost_usd=9 * usd))
    lines = report(empty, "invoice")
    found = {(line["kind"], line["unit"]): line for line in lines}
    assert {at: line["quantity"] for at, line in found.items()} == {
        ("computed", unit): 1043,
        ("cached", unit): 40,
        ("failed", unit): 0,
        ("computed", "requests"): 1,
    }
    for kind in ("computed", "cached"):
        line = found[kind, unit]
        assert (line["unit_price_usd"], line["price_per"]) == (price, 1)
        amount = line["quantity"] * line["unit_price_usd"] * line["charged_share"]
        assert line["amount_usd"] == pytest.approx(amount, rel=1e-12)


def test_items_of_ones_own_models_are_one_line_whatever_each_weighs(
    empty: bigquery.Client,
) -> None:
    """Otherwise, an invoice would have a separate line for each different item duration."""
    known = {"task": "custom", "charged_share": 1.0, "price_version": "1", "cache": "none"}
    for number, usd in enumerate((0.25, 0.5, 0.75)):
        charge = {"work": number + 1, "list_price_usd": usd, "cost_usd": usd}
        insert(empty, row(f"r{number}", **known, **charge))
    (line,) = report(empty, "invoice")
    assert (line["unit"], line["quantity"], line["unit_price_usd"]) == ("requests", 3, 0.5)
    assert line["amount_usd"] == 1.5
