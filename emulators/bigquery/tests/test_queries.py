"""Query jobs with Google's client: parameters, pages, dry runs, destinations, errors, canceling."""

import datetime as dt
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Conflict, GoogleAPICallError, NotFound
from google.cloud import bigquery
from google.cloud.bigquery import (
    ArrayQueryParameter,
    QueryJobConfig,
    ScalarQueryParameter,
    StructQueryParameter,
)

from tests.connecting import request, rows_of
from tests.limits import WAIT_LIMIT_MS, WAIT_LIMIT_S

# Too many pairs to count during a test.
ENDLESS = (
    "SELECT COUNT(*) FROM UNNEST(GENERATE_ARRAY(1, 1000000)) AS a,"
    " UNNEST(GENERATE_ARRAY(1, 1000000)) AS b"
    " WHERE MOD(a * b, 7) = 8"
)


@pytest.mark.parametrize("value", ['"x"', '{"a":"é"}', "[1,null]", "99999999999999999999"])
def test_a_parameter_of_json_keeps_its_value(bigquery_endpoint: str, value: str) -> None:
    kind = {"name": "v", "parameterType": {"type": "JSON"}, "parameterValue": {"value": value}}
    query = {"query": "SELECT @v AS v", "useLegacySql": False, "queryParameters": [kind]}
    body = json.dumps(query | {"parameterMode": "NAMED", "timeoutMs": WAIT_LIMIT_MS}).encode()
    path = "/bigquery/v2/projects/p/queries"
    _, _, answer = request(bigquery_endpoint, "POST", path, body)
    assert answer["rows"] == [{"f": [{"v": value}]}], answer


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("STRING", 'it\'s \\ "quoted"\n\x00'),
        ("INT64", -(2**63)),
        ("FLOAT64", 1.5),
        ("BOOL", False),
        ("NUMERIC", Decimal("0.000000001")),
        ("BYTES", b"\x00\xff'"),
        ("DATE", dt.date(2024, 2, 29)),
        ("TIME", dt.time(10, 11, 12, 130_000)),
        ("DATETIME", dt.datetime(2024, 2, 29, 1, 2, 3, 4)),
        ("TIMESTAMP", dt.datetime(2024, 2, 29, 1, 2, 3, 4, dt.UTC)),
    ],
)
def test_a_named_parameter_keeps_its_type_and_value(
    client: bigquery.Client, kind: str, value: object
) -> None:
    config = QueryJobConfig(
        query_parameters=[
            ScalarQueryParameter("v", kind, value),
            ArrayQueryParameter("vs", kind, [value] * 2),
        ]
    )
    result = client.query(
        "SELECT @v AS v, @vs AS vs, @V IS NULL AS is_null", job_config=config
    ).result(timeout=WAIT_LIMIT_S)
    assert [row.values() for row in result] == [(value, [value] * 2, False)]
    assert result.schema[0].field_type in (kind, "INTEGER", "FLOAT", "BOOLEAN")


@pytest.mark.parametrize("value", ["-_8=", "+/8="])
def test_bytes_are_taken_in_both_alphabets(client: bigquery.Client, value: str) -> None:
    parameter = {
        "name": "v",
        "parameterType": {"type": "BYTES"},
        "parameterValue": {"value": value},
    }
    config = QueryJobConfig.from_api_repr(
        {"query": {"queryParameters": [parameter], "parameterMode": "NAMED"}}
    )
    result = client.query("SELECT @v", job_config=config).result(timeout=WAIT_LIMIT_S)
    assert [row.values() for row in result] == [(b"\xfb\xff",)]


@pytest.mark.parametrize("kind", ["STRING", "INT64", "TIMESTAMP", "NUMERIC", "BYTES"])
def test_a_parameter_may_be_null(client: bigquery.Client, kind: str) -> None:
    parameter = ScalarQueryParameter("v", kind, None)
    assert rows_of(client, "SELECT @v, @v IS NULL", query_parameters=[parameter]) == [(None, True)]


def test_parameters_by_place_and_of_a_struct(client: bigquery.Client) -> None:
    place = [ScalarQueryParameter(None, "INT64", 2), ScalarQueryParameter(None, "STRING", "b")]
    assert rows_of(client, "SELECT ? + 1, ?", query_parameters=place) == [(3, "b")]
    struct = StructQueryParameter(
        "s", ScalarQueryParameter("x", "INT64", 1), ScalarQueryParameter("y", "STRING", "z")
    )
    assert rows_of(client, "SELECT @s.x, @s", query_parameters=[struct]) == [
        (1, {"x": 1, "y": "z"})
    ]
    days = [ScalarQueryParameter("n", "INT64", 2)]
    sql = (
        "SELECT DATE_SUB(DATE '2024-01-03', INTERVAL @n DAY), x"
        " FROM UNNEST([1, 2, 3]) AS x ORDER BY x LIMIT @n"
    )
    assert rows_of(client, sql, query_parameters=days) == [
        (dt.date(2024, 1, 1), 1),
        (dt.date(2024, 1, 1), 2),
    ]
    empty = ArrayQueryParameter("none", "STRING", [])
    assert rows_of(client, "SELECT 'a' IN UNNEST(@none)", query_parameters=[empty]) == [(False,)]
    with pytest.raises(BadRequest, match="Query parameter number 3 is not defined"):
        rows_of(client, "SELECT ?, ?, ?", query_parameters=place)


@pytest.mark.parametrize("run", [bigquery.Client.query, bigquery.Client.query_and_wait])
def test_a_result_comes_in_pages_in_its_order(
    client: bigquery.Client, run: Callable[..., Any]
) -> None:
    sql = "SELECT x FROM UNNEST(GENERATE_ARRAY(1, 25)) AS x ORDER BY x DESC"
    if run is bigquery.Client.query:
        rows = client.query(sql).result(page_size=10, timeout=WAIT_LIMIT_S)
    else:
        rows = client.query_and_wait(sql, page_size=10)
    assert rows.total_rows == 25
    assert [row["x"] for row in rows] == list(range(25, 0, -1))


def test_more_rows_than_a_page_holds(client: bigquery.Client) -> None:
    rows = client.query_and_wait("SELECT x FROM UNNEST(GENERATE_ARRAY(1, 25000)) AS x")
    assert [row["x"] for row in rows] == list(range(1, 25_001))
    assert rows.total_rows == 25_000


def test_columns_without_a_name_get_bigquery_s(client: bigquery.Client) -> None:
    schema = (
        client.query("SELECT 1, 2 AS two, COUNT(*), STRUCT(1 AS a).a FROM UNNEST([1])")
        .result(timeout=WAIT_LIMIT_S)
        .schema
    )
    assert [field.name for field in schema] == ["f0_", "two", "f1_", "a"]


def test_a_rounded_number_may_be_rounded_again(client: bigquery.Client) -> None:
    """Each call used to expand the inner one thirty times, so two nested calls never finished."""
    rounded = "ROUND(TRUNC(ROUND(x / 3, 4) / 3, 3) / 3, 2)"
    sql = f"SELECT {rounded} FROM UNNEST([100.0, NULL]) AS x ORDER BY x DESC"
    assert rows_of(client, sql) == [(3.7,), (None,)]


def test_a_finished_query_can_be_read_by_its_hidden_table(client: bigquery.Client) -> None:
    job = client.query("SELECT 1 AS a")
    job.result(timeout=WAIT_LIMIT_S)
    again = client.get_job(job.job_id)
    assert (again.state, again.statement_type, again.error_result) == ("DONE", "SELECT", None)
    assert [row.values() for row in client.list_rows(client.get_table(again.destination))] == [(1,)]
    assert job.job_id in [listed.job_id for listed in client.list_jobs()]
    with pytest.raises(NotFound, match="Not found: Job"):
        client.get_job("none")
    with pytest.raises(Conflict, match="Already Exists: Job"):
        client.query("SELECT 2", job_id=job.job_id, job_retry=None, retry=None)


@pytest.mark.usefixtures("dataset")
def test_a_dry_run_says_the_bytes_and_fields_and_runs_nothing(client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(
            f"{client.project}.d.t",
            [bigquery.SchemaField("a", "INT64"), bigquery.SchemaField("b", "STRING")],
        )
    )
    client.insert_rows_json("d.t", [{"a": 1, "b": "xyz"}, {"a": 2}])
    dry = QueryJobConfig(dry_run=True)
    job = client.query("SELECT a FROM d.t", job_config=dry)
    assert (job.total_bytes_processed, [field.name for field in job.schema]) == (2 * 8, ["a"])
    assert client.query("SELECT * FROM d.t", job_config=dry).total_bytes_processed == 2 * 8 + 2 + 3
    client.query("DELETE FROM d.t WHERE true", job_config=dry)
    assert client.get_table("d.t").num_rows == 2
    with pytest.raises(BadRequest, match="Unrecognized name: c"):
        client.query("SELECT c FROM d.t", job_config=dry)


@pytest.mark.usefixtures("dataset")
def test_a_query_over_its_limit_of_bytes_is_refused(client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.d.t", [bigquery.SchemaField("a", "INT64")])
    )
    client.insert_rows_json("d.t", [{"a": 1}])
    with pytest.raises(
        GoogleAPICallError, match=r"limit for bytes billed: 1000\. 10485760 or higher"
    ):
        rows_of(client, "SELECT a FROM d.t", maximum_bytes_billed=1000)
    assert rows_of(client, "SELECT a FROM d.t", maximum_bytes_billed=10 * 1024 * 1024) == [(1,)]


@pytest.mark.usefixtures("dataset")
def test_a_result_goes_into_its_destination(client: bigquery.Client) -> None:
    place = f"{client.project}.d.kept"
    rows_of(client, "SELECT 1 AS a", destination=place)
    with pytest.raises(Conflict, match="Already Exists: Table"):
        rows_of(client, "SELECT 2 AS a", destination=place)
    rows_of(client, "SELECT 2 AS a", destination=place, write_disposition="WRITE_APPEND")
    assert rows_of(client, "SELECT a FROM d.kept ORDER BY a") == [(1,), (2,)]
    with pytest.raises(BadRequest, match=r"Cannot add fields \(field: b\)"):
        rows_of(
            client, "SELECT 3 AS a, 'x' AS b", destination=place, write_disposition="WRITE_APPEND"
        )
    with pytest.raises(BadRequest, match="changed type from INTEGER to STRING"):
        rows_of(client, "SELECT 'x' AS a", destination=place, write_disposition="WRITE_APPEND")
    rows_of(client, "SELECT 'x' AS b", destination=place, write_disposition="WRITE_TRUNCATE")
    assert rows_of(client, "SELECT * FROM d.kept") == [("x",)]
    with pytest.raises(NotFound):
        rows_of(
            client,
            "SELECT 1 AS a",
            destination=f"{client.project}.d.new",
            create_disposition="CREATE_NEVER",
        )


@pytest.mark.usefixtures("dataset")
def test_tables_are_named_in_every_way(client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.d.t", [bigquery.SchemaField("a", "INT64")])
    )
    client.insert_rows_json("d.t", [{"a": 1}])
    for name in ("d.t", "`d.t`", "`d`.`t`", f"`{client.project}.d.t`", f"`{client.project}`.d.t"):
        assert rows_of(client, f"SELECT t.a FROM {name} AS t") == [(1,)]
        assert rows_of(client, f"SELECT t.a FROM {name}") == [(1,)]
    assert rows_of(client, "SELECT a FROM t", default_dataset=f"{client.project}.d") == [(1,)]
    assert rows_of(
        client, "WITH t AS (SELECT 5 AS a) SELECT a FROM t", default_dataset=f"{client.project}.d"
    ) == [(5,)]
    with pytest.raises(BadRequest, match="must be qualified with a dataset"):
        rows_of(client, "SELECT a FROM t")
    with pytest.raises(NotFound, match="missing"):
        rows_of(client, "SELECT a FROM d.missing")


def test_a_query_that_fails_says_why_in_its_job(client: bigquery.Client) -> None:
    job = client.query("SELECT 1 / 0")
    with pytest.raises(BadRequest, match="division by zero"):
        job.result(timeout=WAIT_LIMIT_S)
    failed = client.get_job(job.job_id)
    assert failed.error_result == {
        "reason": "invalidQuery",
        "message": "division by zero: 1 / 0",
        "location": "query",
    }


def test_a_query_under_way_can_be_cancelled(client: bigquery.Client) -> None:
    job = client.query(ENDLESS)
    assert not job.done()
    job.cancel()
    with pytest.raises(GoogleAPICallError, match="cancelled"):
        job.result(timeout=WAIT_LIMIT_S, retry=None, job_retry=None)
    assert client.get_job(job.job_id).error_result["reason"] == "stopped"
    assert rows_of(client, "SELECT 1") == [(1,)]


def test_a_query_ends_at_its_own_limit(client: bigquery.Client) -> None:
    job = client.query(ENDLESS, job_config=QueryJobConfig(job_timeout_ms=100))
    with pytest.raises(GoogleAPICallError, match="timed out"):
        job.result(timeout=WAIT_LIMIT_S, retry=None, job_retry=None)


@pytest.mark.usefixtures("dataset")
def test_many_may_read_and_write_at_once(client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.d.t", [bigquery.SchemaField("a", "INT64")])
    )

    def work(number: int) -> int:
        assert client.insert_rows_json("d.t", [{"a": number}] * 10) == []
        ((count,),) = rows_of(client, f"SELECT COUNT(*) FROM d.t WHERE a = {number}")
        return int(count)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(24))) == [10] * 24
    assert rows_of(client, "SELECT COUNT(*), COUNT(DISTINCT a) FROM d.t") == [(240, 24)]


def test_legacy_sql_is_refused(client: bigquery.Client) -> None:
    with pytest.raises(GoogleAPICallError, match="Legacy SQL is not supported"):
        rows_of(client, "SELECT 1", use_legacy_sql=True)
