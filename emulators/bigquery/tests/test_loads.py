"""Load jobs: JSON lines and CSV files, sent all at once or in parts."""

import gzip
import io
import json
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, GoogleAPICallError, NotFound
from google.cloud import bigquery
from google.cloud.bigquery import LoadJobConfig, SchemaField

from tests.connecting import request, rows_of
from tests.limits import WAIT_LIMIT_S

SCHEMA = [SchemaField("id", "INT64", "REQUIRED"), SchemaField("name", "STRING")]
PLACE = "d.loaded"

pytestmark = pytest.mark.usefixtures("dataset")


def load(client: bigquery.Client, content: str | bytes, **options: Any) -> bigquery.LoadJob:
    file = io.BytesIO(content if isinstance(content, bytes) else content.encode())
    job = client.load_table_from_file(file, PLACE, job_config=LoadJobConfig(**options))
    return job.result(timeout=WAIT_LIMIT_S)


def test_rows_of_json_make_their_table(client: bigquery.Client) -> None:
    rows = [
        {
            "id": 1,
            "ok": True,
            "x": 1,
            "when": "2024-01-01T00:00:00Z",
            "parts": [{"a": 1}],
            "tags": ["x"],
        },
        {"id": 2, "x": 1.5, "day": "2024-01-01", "mixed": 1},
        {"id": 3, "mixed": "text"},
    ]
    job = client.load_table_from_json(rows, PLACE).result(timeout=WAIT_LIMIT_S)
    assert job.output_rows == 3
    assert {
        field.name: (field.field_type, field.mode) for field in client.get_table(PLACE).schema
    } == {
        "id": ("INTEGER", "NULLABLE"),
        "ok": ("BOOLEAN", "NULLABLE"),
        "x": ("FLOAT", "NULLABLE"),
        "when": ("TIMESTAMP", "NULLABLE"),
        "parts": ("RECORD", "REPEATED"),
        "tags": ("STRING", "REPEATED"),
        "day": ("DATE", "NULLABLE"),
        "mixed": ("STRING", "NULLABLE"),
    }
    assert rows_of(client, f"SELECT id, mixed, x FROM {PLACE} ORDER BY id") == [
        (1, None, 1.0),
        (2, "1", 1.5),
        (3, "text", None),
    ]


def test_a_large_file_comes_in_parts(client: bigquery.Client) -> None:
    lines = "".join(
        json.dumps({"id": number, "name": "x" * 1_000}) + "\n" for number in range(12_000)
    )
    job = load(client, lines, source_format="NEWLINE_DELIMITED_JSON", schema=SCHEMA)
    assert (job.output_rows, job.input_file_bytes) == (12_000, len(lines))
    assert rows_of(client, f"SELECT COUNT(DISTINCT id), SUM(LENGTH(name)) FROM {PLACE}") == [
        (12_000, 12_000_000)
    ]


def test_a_packed_file_is_unpacked(client: bigquery.Client) -> None:
    load(
        client,
        gzip.compress(b'{"id": 1, "name": "n"}\n'),
        source_format="NEWLINE_DELIMITED_JSON",
        schema=SCHEMA,
    )
    assert rows_of(client, f"SELECT * FROM {PLACE}") == [(1, "n")]


def test_a_damaged_packed_file_is_refused(client: bigquery.Client) -> None:
    packed = bytearray(gzip.compress(b'{"id": 1, "name": "n"}\n' * 1000, mtime=0))
    packed[20] ^= 0xFF
    packed[25] ^= 0xFF
    with pytest.raises(BadRequest, match="Error while reading data"):
        load(client, bytes(packed), source_format="NEWLINE_DELIMITED_JSON", schema=SCHEMA)


@pytest.mark.parametrize(
    ("content", "options", "rows"),
    [
        ('1,"a, ""b"""\n2,\n', {}, [(1, 'a, "b"'), (2, None)]),
        ('1,""\n"2",\n', {}, [(1, ""), (2, None)]),
        ("1,\r\n2,''\r\n", {"quote_character": "'"}, [(1, None), (2, "")]),
        ("id;name\n1;x\n", {"field_delimiter": ";", "skip_leading_rows": 1}, [(1, "x")]),
        ("1\tx\n", {"field_delimiter": "tab"}, [(1, "x")]),
        ("1,NULL\n2,\n", {"null_marker": "NULL"}, [(1, None), (2, "")]),
        ('1,"two\nlines"\n', {"allow_quoted_newlines": True}, [(1, "two\nlines")]),
        (
            "1\n2,x,y\n",
            {"allow_jagged_rows": True, "ignore_unknown_values": True},
            [(1, None), (2, "x")],
        ),
        ("1,caf\xe9\n".encode("latin-1"), {"encoding": "ISO-8859-1"}, [(1, "café")]),
    ],
)
def test_csv_is_read_as_it_is_described(
    client: bigquery.Client, content: str | bytes, options: dict[str, Any], rows: list[Any]
) -> None:
    load(client, content, source_format="CSV", schema=SCHEMA, **options)
    assert rows_of(client, f"SELECT * FROM {PLACE} ORDER BY id") == rows


def test_a_line_break_in_quotes_must_be_asked_for(client: bigquery.Client) -> None:
    content = '1,"two\nlines"\n2,x\n3,"y"z\n'
    options = {"source_format": "CSV", "schema": SCHEMA}
    with pytest.raises(BadRequest, match="errors: 3"):
        load(client, content, **options)
    job = load(client, content, max_bad_records=3, **options)
    assert "Missing close quote" in job.errors[0]["message"]
    assert "between close quote" in job.errors[2]["message"]
    assert rows_of(client, f"SELECT * FROM {PLACE}") == [(2, "x")]


def test_a_quote_that_never_closes_is_one_bad_line(client: bigquery.Client) -> None:
    options = {"source_format": "CSV", "schema": SCHEMA, "allow_quoted_newlines": True}
    with pytest.raises(BadRequest, match="errors: 1"):
        load(client, '1,x\n2,"y\n3,z\n', **options)


def test_an_empty_cell_of_another_type_is_null_unless_null_is_marked(
    client: bigquery.Client,
) -> None:
    schema = [SchemaField("id", "INT64"), SchemaField("name", "STRING")]
    options = {"source_format": "CSV", "schema": schema}
    load(client, ",x\n", **options)
    assert rows_of(client, f"SELECT * FROM {PLACE}") == [(None, "x")]
    with pytest.raises(BadRequest, match="errors: 1"):
        load(client, ",x\n", null_marker="-", **options)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_has_not_is_a_bad_row(client: bigquery.Client, number: str) -> None:
    schema = [SchemaField("id", "FLOAT64")]
    with pytest.raises(BadRequest, match="errors: 1"):
        load(
            client,
            f'{{"id": {number}}}\n',
            source_format="NEWLINE_DELIMITED_JSON",
            schema=schema,
        )


def test_json_is_kept_with_its_names_sorted(client: bigquery.Client) -> None:
    load(
        client,
        '{"j": {"b": 1, "a": {"d": 1.50, "c": "x"}}}\n',
        source_format="NEWLINE_DELIMITED_JSON",
        schema=[SchemaField("j", "JSON")],
    )
    assert rows_of(client, f"SELECT TO_JSON_STRING(j) FROM {PLACE}") == [
        ('{"a":{"c":"x","d":1.5},"b":1}',)
    ]


def test_the_columns_of_a_csv_are_detected(client: bigquery.Client) -> None:
    load(
        client,
        "id,ratio,ok,day\n1,1.5,true,2024-01-01\n2,2,false,2024-01-02\n",
        source_format="CSV",
        autodetect=True,
    )
    schema = client.get_table(PLACE).schema
    assert [field.field_type for field in schema] == ["INTEGER", "FLOAT", "BOOLEAN", "DATE"]
    assert rows_of(client, f"SELECT id, ratio FROM {PLACE} ORDER BY id") == [(1, 1.5), (2, 2.0)]


def test_bad_records_are_counted_and_named(client: bigquery.Client) -> None:
    deep = '{"name": ' + "[" * 5_000 + "]" * 5_000 + "}"
    content = f'{{"id": 1}}\n{{"id": "x"}}\n{deep}\n{{"name": "n"}}\n[1]\n'
    options = {"source_format": "NEWLINE_DELIMITED_JSON", "schema": SCHEMA}
    with pytest.raises(BadRequest, match="errors: 4"):
        load(client, content, **options)
    with pytest.raises(NotFound):
        client.get_table(PLACE)
    job = load(client, content, max_bad_records=4, **options)
    assert job.output_rows == 1
    assert "bad value): x Line: 2" in job.errors[0]["message"]
    assert rows_of(client, f"SELECT id FROM {PLACE}") == [(1,)]


def test_a_load_appends_replaces_and_widens(client: bigquery.Client) -> None:
    client.load_table_from_json([{"id": 1}], PLACE).result(timeout=WAIT_LIMIT_S)
    client.load_table_from_json([{"id": 2}], PLACE).result(timeout=WAIT_LIMIT_S)
    wider = LoadJobConfig(
        schema_update_options=["ALLOW_FIELD_ADDITION"], schema=[*SCHEMA, SchemaField("x", "BOOL")]
    )
    client.load_table_from_json([{"id": 3, "x": True}], PLACE, job_config=wider).result(
        timeout=WAIT_LIMIT_S
    )
    assert rows_of(client, f"SELECT id, x FROM {PLACE} ORDER BY id") == [
        (1, None),
        (2, None),
        (3, True),
    ]
    empty = LoadJobConfig(write_disposition="WRITE_EMPTY")
    with pytest.raises(GoogleAPICallError, match="Already Exists"):
        client.load_table_from_json([{"id": 4}], PLACE, job_config=empty).result(
            timeout=WAIT_LIMIT_S
        )
    replaced = LoadJobConfig(write_disposition="WRITE_TRUNCATE", autodetect=True)
    client.load_table_from_json([{"other": "x"}], PLACE, job_config=replaced).result(
        timeout=WAIT_LIMIT_S
    )
    assert rows_of(client, f"SELECT * FROM {PLACE}") == [("x",)]


def test_a_load_makes_a_partitioned_table(client: bigquery.Client) -> None:
    config = LoadJobConfig(
        schema=[SchemaField("ts", "TIMESTAMP")],
        time_partitioning=bigquery.TimePartitioning(field="ts"),
        clustering_fields=["ts"],
    )
    client.load_table_from_json([{"ts": "2024-01-01"}], PLACE, job_config=config).result(
        timeout=WAIT_LIMIT_S
    )
    table = client.get_table(PLACE)
    assert (table.time_partitioning.field, table.clustering_fields) == ("ts", ["ts"])


def test_a_table_is_copied(client: bigquery.Client) -> None:
    client.load_table_from_json([{"id": 1}], PLACE).result(timeout=WAIT_LIMIT_S)
    client.copy_table(PLACE, "d.copied").result(timeout=WAIT_LIMIT_S)
    with pytest.raises(GoogleAPICallError, match="Already Exists"):
        client.copy_table(PLACE, "d.copied").result(timeout=WAIT_LIMIT_S)
    twice = bigquery.CopyJobConfig(write_disposition="WRITE_APPEND")
    client.copy_table([PLACE, PLACE], "d.copied", job_config=twice).result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT COUNT(*) FROM d.copied") == [(3,)]
    with pytest.raises(NotFound):
        client.copy_table("d.missing", "d.other").result(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize("kind", ["ORC", "AVRO"])
def test_other_formats_are_refused(client: bigquery.Client, kind: str) -> None:
    with pytest.raises(GoogleAPICallError, match=f"Source format {kind}: not supported"):
        load(client, b"PAR1", source_format=kind, schema=SCHEMA)


def test_what_lies_in_the_cloud_is_refused(client: bigquery.Client) -> None:
    with pytest.raises(GoogleAPICallError, match="Loading from Cloud Storage: not supported"):
        client.load_table_from_uri("gs://bucket/file.csv", PLACE).result(timeout=WAIT_LIMIT_S)
    with pytest.raises(GoogleAPICallError, match="Extract jobs: not supported"):
        client.extract_table("d.t", "gs://bucket/file.csv").result(timeout=WAIT_LIMIT_S)


def test_a_broken_upload_goes_on_where_it_stopped(
    client: bigquery.Client, bigquery_endpoint: str
) -> None:
    place = {"projectId": client.project, "datasetId": "d", "tableId": "loaded"}
    described = {
        "destinationTable": place,
        "schema": {"fields": [field.to_api_repr() for field in SCHEMA]},
    }
    body = json.dumps(
        {"configuration": {"load": described}, "jobReference": {"jobId": "resumed"}}
    ).encode()
    path = f"/upload/bigquery/v2/projects/{client.project}/jobs?uploadType=resumable"
    status, headers, _ = request(bigquery_endpoint, "POST", path, body)
    assert status == 200
    session = headers["location"].removeprefix(bigquery_endpoint)

    def put(content: bytes, span: str) -> tuple[int, str | None]:
        status, headers, _ = request(
            bigquery_endpoint, "PUT", session, content, **{"Content-Range": f"bytes {span}"}
        )
        return status, headers.get("range")

    assert put(b"", "*/8") == (308, None)
    assert put(b"1,a\n", "0-3/*") == (308, "bytes=0-3")
    assert put(b"1,a\n", "0-3/*") == (308, "bytes=0-3")
    assert put(b"", "*/8") == (308, "bytes=0-3")
    assert put(b"", "nonsense") == (400, None)
    assert put(b"2,b\n", "4-7/8") == (200, None)
    client.get_job("resumed").result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, f"SELECT * FROM {PLACE} ORDER BY id") == [(1, "a"), (2, "b")]
    assert put(b"", "*/8") == (404, None)


@pytest.mark.parametrize(
    ("option", "value"), [("field_delimiter", "ab"), ("quote_character", "''")]
)
def test_a_delimiter_of_several_characters_is_refused(
    client: bigquery.Client, option: str, value: str
) -> None:
    name = {"field_delimiter": "fieldDelimiter", "quote_character": "quote"}[option]
    with pytest.raises(BadRequest, match=name):
        load(client, "1,a\n", schema=SCHEMA, source_format="CSV", **{option: value})


def test_job_of_a_region_is_found_there_only(client: bigquery.Client) -> None:
    """As in the service, jobs.get without `location` looks only in the US and the EU."""
    dataset = bigquery.Dataset(f"{client.project}.north")
    dataset.location = "europe-west4"
    client.create_dataset(dataset)
    file = io.BytesIO(b'{"id": 1}\n')
    job = client.load_table_from_file(
        file,
        "north.loaded",
        job_config=LoadJobConfig(source_format="NEWLINE_DELIMITED_JSON", autodetect=True),
    )
    assert job.result(timeout=WAIT_LIMIT_S).location == "europe-west4"
    assert client.get_job(job.job_id, location="europe-west4").state == "DONE"
    for elsewhere in (None, "US"):
        with pytest.raises(NotFound):
            client.get_job(job.job_id, location=elsewhere)
