"""Report headers, the document that lists them, and a check that they are valid GoogleSQL."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from infra.reports.reference import DOCUMENT, with_reference
from shared.errors import BadInput
from shared.reports.definitions import Report, find_report, parse_report, reports
from tests.limits import WAIT_LIMIT_S

EACH = pytest.mark.parametrize("report", reports().values(), ids=list(reports()))
STANDARD = {"since", "until", "tz", "tenants", "models"}


@EACH
def test_head_says_what_the_query_has(report: Report) -> None:
    assert report.title.endswith(".")
    tree = sqlglot.parse_one(report.sql, dialect="bigquery")
    assert isinstance(tree, exp.Query)
    assert list(report.columns) == tree.named_selects
    used = {node.name for node in tree.find_all(exp.Parameter)}
    own = {parameter.name for parameter in report.parameters}
    assert own <= used <= own | STANDARD
    assert {"since", "until"} <= used
    for name in ("tenants", "models"):
        assert (name in report.without) == (name not in used), name
    drawn = {name for plot in report.plots for name in (*plot.values, plot.by, plot.color)}
    assert drawn - {""} <= report.columns.keys()


@EACH
def test_no_query_reads_more_columns_than_it_names(report: Report) -> None:
    tree = sqlglot.parse_one(report.sql, dialect="bigquery")
    for select in tree.find_all(exp.Select):
        tables = [table.name for table in select.find_all(exp.Table)]
        if any(isinstance(one, exp.Star) for one in select.expressions):
            assert not {"rows", "worker_hours", "worker_starts", "webhook_deliveries"} & set(tables)


def test_document_has_the_reports_as_they_are() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_reference(text) == text, "run python -m infra.reports.reference"


@pytest.mark.parametrize(
    "head",
    ["-- Title.", "-- Title.\n-- owner: nobody\n-- audience: tenants\n-- column a: b"],
    ids=["no owner", "unknown owner"],
)
def test_head_that_is_not_whole_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match="this is a bug"):
        parse_report("x", f"{head}\nSELECT 1 AS a")


def test_unknown_report_is_named() -> None:
    with pytest.raises(BadInput, match="report 'weather' does not exist; use one of batches"):
        find_report("weather")


@pytest.mark.skipif(
    shutil.which("bq") is None or not os.environ.get("PENSTOCK_TEST_BIGQUERY_DATASET"),
    reason="needs bq with credentials, and PENSTOCK_TEST_BIGQUERY_DATASET=PROJECT:DATASET",
)
@EACH
def test_bigquery_itself_accepts_the_query(report: Report, tmp_path: Path) -> None:
    dataset = os.environ["PENSTOCK_TEST_BIGQUERY_DATASET"]
    values = [
        "since:TIMESTAMP:2026-10-01 00:00:00",
        "until:TIMESTAMP:2026-10-08 00:00:00",
        "tz:STRING:Europe/Berlin",
        "tenants:ARRAY<STRING>:[]",
        "models:ARRAY<STRING>:[]",
        *(
            f"{one.name}:{one.type}:{'[]' if one.default is None else one.default}"
            for one in report.parameters
        ),
    ]
    command = ["bq", "query", "--use_legacy_sql=false", "--dry_run", f"--dataset_id={dataset}"]
    command += [f"--parameter={value}" for value in values]
    reported = subprocess.run(
        command, input=report.sql, capture_output=True, text=True, timeout=WAIT_LIMIT_S
    )
    assert reported.returncode == 0, reported.stdout + reported.stderr
