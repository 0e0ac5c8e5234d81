"""Statements that differ only in literals: analyzed once, but translated as if separate."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.cloud import bigquery

from bigquery_emulator.errors import ServiceError
from bigquery_emulator.googlesql.analysis.analyzer import (
    Analyzer,
    NamedTable,
    ParameterTypes,
)
from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.templates import StatementText
from bigquery_emulator.googlesql.translate import Statement, Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.schema import parse_schema
from tests.connecting import rows_of
from tests.oracle.test_oracle import QUERIES, queries_of

DATASET = DatasetKey("p", "d")
COLUMNS = {
    "id": "INT64",
    "name": "STRING",
    "score": "FLOAT64",
    "paid": "NUMERIC",
    "born": "DATE",
    "seen": "TIMESTAMP",
}


class CountingAnalyzer(Analyzer):
    """Google's analyzer, which also counts the statements it analyzes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def analyze(self, sql: str, tables: Sequence[NamedTable], parameters: ParameterTypes) -> Node:
        self.calls += 1
        return super().analyze(sql, tables, parameters)


class Tables:
    """A catalog with two tables, and its translators."""

    def __init__(self, store: Store) -> None:
        self._catalog = TableCatalog(store)
        self._catalog.load()
        self._catalog.create_dataset(DATASET, {})
        schema = parse_schema([{"name": name, "type": kind} for name, kind in COLUMNS.items()])
        for name in ("people", "others"):
            self._catalog.create_table(TableKey("p", "d", name), schema, {})
        self.analyzer = CountingAnalyzer()

    def translator(self) -> Translator:
        return Translator(self._catalog.table, lambda *_: pytest.fail("not asked"), self.analyzer)


@pytest.fixture(scope="module")
def tables() -> Iterator[Tables]:
    store = Store(None)
    store.open()
    yield Tables(store)
    store.close()


def told(translator: Translator, sql: str) -> Statement | str:
    try:
        return translator.translate(sql, "p", DATASET)
    except ServiceError as error:
        return repr(error)


def selects(conditions: tuple[str, str]) -> tuple[str, str]:
    """Returns two statements that differ only in their conditions."""
    first, second = (f"SELECT name FROM people WHERE {condition}" for condition in conditions)
    return first, second


SHARED_CONDITIONS = [
    ("id > 5", "id > 70"),
    ("score = 5", "score = 6"),
    ("name = 'a'", "name = 'it\"s'"),
    ('name = "a"', 'name = "it\'s \x01"'),
    ("name = 'ä' AND id = 1", "name = 'é🚀' AND id = 2"),
    ("born >= '2024-01-31'", "born >= '1969-12-31'"),
    ("born >= DATE '2024-01-31'", "born >= DATE '0001-01-01'"),
    ("DATE(seen) = '2024-01-31'", "DATE(seen) = '2024-02-29'"),
    (
        "seen BETWEEN '2024-01-01 00:00:00' AND TIMESTAMP '2024-01-02T00:00:00Z'",
        "seen BETWEEN '1969-12-31 23:59:59.5 UTC' AND TIMESTAMP '2024-03-02 01:02:03.123456+05:30'",
    ),
    ("id IN (1, 2, 3) LIMIT 7", "id IN (4, 5, 6) LIMIT 7"),
    ("id IN (1, 1)", "id IN (2, 2)"),
]
SHARED = [
    *map(selects, SHARED_CONDITIONS),
    ("SELECT name FROM `p.d.people` WHERE id = 1", "SELECT name FROM `p.d.people` WHERE id = 2"),
    (
        "INSERT INTO people (id, name, born) VALUES (1, 'a', '2024-01-01'), (2, 'b', NULL)",
        "INSERT INTO people (id, name, born) VALUES (3, 'c', '2025-01-01'), (4, 'd', NULL)",
    ),
    ("UPDATE people SET name = 'x' WHERE id = 1", "UPDATE people SET name = 'x' WHERE id = 2"),
    (
        "DELETE FROM people WHERE seen < '2024-01-01 00:00:00'",
        "DELETE FROM people WHERE seen < '2023-01-01 00:00:00'",
    ),
    (
        "WITH a AS (SELECT * FROM people WHERE id > 4) SELECT name, COUNT(*) FROM a JOIN others"
        " USING (name) WHERE others.id < 9 GROUP BY 1 ORDER BY 2 DESC LIMIT 3",
        "WITH a AS (SELECT * FROM people WHERE id > 5) SELECT name, COUNT(*) FROM a JOIN others"
        " USING (name) WHERE others.id < 8 GROUP BY 1 ORDER BY 2 DESC LIMIT 3",
    ),
]


@pytest.mark.parametrize(("first", "second"), SHARED, ids=lambda sql: sql[:60])
def test_statement_with_other_values_is_filled_in_as_if_it_had_been_analyzed(
    tables: Tables, first: str, second: str
) -> None:
    translator = tables.translator()
    assert told(translator, first) == told(tables.translator(), first)
    calls = tables.analyzer.calls
    filled = told(translator, second)
    assert tables.analyzer.calls == calls
    assert isinstance(filled, Statement)
    assert filled == told(tables.translator(), second)


APART_CONDITIONS = [
    ("born = '2024-01-31'", "born = '2024-02-31'"),
    ("born = '2024-01-31'", "born = '2024-1-3'"),
    ("seen = '2024-01-31 00:00:00'", "seen = '2024-01-31 00:00:00 Europe/Berlin'"),
    ("id = 1", "id = 9223372036854775808"),
    ("id = 1", "id = -1"),
    ("id = 1", f"id = {'9' * 5_000}"),
    (f"id IN ({', '.join(map(str, range(501)))})", f"id IN ({', '.join(map(str, range(1, 502)))})"),
    (f"id = 1 /* {'x' * 20_000} */", f"id = 2 /* {'x' * 20_000} */"),
    ("id = 1 LIMIT 5", "id = 1 LIMIT 6"),
    ("score = 1", "score = 9007199254740993"),
    ("paid = 1", "paid = 2"),
    ("name = 'a'", r"name = '\x41'"),
    ("name = 'a'", "name = 'a' 'b'"),
]
APART = [
    *map(selects, APART_CONDITIONS),
    # Expressions that the analyzer treats as the same.
    ("SELECT id + 1 FROM people GROUP BY id + 1", "SELECT id + 1 FROM people GROUP BY id + 2"),
    ("SELECT id = 1 FROM people GROUP BY id = 1", "SELECT id = 1 FROM people GROUP BY id = 2"),
    (
        "SELECT id = 1, id = 2 FROM people GROUP BY 1, 2",
        "SELECT id = 1, id = 1 FROM people GROUP BY 1, 2",
    ),
    ("SELECT id, name FROM people ORDER BY 1", "SELECT id, name FROM people ORDER BY 2"),
    # Translations that depend on the value.
    ("SELECT FORMAT('%d', id) = 'a' FROM people", "SELECT FORMAT('%s', id) = 'a' FROM people"),
    (
        "SELECT FORMAT_TIMESTAMP('%Y', seen) > '1' FROM people",
        "SELECT FORMAT_TIMESTAMP('%Q', seen) > '1' FROM people",
    ),
    (
        "SELECT * FROM (SELECT id, name FROM people)"
        " PIVOT(COUNT(*) FOR name IN ('a', 'b')) WHERE id = 1",
        "SELECT * FROM (SELECT id, name FROM people)"
        " PIVOT(COUNT(*) FOR name IN ('a', 'c')) WHERE id = 2",
    ),
]


@pytest.mark.parametrize(("first", "second"), APART, ids=lambda sql: sql[:60])
def test_statement_that_means_something_else_is_analyzed(
    tables: Tables, first: str, second: str
) -> None:
    translator = tables.translator()
    told(translator, first)
    calls = tables.analyzer.calls
    answers = told(translator, second)
    assert tables.analyzer.calls > calls
    assert answers == told(tables.translator(), second)


@pytest.mark.parametrize("path", sorted(QUERIES.glob("*.sql")), ids=lambda path: path.stem)
def test_any_other_literals_give_what_the_analyzer_gives(tables: Tables, path: Path) -> None:
    draw = random.Random(path.stem)
    queries = [sql for sql in queries_of(path) if StatementText(sql).literals]
    for sql in draw.sample(queries, min(len(queries), 12)):
        translator = tables.translator()
        told(translator, sql)
        other = varied(sql, draw)
        assert told(translator, other) == told(tables.translator(), other), (sql, other)


def varied(sql: str, draw: random.Random) -> str:
    """Returns the statement with different numbers and strings.

    Literals that were equal mostly stay equal.
    """
    text, parts, at = StatementText(sql), [], 0
    new: dict[int, str] = {}
    for place, own_literal in zip(text.equals, text.literals, strict=True):
        if place not in new or draw.random() < 0.1:
            new[place] = _other(own_literal.content, sql[own_literal.start], draw)
        parts += [sql[at : own_literal.start], new[place]]
        at = own_literal.end
    return "".join([*parts, sql[at:]])


def _other(content: int | str, quote: str, draw: random.Random) -> str:
    if isinstance(content, int):
        return str(content + draw.choice([0, 1, 10, 2**53, 2**63]))
    if draw.random() < 0.5:
        content = re.sub(r"\d", lambda _: str(draw.randrange(10)), content)
    return f"{quote}{content}{draw.choice(['', 'é', ' '])}{quote}"


def test_each_gets_its_own_rows(client: bigquery.Client) -> None:
    sql = "SELECT n FROM UNNEST([1, 2, 3]) AS n WHERE CONCAT('a', CAST(n AS STRING)) = '{}'"
    results = [rows_of(client, sql.format(text)) for text in ("a1", "a3", "\x01", "a2")]
    assert [[value for (value,) in rows] for rows in results] == [[1], [3], [], [2]]


def test_table_that_changed_is_read_anew(client: bigquery.Client) -> None:
    client.create_dataset("changing")
    for kind, value in (("INT64", 5), ("STRING", "5")):
        rows_of(client, f"CREATE OR REPLACE TABLE changing.t AS SELECT CAST(5 AS {kind}) AS x")
        sql = "SELECT x FROM changing.t WHERE CAST(x AS INT64) > {}"
        assert [rows_of(client, sql.format(number)) for number in (4, 6)] == [[(value,)], []]
