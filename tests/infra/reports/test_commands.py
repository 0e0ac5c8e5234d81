"""`penstock report` and `penstock invoice`, as a user runs them."""

import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from google.cloud import bigquery
from typer.testing import CliRunner, Result

from infra.cli.main import app
from shared.reports.definitions import reports
from tests.infra.reports import expected
from tests.infra.reports.conftest import DATASET
from tests.infra.reports.generated import TENANTS, Fields
from tests.infra.reports.test_reports import ALL
from tests.keys import keys_url

pytestmark = pytest.mark.slow

Told = Callable[..., Result]
RANGE = ("--from", "2026-10-05", "--to", "2026-11-09")


@pytest.fixture
def printed(
    loaded: bigquery.Client,
    bigquery_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Told:
    """Runs commands with the settings for the generated rows."""
    monkeypatch.setenv("PENSTOCK_BIGQUERY_ENDPOINT", bigquery_endpoint)
    monkeypatch.setenv("PENSTOCK_PROJECT", loaded.project)
    monkeypatch.setenv("PENSTOCK_DATASET", DATASET)
    return lambda *words: CliRunner().invoke(app, words)


def test_list_names_owner_and_audience(printed: Told) -> None:
    shown = printed("report", "list").stdout
    for one in reports().values():
        assert one.title in shown
    assert printed("report").stdout == shown


def test_one_report_in_each_format_says_the_same(printed: Told, tmp_path: Path) -> None:
    words = ("report", "usage_keys", *RANGE, "--tenant", "acme", "--model", "draw")
    rows = json.loads(printed(*words, "--format", "json").stdout)
    assert {row["tenant"] for row in rows} == {"acme"}
    lines = list(csv.DictReader(io.StringIO(printed(*words, "--format", "csv").stdout)))
    costs = [row["cost_usd"] for row in rows]
    assert [float(line["cost_usd"]) for line in lines] == pytest.approx(costs, rel=1e-12)
    assert [line["key_id"] or None for line in lines] == [row["key_id"] for row in rows]
    file = tmp_path / "usage.parquet"
    assert printed(*words, "--format", "parquet", "--output", str(file)).exit_code == 0
    with duckdb.connect() as connection:
        kept = connection.execute(
            "SELECT CAST(day AS VARCHAR), cost_usd FROM read_parquet(?)", [str(file)]
        ).fetchall()
    assert [day for day, _ in kept] == [row["day"] for row in rows]
    assert [cost for _, cost in kept] == pytest.approx(costs, rel=1e-12)
    assert len(printed(*words).stdout.splitlines()) == 1 + len(rows)


def test_all_reports_become_files_of_a_folder(printed: Told, tmp_path: Path) -> None:
    answer = printed("report", "all", *RANGE, "--format", "csv", "--output", str(tmp_path / "made"))
    assert answer.exit_code == 0, answer.stderr
    made = {path.stem for path in (tmp_path / "made").iterdir()}
    assert made == reports().keys()


def test_all_reports_of_a_tenant_are_those_that_have_tenants(printed: Told) -> None:
    shown = json.loads(printed("report", "all", *RANGE, "--tenant", "acme", "--json").stdout)
    assert shown.keys() == {name for name, one in reports().items() if "tenants" not in one.without}


def test_dry_run_says_the_cost_and_reads_nothing(printed: Told) -> None:
    shown = printed("report", "usage", *RANGE, "--dry-run", "--max-gib", "0.001").stdout
    assert shown.startswith("usage: ")
    assert shown.endswith("on demand\n")


def test_query_that_would_read_too_much_is_refused(printed: Told) -> None:
    answer = printed("report", "usage", *RANGE, "--max-gib", "0.001")
    assert answer.exit_code == 1
    assert "bytes billed" in answer.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("usage", "--from", "2026-13-01"),
            "from: must be a date such as 2026-10-01 or a time, got '2026-13-01'",
        ),
        (("usage", "--from", "2026-11-01", "--to", "2026-10-01"), "must be before the end"),
        (
            ("usage", "--tz", "Europe/Bonn"),
            "tz: must be a time zone such as Europe/Berlin, got 'Europe/Bonn'",
        ),
        (("usage", "--tz", "../../etc/passwd"), "must be a time zone"),
        (("margin", "--tenant", "acme"), "tenant: the report margin does not support this filter"),
        (
            ("usage", "--format", "xls"),
            "format: must be one of table, csv, json, parquet, html, got 'xls'",
        ),
        (("slo", "--set", "weather=1"), "the report slo has no parameter 'weather'"),
        (("budgets", "--set", "budgets_usd=1"), "has no parameter 'budgets_usd'"),
        (("usage", "--set", "x"), "set must be NAME=NUMBER, got 'x'"),
        (("all", "--format", "csv"), "format: csv requires a single report"),
        (("usage", "--tenant", "x" * 300), "tenant: must have 1 to 1000 names"),
    ],
)
def test_wrong_words_are_refused_by_name(
    printed: Told, words: tuple[str, ...], reason: str
) -> None:
    answer = printed("report", *words)
    assert answer.exit_code == 1
    assert reason in answer.stderr


def test_budgets_are_those_of_the_directory_of_keys(
    printed: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shared.tenants.plan import Plan

    plans = {"small": Plan(budget_usd_per_month=0.5)}
    url = keys_url(tmp_path, plans=plans, tenants={"globex": "small"}, g="globex", a="acme")
    monkeypatch.setenv("PENSTOCK_KEYS_URL", url)
    rows = json.loads(printed("report", "budgets", *RANGE, "--json").stdout)
    assert {(row["tenant"], row["budget_usd"]) for row in rows if row["tenant"] != "acme"} == {
        ("globex", 0.5),
        ("initech", None),
        ("umbrella", None),
    }


def test_invoices_of_a_month_add_up(printed: Told, made_rows: list[Fields]) -> None:
    answer = printed("invoice", "--month", "2026-10", "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(answer.stdout)))
    october = ALL._replace(until=ALL.until.replace(month=11, day=1))
    for tenant in TENANTS:
        own = [line for line in lines if line["tenant"] == tenant]
        total = sum(Decimal(line["amount_usd"]) for line in own)
        assert {line["invoice_total_usd"] for line in own} == {str(total)}
        assert {Decimal(line["amount_due_usd"]) for line in own} == {round(total, 2)}
        rows = expected.once(made_rows, october._replace(tenants=(tenant,)))
        assert abs(float(total) - expected.exact(rows, "cost_usd")) <= 0.5e-6 * len(own)


def test_invoices_are_a_file_for_each_tenant_with_the_same_number_again(
    printed: Told, tmp_path: Path
) -> None:
    names = []
    for folder in ("first", "again"):
        answer = printed("invoice", "--month", "2026-10", "--output", str(tmp_path / folder))
        assert answer.exit_code == 0
        names.append(sorted(path.name for path in (tmp_path / folder).iterdir()))
    assert names[0] == names[1]
    assert len(names[0]) == len(TENANTS)


@pytest.mark.parametrize("month", ["2026-13", "26-10", "2026-10-01", ""])
def test_wrong_month_is_refused(printed: Told, month: str) -> None:
    answer = printed("invoice", "--month", month)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert "must be a month such as 2026-10" in answer.stderr
