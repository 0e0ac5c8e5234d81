"""Google's own GoogleSQL analyzer accepts each report, with the expected column types."""

from typing import Any

import pytest

from bigquery_emulator import (
    Analyzer,
    InvalidQueryError,
    NamedTable,
    ParameterTypes,
    parse_schema,
    type_of_field,
    type_of_parameter,
)
from infra import bigquery as tables
from shared.reports.definitions import Report, reports

EACH = pytest.mark.parametrize("report", reports().values(), ids=list(reports()))
PRICES = {
    "gpu_type": "STRING",
    "spot": "BOOLEAN",
    "region": "STRING",
    "usd_per_hour": "FLOAT",
    "valid_from": "TIMESTAMP",
    "has_several_gpus": "BOOLEAN",
}
STANDARD = {
    "since": "TIMESTAMP",
    "until": "TIMESTAMP",
    "tz": "STRING",
    "tenants": "ARRAY<STRING>",
    "models": "ARRAY<STRING>",
}


pytestmark = pytest.mark.slow  # an external oracle


@pytest.fixture(scope="module")
def analyzer() -> Analyzer:
    return Analyzer()


def known_tables() -> list[NamedTable]:
    fields: dict[str, Any] = {name: tables.schema(name) for name in tables.tables()}
    fields["gpu_prices"] = [{"name": name, "type": kind} for name, kind in PRICES.items()]
    return [
        NamedTable((name,), name, [(one.name, type_of_field(one)) for one in parse_schema(of)])
        for name, of in fields.items()
    ]


def parameter_types(report: Report) -> ParameterTypes:
    given = STANDARD | {one.name: one.type for one in report.parameters}
    return ParameterTypes(
        named=[(name, type_of_parameter(_resource(kind))) for name, kind in given.items()]
    )


def _resource(kind: str) -> dict[str, Any]:
    if kind.startswith("ARRAY<"):
        return {"type": "ARRAY", "arrayType": {"type": kind[6:-1]}}
    return {"type": kind}


@EACH
def test_analyzer_accepts_the_report(analyzer: Analyzer, report: Report) -> None:
    named = {path for path in analyzer.table_paths(report.sql)}
    known = known_tables()
    assert named <= {table.path for table in known}
    tree = analyzer.analyze(report.sql, known, parameter_types(report))
    assert [column.name for column in tree.output_column_list] == list(report.columns)


def test_analyzer_refuses_a_report_with_a_wrong_column(analyzer: Analyzer) -> None:
    report = reports()["usage"]
    wrong = report.sql.replace("SUM(cost_usd)", "SUM(price_usd)")
    with pytest.raises(InvalidQueryError, match="Unrecognized name: price_usd"):
        analyzer.analyze(wrong, known_tables(), parameter_types(report))
