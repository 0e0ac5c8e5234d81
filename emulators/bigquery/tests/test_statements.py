"""Statements that change data or tables.

INSERT, UPDATE, DELETE, MERGE, CREATE, DROP, ALTER, TRUNCATE.
"""

import pytest
from google.api_core.exceptions import BadRequest, Conflict, GoogleAPICallError, NotFound
from google.cloud import bigquery

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S


@pytest.fixture(autouse=True)
def _table(client: bigquery.Client, dataset: str) -> None:
    rows_of(
        client, f"CREATE TABLE {dataset}.t (id INT64 NOT NULL, name STRING, tags ARRAY<STRING>)"
    )
    rows_of(client, "INSERT INTO d.t (id, name) VALUES (1, 'a'), (2, 'b')")


def changed(client: bigquery.Client, sql: str) -> int | None:
    job = client.query(sql)
    job.result(timeout=WAIT_LIMIT_S)
    affected: int | None = job.num_dml_affected_rows
    return affected


def test_rows_are_inserted_changed_merged_and_removed(client: bigquery.Client) -> None:
    assert changed(client, "INSERT d.t SELECT 3, 'c', ['x']") == 1
    assert (
        changed(
            client, "UPDATE d.t AS q SET q.name = CONCAT(q.name, '!'), tags = ['y'] WHERE q.id > 2"
        )
        == 1
    )
    assert (
        changed(
            client,
            "UPDATE d.t AS q SET name = s.n FROM (SELECT 1 AS i, 'one' AS n) AS s WHERE q.id = s.i",
        )
        == 1
    )
    assert changed(client, "DELETE FROM d.t AS q WHERE q.id = 2") == 1
    merge = (
        "MERGE d.t AS t USING (SELECT x FROM UNNEST([1, 9]) AS x) AS s ON t.id = s.x"
        " WHEN MATCHED THEN UPDATE SET name = 'merged'"
        " WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.x, 'new')"
    )
    assert changed(client, merge) == 2
    rows = rows_of(client, "SELECT * FROM d.t ORDER BY id")
    assert rows == [(1, "merged", []), (3, "c!", ["y"]), (9, "new", [])]


def test_a_change_that_fails_changes_nothing(client: bigquery.Client) -> None:
    for sql, message in {
        "INSERT INTO d.t (id, name) SELECT x, ERROR('no') FROM UNNEST([5, 6]) AS x": "no",
        "INSERT INTO d.t (name) VALUES ('no id')": "Required field id cannot be null",
        "UPDATE d.t SET id = NULL WHERE true": "Required field id cannot be null",
        "UPDATE d.t SET name = 'x'": "must have a WHERE clause",
        "DELETE FROM d.t": "must have a WHERE clause",
        "INSERT INTO d.t (id, missing) VALUES (1, 2)": "missing",
    }.items():
        with pytest.raises(BadRequest, match=message):
            rows_of(client, sql)
    assert rows_of(client, "SELECT id FROM d.t ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize("days", ["CAST('nan' AS FLOAT64)", "CAST('inf' AS FLOAT64)", "1e305"])
def test_a_number_of_days_is_finite(client: bigquery.Client, days: str) -> None:
    options = f"OPTIONS(partition_expiration_days={days})"
    with pytest.raises(BadRequest, match="Invalid number of days"):
        rows_of(client, f"CREATE TABLE d.days (a DATE) PARTITION BY a {options}")


def test_a_table_is_created_with_all_that_the_statement_says(client: bigquery.Client) -> None:
    rows_of(
        client,
        "CREATE TABLE d.full (ts TIMESTAMP OPTIONS(description='when'),"
        " part STRUCT<x INT64 NOT NULL, ys ARRAY<DATE>>)"
        " PARTITION BY DATE(ts) CLUSTER BY ts"
        " OPTIONS(description='all', require_partition_filter=true,"
        " partition_expiration_days=2, labels=[('a', 'b')])",
    )
    table = client.get_table("d.full")
    assert (table.description, table.require_partition_filter, table.labels) == (
        "all",
        True,
        {"a": "b"},
    )
    assert (table.time_partitioning.field, table.time_partitioning.expiration_ms) == (
        "ts",
        2 * 86_400_000,
    )
    assert table.clustering_fields == ["ts"]
    assert table.schema[0].description == "when"
    assert [(field.name, field.field_type, field.mode) for field in table.schema[1].fields] == [
        ("x", "INTEGER", "REQUIRED"),
        ("ys", "DATE", "REPEATED"),
    ]


def test_a_table_is_created_from_a_query(client: bigquery.Client) -> None:
    rows_of(
        client,
        "CREATE TABLE d.copy PARTITION BY TIMESTAMP_TRUNC(ts, HOUR)"
        " AS SELECT *, CURRENT_TIMESTAMP() AS ts FROM d.t",
    )
    assert client.get_table("d.copy").time_partitioning.type_ == "HOUR"
    with pytest.raises(Conflict, match="Already Exists"):
        rows_of(client, "CREATE TABLE d.copy AS SELECT 1 AS a")
    rows_of(client, "CREATE TABLE IF NOT EXISTS d.copy AS SELECT 1 AS a")
    assert rows_of(client, "SELECT COUNT(name) FROM d.copy") == [(2,)]
    parameter = bigquery.ScalarQueryParameter("n", "INT64", 7)
    rows_of(
        client, "CREATE OR REPLACE TABLE d.copy AS SELECT @n AS a", query_parameters=[parameter]
    )
    assert rows_of(client, "SELECT * FROM d.copy") == [(7,)]


def test_views_and_datasets_come_and_go(client: bigquery.Client) -> None:
    rows_of(client, "CREATE SCHEMA other")
    rows_of(client, "CREATE VIEW other.v AS SELECT id FROM d.t")
    rows_of(client, "CREATE OR REPLACE VIEW other.v AS SELECT id + 1 AS next FROM d.t")
    assert rows_of(client, "SELECT next FROM other.v ORDER BY next") == [(2,), (3,)]
    with pytest.raises(BadRequest, match="not the kind"):
        rows_of(client, "DROP TABLE other.v")
    rows_of(client, "DROP VIEW other.v")
    with pytest.raises(NotFound):
        rows_of(client, "DROP VIEW other.v")
    rows_of(client, "DROP VIEW IF EXISTS other.v")
    rows_of(client, "DROP SCHEMA other")
    with pytest.raises(BadRequest, match="still in use"):
        rows_of(client, "DROP SCHEMA d")
    rows_of(client, "DROP SCHEMA d CASCADE")
    assert list(client.list_datasets()) == []


def test_a_table_is_widened_and_emptied(client: bigquery.Client) -> None:
    rows_of(client, "ALTER TABLE d.t ADD COLUMN more FLOAT64, ADD COLUMN IF NOT EXISTS name STRING")
    assert [field.name for field in client.get_table("d.t").schema] == [
        "id",
        "name",
        "tags",
        "more",
    ]
    with pytest.raises(Conflict, match="already exists"):
        rows_of(client, "ALTER TABLE d.t ADD COLUMN more FLOAT64")
    rows_of(client, "TRUNCATE TABLE d.t")
    assert rows_of(client, "SELECT * FROM d.t") == []


@pytest.mark.parametrize(
    "sql",
    [
        "ALTER TABLE d.t ALTER COLUMN name SET DEFAULT 'x'",
        "CREATE TABLE d.x CLONE d.t",
        "CREATE TEMP TABLE x AS SELECT 1 AS a",
        "CREATE TABLE d.x (a STRING DEFAULT 'b')",
        "CREATE TABLE d.x (a INT64) OPTIONS(kms_key_name='k')",
        "CREATE FUNCTION d.f(x INT64) AS (x + 1)",
        "CREATE MATERIALIZED VIEW d.m AS SELECT id FROM d.t",
        "DECLARE x INT64",
        "EXPORT DATA OPTIONS(uri='gs://x') AS SELECT 1",
    ],
)
def test_a_statement_that_is_not_known_is_refused(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(GoogleAPICallError, match="not supported by the embedded BigQuery"):
        rows_of(client, sql)


def test_a_job_names_what_it_wrote_to(client: bigquery.Client) -> None:
    def done(sql: str) -> bigquery.QueryJob:
        job = client.query(sql)
        job.result(timeout=WAIT_LIMIT_S)
        return client.get_job(job.job_id)

    made = done("CREATE TABLE d.made AS SELECT 1 AS a UNION ALL SELECT 2")
    assert (made.statement_type, made.destination.table_id) == ("CREATE_TABLE_AS_SELECT", "made")
    assert (made.ddl_operation_performed, made.ddl_target_table) == ("CREATE", made.destination)
    assert client.get_table(made.destination).num_rows == 2
    added = done("INSERT INTO d.t (id) VALUES (7), (8)")
    assert (added.destination.table_id, added.num_dml_affected_rows) == ("t", 2)
    assert added.dml_stats.inserted_row_count == 2
    selected = done("SELECT id FROM d.t")
    assert client.get_table(selected.destination).num_rows == 4
    assert done("CREATE SCHEMA e").ddl_operation_performed == "CREATE"


def test_a_table_that_cannot_be_replaced_stays(client: bigquery.Client) -> None:
    config = bigquery.QueryJobConfig(
        destination=f"{client.project}.d.t", write_disposition="WRITE_TRUNCATE"
    )
    with pytest.raises(BadRequest, match="Required field id cannot be null"):
        client.query("SELECT CAST(NULL AS INT64) AS id", job_config=config).result(
            timeout=WAIT_LIMIT_S
        )
    with pytest.raises(BadRequest, match="Required field id cannot be null"):
        rows_of(client, "CREATE OR REPLACE TABLE d.t (id INT64 NOT NULL) AS SELECT NULL AS id")
    assert rows_of(client, "SELECT id FROM d.t ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE d.t SET name = s.name"
        " FROM (SELECT 1 AS id, 'x' AS name UNION ALL SELECT 1, 'y') AS s WHERE t.id = s.id",
        "MERGE d.t USING (SELECT 1 AS id UNION ALL SELECT 1) AS s ON t.id = s.id"
        " WHEN MATCHED THEN UPDATE SET name = 'x'",
        "MERGE d.t USING (SELECT 1 AS id UNION ALL SELECT 1) AS s ON t.id = s.id"
        " WHEN MATCHED THEN DELETE",
    ],
)
def test_a_row_that_two_rows_would_change_is_an_error(client: bigquery.Client, sql: str) -> None:
    before = rows_of(client, "SELECT * FROM d.t ORDER BY id")
    with pytest.raises(BadRequest, match="must match at most one source row for each target row"):
        client.query(sql).result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT * FROM d.t ORDER BY id") == before


def test_two_rows_may_match_where_only_one_changes(client: bigquery.Client) -> None:
    sql = (
        "MERGE d.t USING (SELECT 1 AS id, 'x' AS name UNION ALL SELECT 1, 'y') AS s"
        " ON t.id = s.id WHEN MATCHED AND s.name = 'y' THEN UPDATE SET name = s.name"
    )
    client.query(sql).result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT name FROM d.t WHERE id = 1") == [("y",)]


def test_the_fields_of_a_record_go_by_position(client: bigquery.Client) -> None:
    client.query("CREATE TABLE d.r (s STRUCT<a INT64, b INT64>)").result(timeout=WAIT_LIMIT_S)
    sql = "INSERT INTO d.r (s) SELECT STRUCT(1 AS b, 2 AS a)"
    client.query(sql).result(timeout=WAIT_LIMIT_S)
    client.query("UPDATE d.r SET s = (3, 4) WHERE FALSE").result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT s.a, s.b FROM d.r") == [(1, 2)]


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT d.t (id, tags) VALUES (3, ['x', NULL])",
        "INSERT d.t (id, tags) SELECT 3, ARRAY(SELECT NULLIF(e, 'y') FROM UNNEST(['x', 'y']) AS e)",
        "UPDATE d.t SET tags = ['x', NULL] WHERE id = 1",
        "UPDATE d.t SET tags = ['x', n] FROM (SELECT CAST(NULL AS STRING) AS n) WHERE id = 1",
        "MERGE d.t USING (SELECT 1 AS x) ON id = x WHEN MATCHED THEN UPDATE SET tags = ['x', NULL]",
        "MERGE d.t USING (SELECT 9 AS x) ON id = x"
        " WHEN NOT MATCHED THEN INSERT (id, tags) VALUES (x, [CAST(NULL AS STRING)])",
    ],
)
def test_an_array_with_a_null_is_not_written(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(BadRequest, match=r"Array cannot have a null element.* field tags"):
        changed(client, sql)
    assert rows_of(client, "SELECT id, tags FROM d.t ORDER BY id") == [(1, []), (2, [])]
