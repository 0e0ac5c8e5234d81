"""Each report matches the result computed in plain Python from the same rows, in each time zone."""

from typing import Any

import pytest
from google.cloud import bigquery

from shared.reports.definitions import ReportQuestion, ask, find_report, reports
from shared.reports.runner import ReportResult, ReportRunner
from tests.infra.reports import expected
from tests.infra.reports.conftest import DATASET
from tests.infra.reports.generated import AFTER, FIRST, TENANTS, Fields

pytestmark = pytest.mark.slow

NAMES = {
    "usage": expected.usage,
    "usage_keys": expected.usage_keys,
    "usage_hours": expected.usage_hours,
    "daily": expected.daily,
    "invoice": expected.invoice,
    "latency": expected.latency,
    "slo": expected.slo,
    "errors": expected.errors,
    "slowest": expected.slowest,
    "batches": expected.batches,
    "flows": expected.flows,
    "tenants": expected.tenants,
    "capacity": expected.capacity,
    "forecast": expected.forecast,
}
ALL = ReportQuestion(FIRST, AFTER)
QUESTIONS = {
    "all": ALL,
    "Berlin, with the day of 25 hours": ask("2026-10-19", "2026-10-28", "Europe/Berlin"),
    "New York, with the day of 25 hours": ask("2026-10-30", "2026-11-04", "America/New_York"),
    "a zone off by half an hour": ask("2026-10-14", "2026-10-24", "Asia/Kolkata"),
    "a day without rows": ask("2026-10-21", "2026-10-22", "Europe/Berlin"),
    "one tenant, one model": ALL._replace(tenants=("acme",), models=("mini",), tz="Asia/Tokyo"),
    "part of a day": ask("2026-10-12T10:20:00Z", "2026-10-12T21:00:00Z"),
}


ROUNDED = {
    "gpus": 0.00006,
    "device_s": 0.0006,
    "burn": 0.0006,
    "ms_per_item": 0.0006,
    "per_batch": 0.006,
    "_ms": 0.051,
    "percent": 0.051,
    "mean": 0.051,
    "items": 0.051,
    "batches": 0.051,
}
"""Rounding tolerance for columns whose names contain these words. Other columns are not rounded."""


def by_key(result: ReportResult, columns: int) -> dict[tuple[Any, ...], Fields]:
    heads = result.heads
    lines = {
        row[:columns]: dict(zip(heads[columns:], row[columns:], strict=True)) for row in result.rows
    }
    assert len(lines) == len(result.rows), "two lines have one key"
    return lines


def assert_equal(found: Any, wanted: Any, where: Any) -> None:
    if isinstance(wanted, expected.Near):
        assert wanted == found, where
    elif isinstance(wanted, float) and isinstance(found, float | int):
        loose = next((by for words, by in ROUNDED.items() if words in where[-1]), 0.0)
        assert found == pytest.approx(wanted, rel=1e-9, abs=loose), where
    elif wanted == 0 and found is None:
        pass  # a sum over zero rows
    else:
        assert wanted == found, where


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
@pytest.mark.parametrize("name", NAMES)
def test_report_is_what_plain_python_computes(
    name: str, question: ReportQuestion, runner: ReportRunner, made_rows: list[Fields]
) -> None:
    if name == "forecast" and question.until - question.since < AFTER - FIRST:
        pytest.skip("a forecast is made from weeks")
    report = find_report(name)
    result = runner.run(report, question)
    wanted = NAMES[name](made_rows, result.question)  # whole months, if the report covers months
    keys = len(next(iter(wanted), ())) or 1
    lines = by_key(result, keys)
    assert lines.keys() == wanted.keys()
    for key, line in wanted.items():
        for column, value in line.items():
            assert_equal(lines[key][column], value, (name, key, column))


@pytest.mark.parametrize("name", reports())
def test_report_has_the_columns_that_its_head_says_and_the_same_of_nothing(
    name: str, nothing: bigquery.Client
) -> None:
    report = find_report(name)
    result = ReportRunner(nothing, DATASET).run(report, ask("2026-10-01", "2026-10-15"))
    assert result.heads == list(report.columns)
    assert len(result.rows) == {"daily": 14, "slo": 14, "capacity": 168, "forecast": 168}.get(
        name, 10 if name == "data_quality" else 0
    )


def test_lines_of_an_invoice_add_up_to_the_rows(
    runner: ReportRunner, made_rows: list[Fields]
) -> None:
    lines = runner.run(find_report("invoice"), ALL).records()
    for tenant in TENANTS:
        rows = expected.once(made_rows, ALL._replace(tenants=(tenant,)))
        total = sum(line["amount_usd"] for line in lines if line["tenant"] == tenant)
        assert total == pytest.approx(expected.exact(rows, "cost_usd"), rel=1e-12)


def test_a_price_that_changed_in_the_month_is_right_on_both_sides(runner: ReportRunner) -> None:
    lines = runner.run(find_report("invoice"), ALL).records()
    found = {
        (line["price_version"], line["unit_price_usd"])
        for line in lines
        if line["model"] == "mini" and line["kind"] == "computed"
    }
    assert found == {(None, 0.01), ("1", 0.01), ("2", 0.013)}
    for line in lines:
        price = line["unit_price_usd"] or 0.0
        amount = line["quantity"] * price / line["price_per"] * line["charged_share"]
        assert line["amount_usd"] == pytest.approx(amount, rel=1e-9, abs=1e-15)


def test_texts_are_lines_with_an_average_price(runner: ReportRunner) -> None:
    lines = [
        line
        for line in runner.run(find_report("invoice"), ALL).records()
        if line["model"] == "write" and line["tenant"] == "acme" and line["quantity"]
    ]
    assert 1 < len(lines) < 40, "not a line for each text"
    assert all(0.05 <= line["unit_price_usd"] <= 0.18 for line in lines)
    partly = [one for one in lines if one["kind"] in ("canceled", "expired")]
    assert {(one["kind"], one["charged_share"], one["amount_usd"] > 0) for one in partly} == {
        (kind, share, share > 0) for kind in ("canceled", "expired") for share in (0.0, 1.0)
    }


def test_what_was_not_delivered_is_on_the_invoice_and_costs_nothing(runner: ReportRunner) -> None:
    found = runner.run(find_report("invoice"), ALL).records()
    lines = [line for line in found if line["model"] != "write"]
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in KINDS}
    for kind in ("failed", "expired", "canceled"):
        assert by_kind[kind]
        assert all(line["amount_usd"] == line["charged_share"] == 0 for line in by_kind[kind])
    shares = {kind: {line["charged_share"] for line in of} for kind, of in by_kind.items()}
    assert shares["computed"] == {1.0, 0.5}
    assert shares["cached"] == {0.25, 0.125}


KINDS = ("computed", "cached", "failed", "expired", "canceled")
