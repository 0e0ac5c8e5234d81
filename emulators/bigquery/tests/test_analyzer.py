"""Google's analyzer as the embedded BigQuery calls it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TYPE_INT64, TYPE_TIMESTAMP, TypeProto

from bigquery_emulator.errors import InvalidQueryError, UnsupportedError
from bigquery_emulator.googlesql.analysis import module
from bigquery_emulator.googlesql.analysis.analyzer import (
    Analyzer,
    NamedTable,
    ParameterTypes,
)
from tests.limits import START_LIMIT_S

_COLUMNS = [
    ("id", TypeProto(type_kind=TYPE_INT64)),
    ("at", TypeProto(type_kind=TYPE_TIMESTAMP)),
]


@pytest.fixture(scope="module")
def analyzer() -> Analyzer:
    return Analyzer()


def test_names_of_tables_come_in_the_parts_that_are_written(analyzer: Analyzer) -> None:
    sql = (
        "WITH c AS (SELECT 1) SELECT * FROM c, d.t, `p-1.d.u`, p-1.d.v, d.INFORMATION_SCHEMA.TABLES"
    )
    assert analyzer.table_paths(sql) == [
        ("d", "INFORMATION_SCHEMA", "TABLES"),
        ("d", "t"),
        ("p-1", "d", "v"),
        ("p-1.d.u",),
    ]


def test_a_table_scan_has_the_key_and_only_the_columns_that_are_read(analyzer: Analyzer) -> None:
    tables = [NamedTable(("d", "t"), "key", _COLUMNS)]
    tree = analyzer.analyze("SELECT id FROM d.t ORDER BY id", tables, ParameterTypes())
    (scan,) = [node for node in tree.walk() if node.kind == "TableScan"]
    assert scan.table.name == "key"
    assert [column.name for column in scan.column_list] == ["id"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "SELECT 1 = '1'",
            "No matching signature for operator = for argument types: INT64, STRING",
        ),
        ("SELECT missing FROM d.t", "Unrecognized name: missing at [1:8]"),
        ("SELECT @x", "Query parameter 'x' not found at [1:8]"),
        ("SELECT [1, 2][1, 2]", 'Expected "]" but got "," at [1:16]'),
        ("SELECT", "Syntax error: Unexpected end of statement at [1:7]"),
    ],
)
def test_what_googlesql_refuses_is_refused_in_its_words(
    analyzer: Analyzer, sql: str, message: str
) -> None:
    with pytest.raises(InvalidQueryError) as caught:
        analyzer.analyze(sql, [NamedTable(("d", "t"), "key", _COLUMNS)], ParameterTypes())
    assert message in caught.value.message


def test_a_statement_of_any_depth_is_answered_or_refused(analyzer: Analyzer) -> None:
    for depth in (400, 20_000):
        sql = f"SELECT {'(' * depth}1{')' * depth}"
        with contextlib.suppress(InvalidQueryError, UnsupportedError):
            analyzer.analyze(sql, [], ParameterTypes())
        assert analyzer.analyze("SELECT 1", [], ParameterTypes()).kind == "QueryStmt"


def test_a_statement_that_takes_too_long_is_refused(
    analyzer: Analyzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyzer.analyze("SELECT 1", [], ParameterTypes())
    monkeypatch.setattr(module, "CALL_LIMIT_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    with pytest.raises(UnsupportedError, match="too deeply or contains"):  # it takes 10 s
        analyzer.analyze(f"SELECT {','.join('1' * 50_000)}", [], ParameterTypes())
    monkeypatch.setattr(module, "CALL_LIMIT_S", 10.0)
    assert analyzer.analyze("SELECT 1", [], ParameterTypes()).kind == "QueryStmt"


def test_a_text_over_the_limit_is_refused(analyzer: Analyzer) -> None:
    with pytest.raises(InvalidQueryError, match="query is too large"):
        analyzer.table_paths("SELECT '" + "x" * 1024 * 1024 + "'")


def test_machine_code_is_kept_although_the_home_is_missing() -> None:
    """Without a cache, each start would spend 10 s compiling."""
    code = "from bigquery_emulator.googlesql.analysis import module; module._config()"
    others = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=others | {"HOME": "/dev/null/missing"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=True,
    )
    assert done.stderr == ""
    assert Path(sys.prefix, "cache", "wasmtime").is_dir()
