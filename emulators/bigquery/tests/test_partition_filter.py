"""Tables that require a partition filter, and the pseudocolumns of ingestion-time partitioning."""

import datetime as dt

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField

from tests.connecting import rows_of

REFUSED = "without a filter over column.s. 'ts' that can be used for partition elimination"
SINCE = "ts >= TIMESTAMP '2024-01-01'"


@pytest.fixture(autouse=True)
def _tables(client: bigquery.Client, dataset: str) -> None:
    table = bigquery.Table(
        f"{client.project}.{dataset}.t",
        [SchemaField("id", "INT64"), SchemaField("ts", "TIMESTAMP"), SchemaField("n", "INT64")],
    )
    table.time_partitioning, table.require_partition_filter = (
        bigquery.TimePartitioning(field="ts"),
        True,
    )
    client.create_table(table)
    client.create_table(
        bigquery.Table(f"{client.project}.{dataset}.plain", [SchemaField("id", "INT64")])
    )
    rows = [
        {"id": 1, "ts": "2024-01-01", "n": 1},
        {"id": 1, "ts": "2024-01-02", "n": 2},
        {"id": 2, "ts": "2023-12-31"},
    ]
    client.insert_rows_json("d.t", rows)
    client.insert_rows_json("d.plain", [{"id": 1}])
    for name, query in {
        "latest": "SELECT * FROM d.t"
        " QUALIFY ROW_NUMBER() OVER (PARTITION BY id ORDER BY n DESC) = 1",
        "once": "SELECT * FROM d.t"
        " QUALIFY ROW_NUMBER() OVER (PARTITION BY ts, id ORDER BY n DESC) = 1",
        "daily": "SELECT DATE(ts) AS day, COUNT(*) AS items FROM d.t GROUP BY day",
        "some": "SELECT * FROM d.t LIMIT 10",
    }.items():
        view = bigquery.Table(f"{client.project}.d.{name}")
        view.view_query = query
        client.create_table(view)


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        (f"SELECT COUNT(*) FROM d.t WHERE {SINCE}", 2),
        ("SELECT COUNT(*) FROM d.t WHERE DATE(ts) = '2024-01-02'", 1),
        ("SELECT COUNT(*) FROM d.t WHERE TIMESTAMP_TRUNC(ts, DAY) IN (TIMESTAMP '2024-01-01')", 1),
        (
            "SELECT COUNT(*) FROM d.t"
            " WHERE ts BETWEEN TIMESTAMP '2024-01-01' AND CURRENT_TIMESTAMP() AND id = 1",
            2,
        ),
        (
            "SELECT COUNT(*) FROM d.t"
            " WHERE TIMESTAMP '2024-01-02' <= ts OR ts < TIMESTAMP '2024-01-01'",
            2,
        ),
        (f"SELECT COUNT(*) FROM d.t AS a JOIN d.plain AS b USING (id) WHERE a.{SINCE}", 2),
        (f"SELECT COUNT(*) FROM d.plain AS b JOIN d.t AS a ON a.id = b.id AND a.{SINCE}", 2),
        (f"SELECT COUNT(*) FROM (SELECT id, ts FROM d.t) WHERE {SINCE}", 2),
        (
            "SELECT COUNT(*) FROM (SELECT id, ts AS moment FROM d.t)"
            " WHERE moment >= TIMESTAMP '2024-01-01'",
            2,
        ),
        (f"WITH x AS (SELECT * FROM d.t) SELECT COUNT(*) FROM x WHERE {SINCE}", 2),
        (
            f"SELECT COUNT(*) FROM (SELECT ts FROM d.t UNION ALL SELECT ts FROM d.t) WHERE {SINCE}",
            4,
        ),
        (f"SELECT COUNT(*) FROM d.once WHERE {SINCE}", 2),
        ("SELECT SUM(items) FROM d.daily WHERE day >= '2024-01-01'", 2),
        (f"SELECT COUNT(*) FROM d.plain WHERE id IN (SELECT id FROM d.t WHERE {SINCE})", 1),
    ],
)
def test_a_query_that_filters_runs(client: bigquery.Client, sql: str, rows: int) -> None:
    assert rows_of(client, sql) == [(rows,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM d.t",
        "SELECT COUNT(*) FROM d.t WHERE id = 1",
        f"SELECT COUNT(*) FROM d.t WHERE {SINCE} OR id = 1",
        f"SELECT COUNT(*) FROM d.t WHERE NOT ({SINCE})",
        "SELECT COUNT(*) FROM d.t"
        " WHERE ts > (SELECT MAX(ts) FROM d.t WHERE DATE(ts) = '2024-01-01')",
        "SELECT COUNT(*) FROM d.t WHERE ts > TIMESTAMP_SECONDS(n)",
        f"SELECT COUNT(*) FROM (SELECT * FROM d.t LIMIT 1) WHERE {SINCE}",
        f"SELECT COUNT(*) FROM d.latest WHERE {SINCE}",
        f"SELECT COUNT(*) FROM d.some WHERE {SINCE}",
        "SELECT COUNT(*) FROM d.once",
        "SELECT SUM(items) FROM d.daily WHERE items > 1",
        f"SELECT COUNT(*) FROM d.t AS a JOIN d.t AS b USING (id) WHERE a.{SINCE}",
        "SELECT COUNT(*) FROM d.plain WHERE id IN (SELECT id FROM d.t)",
        f"SELECT COUNT(*) FROM (SELECT ts FROM d.t UNION ALL SELECT ts FROM d.t WHERE {SINCE})",
        "DELETE FROM d.t WHERE id = 1",
        "UPDATE d.t SET n = 1 WHERE id = 1",
        "MERGE d.t AS t USING d.plain AS s ON t.id = s.id WHEN MATCHED THEN DELETE",
        "CREATE TABLE d.copy AS SELECT * FROM d.t",
    ],
)
def test_a_query_over_everything_is_refused(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(BadRequest, match=REFUSED):
        rows_of(client, sql)


def test_changes_within_partitions_are_made(client: bigquery.Client) -> None:
    rows_of(client, f"UPDATE d.t SET n = 9 WHERE {SINCE} AND id = 1")
    rows_of(client, "DELETE d.t WHERE DATE(ts) = '2024-01-01'")
    assert rows_of(client, f"SELECT id, n FROM d.t WHERE {SINCE}") == [(1, 9)]


def test_a_table_by_ingestion_time_has_its_pseudo_columns(client: bigquery.Client) -> None:
    table = bigquery.Table(f"{client.project}.d.events", [SchemaField("id", "INT64")])
    table.time_partitioning, table.require_partition_filter = bigquery.TimePartitioning(), True
    client.create_table(table)
    client.insert_rows_json("d.events", [{"id": 1}])
    rows_of(client, "INSERT INTO d.events VALUES (2)")
    today = dt.datetime.now(dt.UTC).date()
    days = [today, today - dt.timedelta(days=1)]
    rows = rows_of(
        client,
        "SELECT id, _PARTITIONDATE AS day FROM d.events"
        " WHERE _PARTITIONTIME > '2024-01-01' ORDER BY id",
    )
    assert [(number, day in days) for number, day in rows] == [(1, True), (2, True)]
    assert rows_of(
        client, "SELECT * FROM d.events WHERE _PARTITIONDATE > '2024-01-01' ORDER BY id"
    ) == [(1,), (2,)]
    assert [row.values() for row in client.list_rows("d.events")] == [(1,), (2,)]
    with pytest.raises(BadRequest, match="_PARTITIONTIME"):
        rows_of(client, "SELECT id FROM d.events")
