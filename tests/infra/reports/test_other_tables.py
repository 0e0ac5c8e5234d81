"""Reports that read more than the rows, or that check the rows: few lines, with known results."""

import datetime as dt
from typing import Any

import pytest
from google.cloud import bigquery

from shared.reports.definitions import ReportQuestion, ask, find_report
from shared.reports.runner import ReportRunner
from tests.infra.reports import expected
from tests.infra.reports.conftest import BUDGETS_USD, DATASET, load
from tests.infra.reports.generated import Fields
from tests.infra.reports.test_reports import ALL

pytestmark = pytest.mark.slow

DAY = dt.datetime(2026, 10, 7, tzinfo=dt.UTC)
QUESTION = ReportQuestion(DAY, DAY + dt.timedelta(days=1))
L4_SPOT, L4, A100 = 0.538352, 0.897201806, 3.747972
L4_OF_SEVERAL = 1.051487566
"""Price per hour in europe-west4 (infra/terraform/prices.yaml)."""


def row(request: str, item: int = 0, **given: Any) -> Fields:
    known: Fields = {
        "row_id": f"{request}:{item}",
        "request_id": request,
        "item": item,
        "tenant": "acme",
        "model": "mini",
        "received_at": DAY + dt.timedelta(hours=1),
        "replied_at": DAY + dt.timedelta(hours=1, seconds=1),
        "status": "succeeded",
        "attempt": 1,
        "price_version": "1",
    }
    return known | given


def computed(request: str, device_s: float, **given: Any) -> Fields:
    ran: Fields = {
        "cache": "miss",
        "inference_ms": device_s * 1000,
        "batch_size": 1,
        "device_share": 1.0,
        "gpu_type": "l4",
        "region": "europe-west4",
        "worker": "w1",
    }
    return row(request, **(ran | given))


def worker_hour(worker: str, number: int = 0, **given: Any) -> Fields:
    hour = DAY + dt.timedelta(hours=1)
    known: Fields = {
        "row_id": f"{worker}:{number}",
        "worker": worker,
        "hour": hour,
        "since": hour,
        "reported_at": hour + dt.timedelta(hours=1),
        "started_at": DAY,
        "region": "europe-west4",
        "deployment": "mini",
        "models": "mini",
        "gpu_type": "l4",
        "spot": False,
        "device_share": 1.0,
        "busy_s": 900.0,
        "idle_s": 2600.0,
        "loading_s": 100.0,
        "batches": 1,
        "items": 1,
        "cold_starts": 0,
    }
    return known | given


def asked(
    client: bigquery.Client, name: str, question: ReportQuestion = QUESTION
) -> list[dict[str, Any]]:
    runner = ReportRunner(client, DATASET, budgets_usd=BUDGETS_USD)
    return runner.run(find_report(name), question).records()


def test_margin_prices_busy_idle_and_loading_time(empty: bigquery.Client) -> None:
    load(
        empty,
        "rows",
        [
            computed("a", 10.0, cost_usd=5.0),
            computed("b", 30.0, cost_usd=1.0, model="draw", worker="w2"),
            computed("c", 10.0, cost_usd=2.0, worker="w2"),
            computed("c", 10.0, cost_usd=2.0, worker="w2"),
        ],
    )
    load(
        empty,
        "worker_hours",
        [
            worker_hour("w1"),
            worker_hour("w1"),  # written twice
            worker_hour("w2", models="mini,draw", device_share=0.5, spot=True),
            worker_hour("w3", models="idle", gpu_type="a100"),
            worker_hour("w4", models="mini", gpu_type=None),
            worker_hour("w5", since=DAY - dt.timedelta(hours=1), hour=DAY - dt.timedelta(hours=1)),
        ],
    )
    lines = {line["model"]: line for line in asked(empty, "margin")}
    mini = lines["mini"]
    assert mini["revenue_usd"] == 7.0
    # All of w1, plus a quarter of mini's half of a spot GPU.
    assert mini["cost_usd"] == pytest.approx(L4 + 0.5 * L4_SPOT * 0.25)
    assert mini["idle_usd"] == pytest.approx((L4 + 0.5 * L4_SPOT * 0.25) * 2600 / 3600)
    assert mini["margin_usd"] == pytest.approx(7.0 - mini["cost_usd"])
    assert (mini["gpu_hours"], mini["unpriced_hours"]) == (2.125, 1.0)
    assert lines["draw"]["cost_usd"] == pytest.approx(0.5 * L4_SPOT * 0.75)
    assert (lines["idle"]["revenue_usd"], lines["idle"]["margin_percent"]) == (0.0, None)
    assert lines["idle"]["margin_usd"] == pytest.approx(-A100)
    total = sum(line["cost_usd"] for line in lines.values())
    assert total == pytest.approx(L4 + 0.5 * L4_SPOT + A100)


def test_gpus_of_a_node_with_several_have_their_own_price(empty: bigquery.Client) -> None:
    load(empty, "worker_hours", [worker_hour("w1", device_share=4.0)])
    load(empty, "rows", [computed("a", 2.0, tokens=100, device_share=4.0), row("b", cache="redis")])
    assert asked(empty, "margin")[0]["cost_usd"] == pytest.approx(4 * L4_OF_SEVERAL)
    assert asked(empty, "cache")[0]["gpu_usd_per_hour"] == pytest.approx(L4_OF_SEVERAL, abs=1e-6)


def test_margin_of_a_release_without_worker_hours_knows_no_cost(empty: bigquery.Client) -> None:
    load(empty, "rows", [computed("a", 10.0, cost_usd=5.0)])
    (line,) = asked(empty, "margin")
    assert (line["revenue_usd"], line["cost_usd"], line["margin_usd"]) == (5.0, None, None)


def test_cache_saves_list_price_and_the_time_of_computed_units(empty: bigquery.Client) -> None:
    load(
        empty,
        "rows",
        [
            computed("a", 2.0, tokens=100, cost_usd=1.0, list_price_usd=1.0, charged_share=1.0),
            computed("b", 6.0, tokens=300, cost_usd=3.0),  # from an older release
            row("c", cache="redis", tokens=50, cost_usd=0.1, list_price_usd=0.5, charged_share=0.2),
            row("d", cache="joined", tokens=100, cost_usd=0.0),  # from an older release
            row("e", cache="redis", tokens=999, status="failed", cost_usd=0.0),
        ],
    )
    (line,) = asked(empty, "cache")
    assert (line["items"], line["hits"], line["joined"], line["hit_percent"]) == (4, 1, 1, 50.0)
    assert line["charged_usd"] == pytest.approx(0.1)
    assert line["list_usd"] == pytest.approx(0.5 + 100 * 0.01)
    assert line["caller_saved_usd"] == pytest.approx(1.4)
    assert line["gpu_saved_s"] == pytest.approx(150 * 0.02)
    assert line["gpu_saved_usd"] == pytest.approx(3.0 / 3600 * L4)


@pytest.mark.parametrize(
    ("since", "until"),
    [
        ("2026-10-01", "2026-12-01"),
        ("2026-10-05", "2026-11-09"),
        ("2026-10-30", "2026-11-02"),
        ("2026-10-31T23:59:59Z", "2026-11-01T00:00:01Z"),
    ],
)
def test_budgets_are_of_whole_months_of_utc_whatever_the_range(
    loaded: bigquery.Client, made_rows: list[Fields], since: str, until: str
) -> None:
    question = ask(since, until, "Asia/Tokyo")
    if until.startswith("2026-11-01"):
        question = ask(since, until)
    lines = {
        (line["tenant"], line["month"].month): line for line in asked(loaded, "budgets", question)
    }
    rows = expected.once(made_rows, ask("2026-10-01", "2026-12-01"))
    for tenant, month in (("acme", 10), ("acme", 11), ("globex", 10)):
        spent = expected.exact(
            (r for r in rows if (r["tenant"], r["received_at"].month) == (tenant, month)),
            "cost_usd",
        )
        line = lines[tenant, month]
        assert line["spent_usd"] == pytest.approx(spent, rel=1e-9)
        budget = BUDGETS_USD.get(tenant)
        assert line["budget_usd"] == budget
        assert line["left_usd"] == (None if budget is None else pytest.approx(budget - spent))
    october = lines["acme", 10]
    assert october["elapsed_percent"] == 100.0
    assert october["month_end_usd"] == pytest.approx(october["spent_usd"])
    assert [lines["nobody", month]["spent_usd"] for month in (10, 11)] == [0.0, 0.0]


def test_invoice_of_a_part_of_a_month_is_that_of_the_month(
    loaded: bigquery.Client, made_rows: list[Fields]
) -> None:
    rows = expected.once(made_rows, ask("2026-10-01", "2026-11-01"))
    wanted = expected.exact((r for r in rows if r["tenant"] == "acme"), "cost_usd")
    for since, until in (("2026-10-01", "2026-11-01"), ("2026-10-14", "2026-10-15")):
        lines = asked(loaded, "invoice", ask(since, until))
        owed = sum(float(line["amount_usd"]) for line in lines if line["tenant"] == "acme")
        assert owed == pytest.approx(wanted, rel=1e-9)


def delivery(event: str, number: int, outcome: str, at_s: float, **given: Any) -> Fields:
    known: Fields = {
        "row_id": f"{event}:{number}",
        "delivery_id": event,
        "tenant": "acme",
        "event": "completed",
        "attempt": number,
        "outcome": outcome,
        "duration_ms": 10.0,
        "published_at": DAY,
        "delivered_at": DAY + dt.timedelta(seconds=at_s),
    }
    return known | given


def test_webhooks_count_events_and_attempts(empty: bigquery.Client) -> None:
    deliveries = [
        delivery("a", 1, "delivered", 1.0, status_code=200),
        delivery("a", 1, "delivered", 1.0, status_code=200),  # written twice
        delivery("b", 1, "failed", 2.0, status_code=503),
        delivery("b", 2, "delivered", 32.0, status_code=200),
        delivery("c", 1, "failed", 2.0, error="connection"),
        delivery("d", 1, "gone", 2.0, status_code=410),
        delivery("e", 1, "failed", 2.0, status_code=503, attempt=None, tenant=None),
    ]
    load(empty, "webhook_deliveries", deliveries)
    lines = {line["tenant"]: line for line in asked(empty, "webhooks")}
    acme = lines["acme"]
    assert (acme["events"], acme["attempts"], acme["given_up"], acme["open"]) == (4, 5, 1, 1)
    assert (acme["delivered_percent"], acme["first_try_percent"]) == (50.0, 25.0)
    assert acme["top_failure"] in ("410", "503", "connection")
    assert acme["delay_p95_s"] == 32.0
    assert (lines[""]["open"], lines[""]["top_failure"]) == (1, "503")


def worker_start(worker: str, **given: Any) -> Fields:
    known: Fields = {
        "row_id": worker,
        "worker": worker,
        "started_at": DAY + dt.timedelta(hours=1),
        "reported_at": DAY + dt.timedelta(hours=1, minutes=5),
        "region": "europe-west4",
        "deployment": "mini",
        "models": "mini",
        "weights_s": 2.0,
        "backend_s": 0.0,
        "load_s": 10.0,
        "compile_s": 5.0,
        "ready_s": 18.0,
        "first_batch_s": 0.5,
    }
    return known | given


def test_starts_have_a_line_per_model_and_phase(empty: bigquery.Client) -> None:
    starts = [
        *(worker_start(f"w{number}", weights_s=float(number)) for number in range(1, 20)),
        worker_start("w19", weights_s=19.0),  # written twice
        worker_start("w20", models="mini,draw", weights_s=100.0, node_s=90.0, image_s=60.0),
        worker_start("w21", load_s=None, compile_s=None, ready_s=None, first_batch_s=None),
        worker_start("w22", started_at=QUESTION.until),
    ]
    load(empty, "worker_starts", starts)
    lines = {(line["model"], line["phase"]): line for line in asked(empty, "starts")}
    assert [phase for model, phase in lines if model == "draw"] == [
        *("node", "image", "weights", "backend", "load", "compile", "total", "first batch")
    ]
    weights = lines["mini", "weights"]
    assert (weights["starts"], weights["measured"], weights["max_s"]) == (21, 21, 100.0)
    assert weights["p50_s"] == pytest.approx(10.0, abs=1)
    assert weights["p95_s"] == pytest.approx(19.0, abs=1)
    assert (lines["mini", "node"]["measured"], lines["mini", "node"]["p50_s"]) == (1, 90.0)
    assert (lines["mini", "total"]["starts"], lines["mini", "total"]["measured"]) == (21, 20)
    assert lines["draw", "image"]["p95_s"] == 60.0
    drawn = asked(empty, "starts", QUESTION._replace(models=("draw",)))
    assert {line["model"] for line in drawn} == {"draw"}
    load(empty, "worker_starts", [worker_start("w23", models="other", gpu_type="l4")])
    other = [line for line in asked(empty, "starts") if line["model"] == "other"]
    assert {line["phase"]: line["p50_s"] for line in other}["node"] is None


def test_quality_names_what_cannot_be_trusted(empty: bigquery.Client) -> None:
    at = DAY + dt.timedelta(hours=1)
    rows = [
        row("ok", cost_usd=0.5, list_price_usd=1.0, charged_share=0.5),
        row("twice"),
        row("twice"),
        row("gap", item=0),
        row("gap", item=3),
        row("late", replied_at=DAY + dt.timedelta(days=1, seconds=1)),
        row("skew", published_at=at - dt.timedelta(milliseconds=6)),
        row("near", published_at=at - dt.timedelta(milliseconds=4)),
        row("wrong", cost_usd=0.6, list_price_usd=1.0, charged_share=0.5),
        row("unfair", status="failed", cost_usd=0.1),
        row("unread", status="expired", cost_usd=0.1),
        row("read", status="canceled", cost_usd=0.1, output_tokens=3),
        row("old", price_version=None),
        row("nobody", tenant=None),
    ]
    load(empty, "rows", rows)
    load(empty, "worker_hours", [worker_hour("w1"), worker_hour("w2", busy_s=990.0)])
    found = {line["check_name"]: line for line in asked(empty, "data_quality")}
    assert {name: (line["found"], line["example"]) for name, line in found.items()} == {
        "double rows": (1, "twice:0"),
        "missing items": (2, "gap"),
        "late rows": (1, "late:0"),
        "clock skew": (1, "skew:0"),
        "received in the future": (0, None),
        "charges that do not add up": (1, "wrong:0"),
        "charged without delivery": (2, "unfair:0"),
        "rows without a price version": (1, "old:0"),
        "rows without a tenant": (1, "nobody:0"),
        "times of workers that do not add up": (1, "w2:0"),
    }


def test_a_row_received_before_and_written_after_the_range_is_in_it(empty: bigquery.Client) -> None:
    late = row("late", replied_at=QUESTION.until + dt.timedelta(days=2), cost_usd=0.25)
    assert asked(empty, "usage") == []
    load(empty, "rows", [late])
    assert [line["cost_usd"] for line in asked(empty, "usage")] == [0.25]
    before = row("before", received_at=QUESTION.since - dt.timedelta(microseconds=1))
    load(empty, "rows", [before | {"replied_at": QUESTION.since + dt.timedelta(hours=1)}])
    assert len(asked(empty, "usage")) == 1


def test_questions_are_data_and_never_sql(loaded: bigquery.Client) -> None:
    name = "' OR 1=1 --"
    assert asked(loaded, "usage", ALL._replace(tenants=(name,))) == []
