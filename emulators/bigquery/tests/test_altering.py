"""ALTER TABLE, VIEW, and SCHEMA, and CREATE with options and partitions, as written by dbt."""

import time
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Conflict, GoogleAPICallError, NotFound
from google.cloud import bigquery

from tests.connecting import rows_of


@pytest.fixture(autouse=True)
def _table(client: bigquery.Client, dataset: str) -> None:
    rows_of(client, f"CREATE TABLE {dataset}.t (id INT64 NOT NULL, name STRING(5), n NUMERIC)")
    rows_of(client, "INSERT INTO d.t (id, name, n) VALUES (1, 'a', 1.5), (2, 'b', 2)")


def shape(client: bigquery.Client, table: str = "d.t") -> list[tuple[str, str, str]]:
    return [(field.name, field.field_type, field.mode) for field in client.get_table(table).schema]


def test_columns_are_dropped_renamed_and_added_at_once(client: bigquery.Client) -> None:
    rows_of(
        client,
        f"/* dbt */ ALTER -- table\nTABLE `{client.project}`.`d`.`t`"
        " ADD COLUMN `s` STRUCT<a INT64, b ARRAY<STRING>>,"
        " DROP COLUMN n, RENAME COLUMN name TO Title, DROP COLUMN IF EXISTS none,"
        " ADD COLUMN IF NOT EXISTS id INT64",
    )
    assert shape(client) == [
        ("id", "INTEGER", "REQUIRED"),
        ("Title", "STRING", "NULLABLE"),
        ("s", "RECORD", "NULLABLE"),
    ]
    assert rows_of(client, "SELECT id, title, s.a FROM d.t ORDER BY id") == [
        (1, "a", None),
        (2, "b", None),
    ]
    assert client.insert_rows_json("d.t", [{"id": 3, "s": {"a": 1, "b": ["x"]}}]) == []


def test_names_are_exchanged(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.u AS SELECT 1 AS a, 2 AS b")
    rows_of(
        client,
        "ALTER TABLE d.u RENAME COLUMN a TO c, RENAME COLUMN b TO a, RENAME COLUMN c TO b",
    )
    assert rows_of(client, "SELECT b, a FROM d.u") == [(1, 2)]


def test_a_column_becomes_wider_optional_and_described(client: bigquery.Client) -> None:
    rows_of(
        client,
        "ALTER TABLE d.t ALTER COLUMN id DROP NOT NULL,"
        " ALTER COLUMN name SET OPTIONS (description='a, \"b\" (c)'),"
        " ALTER COLUMN IF EXISTS none DROP NOT NULL",
    )
    rows_of(client, "ALTER TABLE d.t ALTER COLUMN id SET DATA TYPE FLOAT64")
    rows_of(client, "ALTER TABLE d.t ALTER COLUMN name SET DATA TYPE STRING")
    assert shape(client)[:2] == [("id", "FLOAT", "NULLABLE"), ("name", "STRING", "NULLABLE")]
    field = client.get_table("d.t").schema[1]
    assert (field.description, field.max_length) == ('a, "b" (c)', None)
    rows_of(client, "INSERT INTO d.t (name) VALUES ('longer than five')")
    assert rows_of(client, "SELECT id FROM d.t ORDER BY id") == [(None,), (1.0,), (2.0,)]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("DROP COLUMN none", "Column not found: none"),
        ("RENAME COLUMN name TO id", "already exists: id"),
        ("RENAME COLUMN name TO _PARTITIONTIME", "Invalid field name"),
        ("ALTER COLUMN name SET DATA TYPE INT64", "is not assignable|is assignable to"),
        ("ALTER COLUMN name SET DATA TYPE STRING(4)", "is assignable to"),
        ("ALTER COLUMN id SET DATA TYPE ARRAY<INT64>", "is assignable to"),
        ("ALTER COLUMN name DROP NOT NULL", "has no NOT NULL"),
        ("ADD COLUMN x INT64 NOT NULL", "Cannot add required columns"),
        ("DROP COLUMN id, DROP COLUMN name, DROP COLUMN n", "Cannot drop the only column"),
        ("DROP COLUMN name, DROP COLUMN name", "Column not found: name"),
        ("SET OPTIONS (description='a', description='b')", "Duplicate option"),
        ("RENAME TO e.u", "without a dataset"),
        ("DROP COLUMN name,", "Unexpected comma"),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(
    client: bigquery.Client, action: str, message: str
) -> None:
    before = client.get_table("d.t")
    with pytest.raises((BadRequest, Conflict), match=message):
        rows_of(client, f"ALTER TABLE d.t {action}")
    assert client.get_table("d.t").etag == before.etag
    assert rows_of(client, "SELECT COUNT(name) FROM d.t") == [(2,)]


def test_columns_that_cut_a_table_stay(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.p (day DATE, k STRING) PARTITION BY day CLUSTER BY k")
    for action in ("DROP COLUMN day", "RENAME COLUMN day TO other", "DROP COLUMN k"):
        with pytest.raises(BadRequest, match=r"Cannot change the (partition|cluster)ing column"):
            rows_of(client, f"ALTER TABLE d.p {action}")


def test_a_table_is_renamed(client: bigquery.Client) -> None:
    rows_of(client, "ALTER TABLE d.t RENAME TO u")
    assert rows_of(client, "SELECT COUNT(*) FROM d.u") == [(2,)]
    with pytest.raises(NotFound):
        client.get_table("d.t")
    rows_of(client, "ALTER TABLE IF EXISTS d.t RENAME TO u")
    rows_of(client, "CREATE TABLE d.t (a INT64)")
    with pytest.raises(Conflict, match="Already Exists"):
        rows_of(client, "ALTER TABLE d.t RENAME TO u")


def test_options_of_tables_views_and_datasets_change(client: bigquery.Client) -> None:
    rows_of(client, "ALTER TABLE d.t SET OPTIONS (description='x', labels=[('a', 'b')])")
    rows_of(
        client,
        "ALTER TABLE d.t SET OPTIONS (description=NULL, friendly_name='f', expiration_timestamp="
        "TIMESTAMP_ADD(CURRENT_TIMESTAMP(), INTERVAL 12 HOUR))",
    )
    table = client.get_table("d.t")
    assert (table.description, table.friendly_name, table.labels) == (None, "f", {"a": "b"})
    assert table.expires is not None
    assert 11.9 < (table.expires.timestamp() - time.time()) / 3600 < 12.1
    rows_of(client, "CREATE VIEW d.v (id OPTIONS(description='who')) AS SELECT id FROM d.t")
    rows_of(client, "ALTER VIEW d.v SET OPTIONS (description='y')")
    view = client.get_table("d.v")
    assert (view.description, view.schema[0].description) == ("y", "who")
    with pytest.raises(BadRequest, match="not the kind"):
        rows_of(client, "ALTER TABLE d.v SET OPTIONS (description='y')")
    rows_of(client, "CREATE SCHEMA e OPTIONS (location='EU', default_table_expiration_days=1.5)")
    rows_of(client, f"ALTER SCHEMA `{client.project}`.e SET OPTIONS (description='z')")
    dataset = client.get_dataset("e")
    assert (dataset.location, dataset.description) == ("EU", "z")
    assert dataset.default_table_expiration_ms == 129_600_000


@pytest.mark.parametrize(
    ("clause", "kind", "field"),
    [
        ("day", "DAY", "day"),
        ("DATE_TRUNC(day, MONTH)", "MONTH", "day"),
        ("DATE(ts)", "DAY", "ts"),
        ("TIMESTAMP_TRUNC(ts, HOUR)", "HOUR", "ts"),
        ("DATETIME_TRUNC(dt, YEAR)", "YEAR", "dt"),
        ("_PARTITIONDATE", "DAY", None),
        ("TIMESTAMP_TRUNC(_PARTITIONTIME, HOUR)", "HOUR", None),
    ],
)
def test_tables_are_partitioned_by_an_expression(
    client: bigquery.Client, clause: str, kind: str, field: str | None
) -> None:
    rows_of(client, f"CREATE TABLE d.p (day DATE, ts TIMESTAMP, dt DATETIME) PARTITION BY {clause}")
    partitioning = client.get_table("d.p").time_partitioning
    assert (partitioning.type_, partitioning.field) == (kind, field)


def test_a_table_is_partitioned_by_ranges_of_numbers(client: bigquery.Client) -> None:
    rows_of(
        client,
        "CREATE TABLE d.p PARTITION BY RANGE_BUCKET(id, GENERATE_ARRAY(-10, 100, 10))"
        " CLUSTER BY name OPTIONS() AS (SELECT * FROM d.t)",
    )
    partitioning = client.get_table("d.p").range_partitioning
    assert (partitioning.field, partitioning.range_) == (
        "id",
        bigquery.PartitionRange(start=-10, end=100, interval=10),
    )


def test_a_query_inside_a_definition_is_taken_as_it_is_written(client: bigquery.Client) -> None:
    written = (
        "SELECT 'AS (' AS x, -- AS\n  TIMESTAMP_ADD(TIMESTAMP '2026-01-01', INTERVAL 1 HOUR) y"
    )
    rows_of(client, f"CREATE VIEW d.v OPTIONS(description='AS') AS {written};")
    assert client.get_table("d.v").view_query == written
    rows_of(client, "CREATE TABLE d.w (x STRING) AS WITH q AS (SELECT 1) SELECT 'a' AS other")
    assert rows_of(client, "SELECT x FROM d.w") == [("a",)]


def test_a_table_is_made_like_another_or_copied(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.like_t LIKE d.t OPTIONS(description='new')")
    rows_of(client, "CREATE TABLE d.copy_t COPY d.t")
    assert shape(client, "d.like_t") == shape(client, "d.copy_t") == shape(client)
    assert client.get_table("d.like_t").description == "new"
    assert rows_of(client, "SELECT COUNT(*) FROM d.like_t") == [(0,)]
    assert rows_of(client, "SELECT COUNT(*) FROM d.copy_t") == [(2,)]


@pytest.mark.parametrize(
    "sql",
    [
        "ALTER TABLE d.t ADD PRIMARY KEY (id) NOT ENFORCED",
        "ALTER TABLE d.t SET DEFAULT COLLATE 'und:ci'",
        "ALTER TABLE d.t SET OPTIONS (kms_key_name='k')",
        "ALTER TABLE d.t SET OPTIONS (labels=ARRAY(SELECT ('a', 'b')))",
        "ALTER TABLE d.t ALTER COLUMN name SET OPTIONS (rounding_mode='x')",
        "ALTER MATERIALIZED VIEW d.t SET OPTIONS (description='x')",
        "CREATE TABLE d.x (a INT64, PRIMARY KEY (a) NOT ENFORCED)",
        "CREATE TABLE d.x (a DATE) PARTITION BY DATE_TRUNC(a, WEEK)",
        "CREATE VIEW d.x (other) AS SELECT id FROM d.t",
        "CREATE SNAPSHOT TABLE d.x CLONE d.t",
    ],
)
def test_what_is_not_there_is_said(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(GoogleAPICallError, match="not supported by the embedded BigQuery"):
        rows_of(client, sql)


def test_an_option_is_a_constant(client: bigquery.Client) -> None:
    for value, message in {
        "(SELECT name FROM d.t)": "Not a constant|Not found: Dataset",
        "1 +": "[Ss]yntax error|[Uu]nexpected|Required",
        "'a' + 1": ".",
    }.items():
        with pytest.raises(GoogleAPICallError, match=message):
            rows_of(client, f"ALTER TABLE d.t SET OPTIONS (description={value})")


def test_a_copy_of_a_partitioned_table_keeps_its_partitions(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.p (day DATE) PARTITION BY day OPTIONS(labels=[('a','b')])")
    rows_of(client, "CREATE TABLE d.q COPY d.p")
    copy: Any = client.get_table("d.q")
    assert (copy.time_partitioning.field, copy.labels) == ("day", {"a": "b"})
