"""Each supported GoogleSQL function, with its result according to BigQuery's reference."""

from typing import Any

import duckdb
import pytest
from google.api_core.exceptions import BadRequest, MethodNotImplemented
from google.cloud import bigquery

from bigquery_emulator.duckdb_words import message_of
from tests.connecting import rows_of
from tests.googlesql_cases import (
    AGGREGATES,
    ARRAYS,
    CASTS,
    CHOICES,
    NUMBERS,
    OF_BIGQUERY,
    TEXTS,
    TIMES,
    WINDOWS,
)
from tests.limits import WAIT_LIMIT_S

_ROWS = "FROM (SELECT x, x * 1.0 AS y FROM UNNEST([1, 2, 4, NULL]) AS x)"


def one(client: bigquery.Client, sql: str) -> Any:
    ((value,),) = rows_of(client, sql)
    return value


@pytest.mark.parametrize(
    ("expression", "expected"),
    [*NUMBERS, *CASTS, *TIMES, *TEXTS, *CHOICES, *ARRAYS, *OF_BIGQUERY],
    ids=str,
)
def test_an_expression_gives_bigquery_s_value(
    client: bigquery.Client, expression: str, expected: object
) -> None:
    value = one(client, f"SELECT {expression} AS found")
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(("expression", "expected"), AGGREGATES, ids=str)
def test_an_aggregate_gives_bigquery_s_value(
    client: bigquery.Client, expression: str, expected: object
) -> None:
    assert one(client, f"SELECT {expression} AS found {_ROWS}") == pytest.approx(expected)


@pytest.mark.parametrize(("expression", "expected"), WINDOWS, ids=str)
def test_a_window_gives_bigquery_s_values(
    client: bigquery.Client, expression: str, expected: list[object]
) -> None:
    rows = rows_of(
        client, f"SELECT found FROM (SELECT x, {expression} AS found {_ROWS}) ORDER BY x"
    )
    assert [value for (value,) in rows] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT 1 / 0", "division by zero"),
        ("SELECT DIV(1, 0)", "division by zero"),
        ("SELECT MOD(1, 0)", "division by zero"),
        ("SELECT LN(0)", "Argument to LN is not positive"),
        ("SELECT 9223372036854775807 + 1", "int64 overflow"),
        ("SELECT CAST('12.5' AS INT64)", "Bad int64 value: 12.5"),
        ("SELECT CAST('yes' AS BOOL)", "Bad bool value: yes"),
        ("SELECT [1, 2][OFFSET(5)]", "Array index 5 is out of bounds"),
        ("SELECT ERROR('stop')", "stop"),
        ("SELECT NO_SUCH(1)", "Function not found: NO_SUCH"),
        ("SELECT nothing FROM UNNEST([1]) AS x", "Unrecognized name: nothing"),
        ("SELECT 1 FROM", "Syntax error"),
        ("SELECT 1 AS end", "Unexpected keyword END"),
        ("SELECT 1 AS a, 2 AS a", "Duplicate column names"),
        ("SELECT @@project_id", "Unrecognized name: @@project_id"),
        ("SELECT 1 = '1'", "No matching signature for operator ="),
        ("SELECT NOT 1", "No matching signature for operator NOT"),
        ("SELECT COALESCE(1, 'a')", "No matching signature for function COALESCE"),
        ("SELECT 1 UNION ALL SELECT 'a'", "incompatible types"),
        ("SELECT 1e308 * 10", "double overflow"),
        ("SELECT [1, NULL]", "Array cannot have a null element"),
        ("SELECT [1, 2][1, 2]", "Syntax error"),
        ("SELECT @missing", "Query parameter 'missing' not found"),
        (
            "SELECT APPROX_QUANTILES(x, n) FROM (SELECT 1 AS x, 2 AS n)",
            "must be a literal or query parameter",
        ),
        ("-- nothing", "Unexpected end"),
        ("SELECT * FROM (SELECT 1 AS a), (SELECT 2 AS a)", "Duplicate column names"),
    ],
)
def test_what_bigquery_refuses_is_refused(client: bigquery.Client, sql: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        client.query(sql).result(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT STRPOS(b'a', b'a')",
        "SELECT 1; SELECT 2",
        "SELECT CAST(1 AS BIGNUMERIC)",
        "SELECT CAST(DATE '2024-01-01' AS STRING FORMAT 'YYYY')",
        "SELECT FORMAT_TIMESTAMP('%Z', CURRENT_TIMESTAMP())",
        "SELECT FORMAT('%T', 'a')",
        "SELECT INTERVAL 1 DAY",
        "SELECT JSON_FLATTEN(JSON '[]')",
        "SELECT 1 FROM `d.events_*`",
    ],
)
def test_what_would_be_wrong_is_refused(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(
        (MethodNotImplemented, BadRequest), match="not supported by the embedded BigQuery"
    ):
        client.query(sql).result(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT MAX_BY(g, k), MIN_BY(g, k) FROM r", [("c", "b")]),
        ("SELECT MAX_BY(g, f) FROM r", [("b",)]),
        ("SELECT MAX_BY(k, f) FROM r WHERE k > 9", [(None,)]),
        (
            "SELECT f, MAX_BY(g, k) FROM r GROUP BY f ORDER BY f",
            [(0.25, "c"), (0.5, "a"), (1.5, "b")],
        ),
        (
            "SELECT MAX_BY(g, f) OVER (PARTITION BY k > 1) FROM r ORDER BY k",
            [("b",), ("a",), ("a",)],
        ),
    ],
)
def test_max_by_is_the_value_of_the_greatest_row(
    client: bigquery.Client, sql: str, expected: list[tuple[object, ...]]
) -> None:
    rows = (
        "SELECT 1 AS k, 'b' AS g, 1.5 AS f"
        " UNION ALL SELECT 2, 'a', 0.5 UNION ALL SELECT 3, 'c', 0.25"
    )
    assert rows_of(client, f"WITH r AS ({rows}) {sql}") == expected


def test_a_query_that_refers_to_itself_ends(client: bigquery.Client) -> None:
    sql = "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t%s) SELECT MAX(n) FROM t"
    assert one(client, sql % " WHERE n < 500") == 500
    with pytest.raises(BadRequest, match="maximum number of iterations: 500"):
        one(client, sql % "")


@pytest.mark.parametrize(
    ("text", "place"), [("é", 0), ("日本語日本語日本語日本語", 0), ("a😀", 1), ("abg1", 2)]
)
def test_an_error_with_letters_that_take_several_bytes_is_told(
    client: bigquery.Client, text: str, place: int
) -> None:
    words = f"invalid hexadecimal string due to character at offset {place}: {text}"
    with pytest.raises(BadRequest, match=words):
        one(client, f"SELECT FROM_HEX('{text}')")


def test_an_error_without_words_gets_some() -> None:
    assert message_of(duckdb.InvalidInputException("")).startswith("A value is out of range")


def test_a_message_of_error_is_told_as_it_is(client: bigquery.Client) -> None:
    with pytest.raises(BadRequest, match="a DECIMAL in\nVARCHAR"):
        one(client, r"SELECT ERROR('a DECIMAL in\nVARCHAR')")
