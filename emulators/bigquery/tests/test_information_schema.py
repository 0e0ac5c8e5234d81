"""INFORMATION_SCHEMA queries as sent by dbt, Looker, and people."""

import pytest
from google.api_core.exceptions import BadRequest, GoogleAPICallError, MethodNotImplemented
from google.cloud import bigquery

from tests.connecting import rows_of

VIEWS = "d.INFORMATION_SCHEMA"


@pytest.fixture(autouse=True)
def _tables(client: bigquery.Client, dataset: str) -> None:
    rows_of(
        client,
        f'CREATE TABLE {dataset}.t (day DATE OPTIONS(description="it\'s"), s STRING(3),'
        " part STRUCT<x INT64, ys ARRAY<FLOAT64>>) PARTITION BY DATE_TRUNC(day, MONTH) CLUSTER BY S"
        " OPTIONS(description='a \"b\"', labels=[('k', 'v')], partition_expiration_days=99999)",
    )
    rows_of(client, "CREATE VIEW d.v AS SELECT s FROM d.t")
    rows_of(client, "INSERT INTO d.t (day, s) VALUES ('2026-01-05', 'a'), ('2026-02-01', 'b')")
    rows_of(client, "INSERT INTO d.t (day, s) VALUES ('2026-01-07', 'c'), (NULL, 'd')")


def test_tables_and_views_are_listed(client: bigquery.Client) -> None:
    rows = rows_of(
        client,
        "SELECT table_catalog, table_schema, table_name, table_type, is_insertable_into,"
        " creation_time <= CURRENT_TIMESTAMP()"
        f" FROM {VIEWS}.TABLES ORDER BY table_name",
    )
    assert rows == [
        (client.project, "d", "t", "BASE TABLE", "YES", True),
        (client.project, "d", "v", "VIEW", "NO", True),
    ]
    assert rows_of(client, f"SELECT table_name, view_definition FROM {VIEWS}.VIEWS") == [
        ("v", "SELECT s FROM d.t")
    ]
    assert rows_of(client, f"SELECT * FROM {VIEWS}.MATERIALIZED_VIEWS") == []


def test_columns_and_their_fields_are_listed(client: bigquery.Client) -> None:
    columns = (
        "SELECT column_name, data_type, is_partitioning_column, clustering_ordinal_position,"
        f" is_hidden FROM {VIEWS}.COLUMNS WHERE table_name = 't' ORDER BY ordinal_position"
    )
    assert rows_of(client, columns) == [
        ("day", "DATE", "YES", None, "NO"),
        ("s", "STRING(3)", "NO", 1, "NO"),
        ("part", "STRUCT<x INT64, ys ARRAY<FLOAT64>>", "NO", None, "NO"),
    ]
    paths = (
        f"SELECT field_path, data_type, description FROM `{client.project}`.{VIEWS}"
        ".COLUMN_FIELD_PATHS WHERE table_name = 't'"
    )
    assert rows_of(client, paths) == [
        ("day", "DATE", "it's"),
        ("s", "STRING(3)", None),
        ("part", "STRUCT<x INT64, ys ARRAY<FLOAT64>>", None),
        ("part.x", "INT64", None),
        ("part.ys", "ARRAY<FLOAT64>", None),
    ]


def test_options_are_written_as_in_sql(client: bigquery.Client) -> None:
    rows = rows_of(
        client,
        f"SELECT option_name, option_type, option_value FROM {VIEWS}.TABLE_OPTIONS"
        " WHERE table_name = 't' ORDER BY option_name",
    )
    assert rows == [
        ("description", "STRING", '"a \\"b\\""'),
        ("labels", "ARRAY<STRUCT<STRING, STRING>>", '[STRUCT("k", "v")]'),
        ("partition_expiration_days", "FLOAT64", "99999.0"),
    ]


def test_time_after_the_last_year_is_shown_as_the_last(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.late (a INT64)")
    late = client.get_table("d.late")
    late._properties["expirationTime"] = str(2**63 - 1)
    client.update_table(late, ["expires"])
    rows = rows_of(
        client, f"SELECT option_value FROM {VIEWS}.TABLE_OPTIONS WHERE table_name = 'late'"
    )
    rows_of(client, "DROP TABLE d.late")
    assert rows == [('TIMESTAMP "9999-12-31T23:59:59.999Z"',)]


def test_partitions_have_their_rows(client: bigquery.Client) -> None:
    rows = rows_of(
        client,
        f"SELECT partition_id, total_rows FROM {VIEWS}.PARTITIONS WHERE table_name = 't'"
        " ORDER BY partition_id",
    )
    assert rows == [("202601", 2), ("202602", 1), ("__NULL__", 1)]
    storage = (
        "SELECT table_name, total_rows, total_partitions, total_logical_bytes > 0, deleted"
        " FROM `region-us`.INFORMATION_SCHEMA.TABLE_STORAGE"
    )
    assert rows_of(client, storage) == [("t", 4, 3, True, False)]
    legacy = "SELECT table_id, row_count, type FROM d.__TABLES__ ORDER BY table_id"
    assert rows_of(client, legacy) == [("t", 4, 1), ("v", 0, 2)]


def test_partitions_of_ranges_and_of_ingestion_are_named(client: bigquery.Client) -> None:
    ranges = "PARTITION BY RANGE_BUCKET(id, GENERATE_ARRAY(-10, 20, 10))"
    rows_of(client, f"CREATE TABLE d.r (id INT64) {ranges}")
    rows_of(client, "INSERT INTO d.r VALUES (-10), (-1), (5), (19), (20), (NULL)")
    rows_of(client, "CREATE TABLE d.empty (id INT64)")
    names = f"SELECT table_name, partition_id, total_rows FROM {VIEWS}.PARTITIONS ORDER BY 1, 2"
    assert rows_of(client, names)[:5] == [
        ("empty", None, 0),
        ("r", "-10", 2),
        ("r", "0", 1),
        ("r", "10", 1),
        ("r", "__NULL__", 1),
    ]
    rows_of(
        client, "CREATE TABLE d.i (id INT64) PARTITION BY TIMESTAMP_TRUNC(_PARTITIONTIME, HOUR)"
    )
    client.insert_rows_json(f"{client.project}.d.i$2026013114", [{"id": 1}])
    assert ("i", "2026013114", 1) in rows_of(client, names)


def test_partitions_of_all_of_int64_are_named(client: bigquery.Client) -> None:
    ranges = f"GENERATE_ARRAY({-(2**63)}, {2**63 - 1}, {2**62})"
    rows_of(client, f"CREATE TABLE d.w (id INT64) PARTITION BY RANGE_BUCKET(id, {ranges})")
    rows_of(client, f"INSERT INTO d.w VALUES ({-(2**63)}), (-1), ({2**63 - 2}), ({2**63 - 1})")
    names = f"SELECT partition_id FROM {VIEWS}.PARTITIONS WHERE table_name = 'w' ORDER BY 1"
    assert [name for (name,) in rows_of(client, names)] == [
        str(-(2**62)),
        str(-(2**63)),
        str(2**62),
        "__UNPARTITIONED__",
    ]


def test_datasets_of_a_project_are_listed(client: bigquery.Client) -> None:
    rows_of(client, "CREATE SCHEMA e OPTIONS(location='EU', description='other')")
    for place in ("", f"`{client.project}`.", "`region-us`.", f"`{client.project}`.`region-us`."):
        rows = rows_of(
            client,
            f"SELECT schema_name, location FROM {place}INFORMATION_SCHEMA.SCHEMATA ORDER BY 1",
        )
        assert rows == [("d", "US"), ("e", "EU")]
    options = "SELECT schema_name, option_value FROM INFORMATION_SCHEMA.SCHEMATA_OPTIONS"
    assert rows_of(client, options) == [("e", '"other"')]


def test_jobs_of_a_project_are_listed(client: bigquery.Client) -> None:
    with pytest.raises(GoogleAPICallError):
        rows_of(client, "SELECT missing FROM d.t")
    rows_of(client, "SELECT 1 AS a", labels={"team": "x"})
    rows = rows_of(
        client,
        "SELECT query, statement_type, state, error_result.reason, destination_table.table_id IS"
        " NULL, ARRAY_LENGTH(labels) FROM `region-us`.INFORMATION_SCHEMA.JOBS_BY_PROJECT"
        " WHERE query LIKE 'SELECT _ AS a' OR error_result.reason IS NOT NULL"
        " ORDER BY creation_time",
    )
    assert rows == [
        ("SELECT missing FROM d.t", None, "DONE", "invalidQuery", True, 0),
        ("SELECT 1 AS a", "SELECT", "DONE", None, False, 1),
    ]


def test_a_view_of_another_project_is_another(client: bigquery.Client) -> None:
    assert rows_of(client, "SELECT * FROM `other`.`region-us`.INFORMATION_SCHEMA.JOBS") == []
    with pytest.raises(GoogleAPICallError, match="Not found: Dataset other:d"):
        rows_of(client, "SELECT * FROM other.d.INFORMATION_SCHEMA.TABLES")


def test_a_view_needs_its_place(client: bigquery.Client) -> None:
    with pytest.raises(BadRequest, match="must be qualified with a dataset"):
        rows_of(client, "SELECT * FROM INFORMATION_SCHEMA.TABLES")
    default = f"{client.project}.d"
    tables = "SELECT COUNT(*) FROM INFORMATION_SCHEMA.TABLES"
    assert rows_of(client, tables, default_dataset=default) == [(2,)]
    with pytest.raises(MethodNotImplemented, match=r"INFORMATION_SCHEMA\.STREAMING_TIMELINE"):
        rows_of(client, f"SELECT * FROM {VIEWS}.STREAMING_TIMELINE")
