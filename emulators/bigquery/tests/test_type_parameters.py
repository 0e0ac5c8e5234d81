"""STRING(n), BYTES(n), and NUMERIC(p, s): stored, returned, and enforced on all writes."""

import io

import pytest
from google.api_core.exceptions import BadRequest, MethodNotImplemented
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

SCHEMA = [
    SchemaField("s", "STRING", max_length=3),
    SchemaField("b", "BYTES", max_length=2),
    SchemaField("n", "NUMERIC", precision=4, scale=2),
    SchemaField("part", "RECORD", fields=[SchemaField("x", "STRING", max_length=1)]),
]


@pytest.fixture(autouse=True)
def _table(client: bigquery.Client, dataset: str) -> None:
    client.create_table(bigquery.Table(f"{client.project}.{dataset}.t", SCHEMA))


def test_a_schema_keeps_its_parameters(client: bigquery.Client) -> None:
    assert client.get_table("d.t").schema == SCHEMA
    rows_of(client, "CREATE TABLE d.u (s STRING(3), b BYTES(2), n NUMERIC(4, 2))")
    assert client.get_table("d.u").schema == SCHEMA[:3]
    types = "SELECT data_type FROM d.INFORMATION_SCHEMA.COLUMNS WHERE table_name = 'u'"
    assert sorted(rows_of(client, types)) == [("BYTES(2)",), ("NUMERIC(4, 2)",), ("STRING(3)",)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"s": "abcd"}, "maximum length 3 but got a value with length 4"),
        ({"b": "YWJj"}, "maximum length 2"),
        ({"n": "100"}, "out of range"),
        ({"part": {"x": "ab"}}, "Field part.x: STRING"),
    ],
)
def test_values_outside_are_refused_when_streamed_and_loaded(
    client: bigquery.Client, row: dict[str, object], message: str
) -> None:
    (error,) = client.insert_rows_json("d.t", [row])
    assert message in error["errors"][0]["message"]
    with pytest.raises(BadRequest):
        client.load_table_from_json([row], "d.t").result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT COUNT(*) FROM d.t") == [(0,)]


def test_values_outside_are_refused_when_a_statement_writes_them(client: bigquery.Client) -> None:
    for sql in (
        "INSERT INTO d.t (s) VALUES ('abcd')",
        "INSERT INTO d.t (b) VALUES (b'abc')",
        "INSERT INTO d.t (n) VALUES (NUMERIC '100')",
        "CREATE TABLE d.u (s STRING(2)) AS SELECT 'abc' AS s",
    ):
        with pytest.raises(BadRequest, match="outside the limits of its column's type"):
            rows_of(client, sql)
    config = bigquery.QueryJobConfig(
        destination=f"{client.project}.d.t", write_disposition="WRITE_APPEND"
    )
    with pytest.raises(BadRequest, match="outside the limits"):
        client.query("SELECT 'abcd' AS s", job_config=config).result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT COUNT(*) FROM d.t") == [(0,)]


def test_numbers_are_rounded_to_their_scale(client: bigquery.Client) -> None:
    client.insert_rows_json("d.t", [{"n": "1.235"}, {"n": "-1.235"}])
    client.load_table_from_file(
        io.BytesIO(b"abc,,2.999,\n"), "d.n", job_config=bigquery.LoadJobConfig(schema=SCHEMA[:3])
    )
    rows_of(client, "CREATE TABLE d.u (n NUMERIC(4, 2)) AS SELECT NUMERIC '3.145' AS n")
    assert [str(n) for (n,) in rows_of(client, "SELECT n FROM d.t ORDER BY n")] == ["-1.24", "1.24"]
    assert [str(n) for (n,) in rows_of(client, "SELECT n FROM d.u")] == ["3.15"]


def test_a_length_counts_characters_and_may_grow(client: bigquery.Client) -> None:
    assert client.insert_rows_json("d.t", [{"s": "äöü", "b": "YWI="}]) == []
    table = client.get_table("d.t")
    table.schema = [SchemaField("s", "STRING", max_length=5), *SCHEMA[1:], SchemaField("z", "DATE")]
    client.update_table(table, ["schema"])
    rows_of(client, "INSERT INTO d.t (s) VALUES ('abcde')")
    assert rows_of(client, "SELECT s FROM d.t") == [("äöü",), ("abcde",)]
    table = client.get_table("d.t")
    table.schema = [SchemaField("s", "STRING", max_length=4), *table.schema[1:]]
    with pytest.raises(BadRequest, match="is narrower"):
        client.update_table(table, ["schema"])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"type": "INT64", "maxLength": "3"}, "maxLength is only allowed for STRING and BYTES"),
        ({"type": "STRING", "precision": "3"}, "only allowed for NUMERIC"),
        ({"type": "STRING", "maxLength": "x"}, "maxLength: Expected `int`"),
        ({"type": "STRING", "maxLength": "-1"}, "invalid type parameter"),
        ({"type": "NUMERIC", "precision": "40"}, "precision must be from 1 to 29"),
        ({"type": "NUMERIC", "precision": "5", "scale": "10"}, "scale must be"),
        ({"type": "NUMERIC", "scale": "2"}, "scale must be"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(
    client: bigquery.Client, field: dict[str, str], message: str
) -> None:
    wrong = SchemaField.from_api_repr({"name": "a", "mode": "NULLABLE", **field})
    with pytest.raises((BadRequest, ValueError), match=message):
        client.create_table(bigquery.Table(f"{client.project}.d.x", [wrong]))


def test_parameters_in_an_array_are_said_to_be_missing(client: bigquery.Client) -> None:
    wrong = SchemaField("a", "STRING", "REPEATED", max_length=3)
    with pytest.raises(MethodNotImplemented, match="in an array is not supported"):
        client.create_table(bigquery.Table(f"{client.project}.d.x", [wrong]))
