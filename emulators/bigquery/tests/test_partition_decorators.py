"""`table$20260131`: one partition as the destination of loads, copies, queries, and streams."""

import io
import json
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Conflict, MethodNotImplemented
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField, TimePartitioning

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.usefixtures("dataset")
DAYS = "SELECT day, n FROM d.t ORDER BY day, n"


@pytest.fixture(autouse=True)
def _table(client: bigquery.Client, dataset: str) -> None:
    rows_of(client, f"CREATE TABLE {dataset}.t (day DATE, n INT64) PARTITION BY day")
    rows_of(client, "INSERT INTO d.t VALUES ('2026-01-01', 1), ('2026-01-02', 2), (NULL, 3)")


def found(client: bigquery.Client) -> list[tuple[str | None, int]]:
    return [(day and str(day), n) for day, n in rows_of(client, DAYS)]


def write(client: bigquery.Client, table: str, sql: str, disposition: str, **more: Any) -> None:
    config = bigquery.QueryJobConfig(
        destination=f"{client.project}.d.{table}", write_disposition=disposition, **more
    )
    client.query(sql, job_config=config).result(timeout=WAIT_LIMIT_S)


def load(client: bigquery.Client, table: str, rows: list[dict[str, Any]], **more: Any) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    config = bigquery.LoadJobConfig(
        source_format="NEWLINE_DELIMITED_JSON", write_disposition="WRITE_TRUNCATE", **more
    )
    place = f"{client.project}.d.{table}"
    job = client.load_table_from_file(io.BytesIO(lines), place, job_config=config)
    job.result(timeout=WAIT_LIMIT_S)


def test_a_query_replaces_one_partition(client: bigquery.Client) -> None:
    query = "SELECT DATE '2026-01-01' AS day, 10 AS n"
    write(client, "t$20260101", query, "WRITE_TRUNCATE")
    assert found(client) == [(None, 3), ("2026-01-01", 10), ("2026-01-02", 2)]
    write(client, "t$20260101", query, "WRITE_APPEND")
    assert found(client)[1:3] == [("2026-01-01", 10)] * 2
    write(client, "t$20260103", query.replace("01-01", "01-03"), "WRITE_EMPTY")
    with pytest.raises(Conflict, match=r"Already Exists: Table .*\$20260103"):
        write(client, "t$20260103", query.replace("01-01", "01-03"), "WRITE_EMPTY")


def test_rows_of_another_partition_change_nothing(client: bigquery.Client) -> None:
    before = found(client)
    for day in ("DATE '2026-01-02'", "CAST(NULL AS DATE)"):
        with pytest.raises(BadRequest, match="Some rows belong to different partitions"):
            write(client, "t$20260101", f"SELECT {day} AS day, 10 AS n", "WRITE_TRUNCATE")
    assert found(client) == before


@pytest.mark.parametrize("partition", ["2026", "202601", "20261301", "2026010", "x", ""])
def test_a_partition_that_there_cannot_be_is_refused(
    client: bigquery.Client, partition: str
) -> None:
    with pytest.raises(BadRequest, match="decorator"):
        write(client, f"t${partition}", "SELECT DATE '2026-01-01' AS day, 1 AS n", "WRITE_APPEND")


def test_a_load_replaces_one_partition_and_may_widen_the_table(client: bigquery.Client) -> None:
    fields = [SchemaField("day", "DATE"), SchemaField("n", "INT64"), SchemaField("s", "STRING")]
    row = {"day": "2026-01-02", "n": 20, "s": "new"}
    with pytest.raises(BadRequest, match="Cannot add fields"):
        load(client, "t$20260102", [row], schema=fields)
    options = ["ALLOW_FIELD_ADDITION"]
    load(client, "t$20260102", [row], schema=fields, schema_update_options=options)
    assert rows_of(client, "SELECT n, s FROM d.t ORDER BY n") == [(1, None), (3, None), (20, "new")]


def test_partitions_are_copied_into_partitions(client: bigquery.Client) -> None:
    # As done by dbt's insert_overwrite with copy_partitions.
    rows_of(client, "CREATE TABLE d.fresh (day DATE, n INT64) PARTITION BY day")
    rows_of(client, "INSERT INTO d.fresh VALUES ('2026-01-01', 7), ('2026-01-05', 8)")
    place = f"{client.project}.d."
    config = bigquery.CopyJobConfig(write_disposition="WRITE_TRUNCATE")
    for partition in ("20260101", "__NULL__"):
        names = (f"{place}fresh${partition}", f"{place}t${partition}")
        client.copy_table(*names, job_config=config).result(timeout=WAIT_LIMIT_S)
    assert found(client) == [("2026-01-01", 7), ("2026-01-02", 2)]


def test_a_partition_is_removed(client: bigquery.Client) -> None:
    client.delete_table(f"{client.project}.d.t$20260101")
    assert found(client) == [(None, 3), ("2026-01-02", 2)]


def test_times_of_ingestion_are_those_of_the_decorator(client: bigquery.Client) -> None:
    load(client, "log$2026013114", [{"n": 1}], schema=[SchemaField("n", "INT64")])
    assert client.get_table("d.log").time_partitioning == TimePartitioning("HOUR")
    errors = client.insert_rows_json(f"{client.project}.d.log$2026020100", [{"n": 2}])
    assert errors == []
    hours = "SELECT FORMAT_TIMESTAMP('%F %H', _PARTITIONTIME), n FROM d.log ORDER BY n"
    assert rows_of(client, hours) == [("2026-01-31 14", 1), ("2026-02-01 00", 2)]
    load(client, "log$2026013114", [{"n": 9}], schema=[SchemaField("n", "INT64")])
    assert rows_of(client, hours) == [("2026-02-01 00", 2), ("2026-01-31 14", 9)]


def test_ranges_of_numbers_have_partitions_too(client: bigquery.Client) -> None:
    table = bigquery.Table(f"{client.project}.d.r", [SchemaField("id", "INT64")])
    ranges = bigquery.PartitionRange(start=0, end=100, interval=10)
    table.range_partitioning = bigquery.RangePartitioning(range_=ranges, field="id")
    client.create_table(table)
    rows_of(client, "INSERT INTO d.r VALUES (1), (15)")
    write(client, "r$10", "SELECT 19 AS id", "WRITE_TRUNCATE")
    assert rows_of(client, "SELECT id FROM d.r ORDER BY id") == [(1,), (19,)]
    for wrong in ("5", "100", "-10"):
        with pytest.raises(BadRequest, match="not the start of a partition"):
            write(client, f"r${wrong}", "SELECT 19 AS id", "WRITE_TRUNCATE")


def test_a_table_without_partitions_takes_no_decorator(client: bigquery.Client) -> None:
    rows_of(client, "CREATE TABLE d.plain (n INT64)")
    with pytest.raises(BadRequest, match="not partitioned"):
        write(client, "plain$20260101", "SELECT 1 AS n", "WRITE_TRUNCATE")
    with pytest.raises(BadRequest, match="not partitioned"):
        client.delete_table(f"{client.project}.d.plain$20260101")
    with pytest.raises(BadRequest, match="only tables partitioned by ingestion time"):
        client.insert_rows_json(f"{client.project}.d.t$20260101", [{"n": 2}])


def test_a_copy_does_not_move_rows_between_times_of_ingestion(client: bigquery.Client) -> None:
    load(client, "log$20260131", [{"n": 1}], schema=[SchemaField("n", "INT64")])
    place = f"{client.project}.d."
    with pytest.raises(MethodNotImplemented, match="other than partition by partition"):
        client.copy_table(f"{place}log", f"{place}copy").result(timeout=WAIT_LIMIT_S)
    names = (f"{place}log$20260131", f"{place}copy$20260131")
    client.copy_table(*names).result(timeout=WAIT_LIMIT_S)
    days = "SELECT CAST(_PARTITIONDATE AS STRING), n FROM d.copy"
    assert rows_of(client, days) == [("2026-01-31", 1)]


def test_the_last_partition_of_a_range_ends_with_the_range(client: bigquery.Client) -> None:
    ranges = "PARTITION BY RANGE_BUCKET(id, GENERATE_ARRAY(0, 25, 10))"
    rows_of(client, f"CREATE TABLE d.s (id INT64) {ranges}")
    rows_of(client, "INSERT INTO d.s VALUES (24), (25)")
    write(client, "s$20", "SELECT 21 AS id", "WRITE_TRUNCATE")
    assert rows_of(client, "SELECT id FROM d.s ORDER BY id") == [(21,), (25,)]
    with pytest.raises(BadRequest, match="Some rows belong to different partitions"):
        write(client, "s$20", "SELECT 25 AS id", "WRITE_APPEND")
