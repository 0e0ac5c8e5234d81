"""Query results, small and large, short and long: each page, by job and by table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from google.cloud import bigquery
from google.cloud.bigquery import QueryJobConfig, ScalarQueryParameter

from bigquery_emulator.engine.query import Queries, Result
from bigquery_emulator.googlesql.translate import Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.schema import parse_schema

NUMBERS = "SELECT n, CONCAT('é', CAST(n AS STRING)) AS t FROM UNNEST(GENERATE_ARRAY(1, @most)) AS n"


@pytest.mark.parametrize("most", [0, 1, 999, 1_000, 1_001, 2_050])
def test_every_page_has_its_rows(client: bigquery.Client, most: int) -> None:
    config = QueryJobConfig(query_parameters=[ScalarQueryParameter("most", "INT64", most)])
    job = client.query(f"{NUMBERS} ORDER BY n DESC", job_config=config)
    expected = [(number, f"é{number}") for number in range(most, 0, -1)]
    rows = job.result(page_size=300)
    assert rows.total_rows == most
    assert [tuple(row) for row in rows] == expected
    listed = client.list_rows(
        job.destination,
        selected_fields=[bigquery.SchemaField("t", "STRING")],
        start_index=998,
        page_size=2,
        max_results=5,
    )
    assert [tuple(row) for row in listed] == [(text,) for _, text in expected[998:1_003]]


@pytest.mark.parametrize("length", [1, 10_000, 300_000])
def test_long_values_are_whole(client: bigquery.Client, length: int) -> None:
    sql = f"""
        SELECT n, REPEAT('é', {length}) AS s, [STRUCT('a' AS k, n AS m, [b'b', NULL][0] AS b)] AS a
        FROM UNNEST([1, 2, 3]) AS n
        ORDER BY n
    """
    rows = [tuple(row) for row in client.query(sql).result()]
    assert rows == [(n, "é" * length, [{"k": "a", "m": n, "b": b"b"}]) for n in (1, 2, 3)]


@contextmanager
def queries() -> Iterator[tuple[Queries, Translator]]:
    """The engine, with a table `d.t` of 100,001 rows."""
    store = Store(None)
    store.open()
    try:
        catalog = TableCatalog(store)
        catalog.load()
        catalog.create_dataset(DatasetKey("p", "d"), {})
        schema = parse_schema([{"name": "i", "type": "INT64"}])
        table = catalog.create_table(TableKey("p", "d", "t"), schema, {})
        with store.transaction() as cursor:
            cursor.execute(f"INSERT INTO {table.physical} SELECT i FROM range(100001) AS r(i)")
        yield Queries(store), Translator(catalog.table, lambda *_: pytest.fail("not asked"))
    finally:
        store.close()


def test_only_short_results_are_kept_outside_of_the_database() -> None:
    with queries() as (engine, translator):

        def selected(sql: str) -> Result:
            return engine.select(translator.translate(sql, "p", None), lambda _: None)

        array = "UNNEST(GENERATE_ARRAY(1, {})) AS n"
        few = selected(f"SELECT n FROM {array.format(1_000)}")
        assert (few.rows, len(few.values), few.physical) == (1_000, 1_000, "")
        for sql, rows in (
            (f"SELECT n FROM {array.format(1_001)}", 1_001),
            (f"SELECT REPEAT('x', 3000) FROM {array.format(100)}", 100),
            ("SELECT ARRAY(SELECT CAST(i AS STRING) FROM UNNEST(GENERATE_ARRAY(1, 9999)) AS i)", 1),
            ("SELECT COUNT(*) FROM d.t", 1),  # too expensive to run twice
        ):
            many = selected(sql)
            assert (many.rows, len(many.values)) == (rows, 0)
            assert many.physical, sql
