"""Loading Parquet files as sent by pandas-gbq and load_table_from_dataframe."""

import io
from pathlib import Path
from typing import Any

import duckdb
import pytest
from google.api_core.exceptions import BadRequest, GoogleAPICallError, MethodNotImplemented
from google.cloud import bigquery
from google.cloud.bigquery import LoadJobConfig, ParquetOptions, SchemaField

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

PLACE = "d.loaded"

pytestmark = pytest.mark.usefixtures("dataset")


def parquet(folder: Path, query: str) -> bytes:
    path = folder / "rows.parquet"
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
    return path.read_bytes()


def load(client: bigquery.Client, content: bytes, **options: Any) -> bigquery.LoadJob:
    lists = ParquetOptions()
    lists.enable_list_inference = options.pop("lists", True)
    config = LoadJobConfig(source_format="PARQUET", parquet_options=lists, **options)
    job = client.load_table_from_file(io.BytesIO(content), PLACE, job_config=config)
    return job.result(timeout=WAIT_LIMIT_S)


def test_a_file_makes_its_table(client: bigquery.Client, tmp_path: Path) -> None:
    query = (
        "SELECT 1::BIGINT AS i, 2::INTEGER AS j, 1.5::FLOAT AS f, 'x' AS s, 'ab'::BLOB AS b,"
        " true AS t, DATE '2026-01-31' AS d, TIME '01:02:03.000004' AS h,"
        " TIMESTAMP '2026-01-31 01:02:03' AS dt, TIMESTAMPTZ '2026-01-31 01:02:03+00' AS ts,"
        " 1.25::DECIMAL(10, 2) AS n, [1, 2]::BIGINT[] AS a, {'x': 1::BIGINT, 'y': ['z']} AS r"
    )
    job = load(client, parquet(tmp_path, query))
    assert (job.output_rows, job.destination.table_id) == (1, "loaded")
    kinds = [(field.field_type, field.mode) for field in client.get_table(PLACE).schema]
    assert kinds == [
        *[("INTEGER", "NULLABLE")] * 2,
        *[(kind, "NULLABLE") for kind in ("FLOAT", "STRING", "BYTES", "BOOLEAN", "DATE", "TIME")],
        *[(kind, "NULLABLE") for kind in ("DATETIME", "TIMESTAMP", "NUMERIC")],
        ("INTEGER", "REPEATED"),
        ("RECORD", "NULLABLE"),
    ]
    ((i, j, f, s, b, t, d, h, dt, ts, n, a, r),) = rows_of(client, f"SELECT * FROM {PLACE}")
    assert (i, j, f, s, b, t, str(d), str(h)) == (
        *(1, 2, 1.5, "x", b"ab", True),
        *("2026-01-31", "01:02:03.000004"),
    )
    assert (str(dt), ts.isoformat(), str(n)) == (
        *("2026-01-31 01:02:03", "2026-01-31T01:02:03+00:00"),
        "1.25",
    )
    assert (a, r) == ([1, 2], {"x": 1, "y": ["z"]})


def test_a_file_is_fitted_to_a_schema_by_name(client: bigquery.Client, tmp_path: Path) -> None:
    schema = [
        SchemaField("at", "TIMESTAMP"),
        SchemaField("ID", "FLOAT64", "REQUIRED"),
        SchemaField("doc", "JSON"),
        SchemaField("tags", "STRING", "REPEATED"),
        SchemaField("none", "STRING"),
    ]
    query = """
        SELECT 7 AS id, '{"a": 1}' AS doc, NULL::VARCHAR[] AS tags,
        TIMESTAMP '2026-01-31 01:02:03' AS at"""
    load(client, parquet(tmp_path, query), schema=schema)
    ((at, number, doc, tags, none),) = rows_of(client, f"SELECT * FROM {PLACE}")
    assert (at.isoformat(), number, doc) == ("2026-01-31T01:02:03+00:00", 7.0, {"a": 1})
    assert (tags, none) == ([], None)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT 'x' AS id", "Field id has type STRING in the Parquet file"),
        ("SELECT [1] AS id", "has type ARRAY<INTEGER>"),
        ("SELECT 1 AS id, 2 AS more", "No such field: more"),
        ("SELECT 'x' AS name", "Field id is missing"),
        ("SELECT NULL::BIGINT AS id", "Required field id cannot be null"),
        ("SELECT 1 AS id, 'abcd' AS name", "outside the limits"),
        ("SELECT 1 AS id, ['a', NULL] AS tags", "an array contains NULL"),
        ("SELECT 1 AS id, 18446744073709551615::UBIGINT AS n", "Error while reading data"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    client: bigquery.Client, tmp_path: Path, query: str, message: str
) -> None:
    rows_of(
        client,
        f"CREATE TABLE {PLACE} (id INT64 NOT NULL, name STRING(3), tags ARRAY<STRING>, n INT64)",
    )
    load(client, parquet(tmp_path, "SELECT 1 AS id"))
    with pytest.raises(BadRequest, match=message):
        load(client, parquet(tmp_path, query))
    assert rows_of(client, f"SELECT id FROM {PLACE}") == [(1,)]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"id\n1\n"])
def test_a_file_that_is_no_parquet_is_refused(client: bigquery.Client, content: bytes) -> None:
    with pytest.raises(BadRequest, match="Error while reading data") as raised:
        load(client, content)
    assert "penstock-bigquery-" not in str(raised.value)


def test_a_cut_file_is_refused(client: bigquery.Client, tmp_path: Path) -> None:
    whole = parquet(tmp_path, "SELECT range AS id FROM range(10000)")
    for cut in (whole[: len(whole) // 2], whole[:100] + b"\xff" * 500 + whole[600:]):
        with pytest.raises(BadRequest, match="Error while reading data"):
            load(client, cut)


def test_types_that_are_not_kept_are_said(client: bigquery.Client, tmp_path: Path) -> None:
    for query in ("SELECT INTERVAL 1 DAY AS i", "SELECT MAP {'a': 1} AS m"):
        with pytest.raises(MethodNotImplemented, match="not supported by the embedded BigQuery"):
            load(client, parquet(tmp_path, query))
    with pytest.raises(MethodNotImplemented, match="without enableListInference"):
        load(client, parquet(tmp_path, "SELECT [1] AS a"), lists=False)


def test_a_query_reaches_no_file(client: bigquery.Client) -> None:
    for sql in ("SELECT * FROM read_parquet('/tmp/x')", "SELECT * FROM `/tmp/x.parquet`"):
        with pytest.raises(GoogleAPICallError):
            rows_of(client, sql)
