"""Recognizing table names in statements: names that look like other syntax, in any context."""

import pytest
from google.api_core.exceptions import BadRequest, MethodNotImplemented, NotFound
from google.cloud import bigquery

from tests.connecting import rows_of


@pytest.fixture
def tables(client: bigquery.Client, dataset: str) -> None:
    for name, value in (("t", 1), ("T", 2), ("other", 3), ("n", 4)):
        rows_of(client, f"CREATE TABLE d.{name} AS SELECT {value} AS n, 'd.gone' AS text")


@pytest.fixture
def in_d(client: bigquery.Client, tables: None) -> dict[str, str]:
    return {"default_dataset": f"{client.project}.d"}


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT n FROM d.t", [(1,)]),
        ("SELECT n FROM d.T", [(2,)]),
        ("SELECT t.n FROM `d.t` JOIN d . other AS o USING (text) WHERE o.n = 3", [(1,)]),
        ("SELECT o.n FROM `{project}.d.t` AS t, `{project}`.d.other AS o", [(3,)]),
        ("SELECT n /* d.gone */ FROM d.other -- d.gone\n WHERE text = 'd.gone'", [(3,)]),
        ("WITH d AS (SELECT [5, 6] AS t) SELECT n FROM d, d.t AS n ORDER BY n", [(5,), (6,)]),
    ],
)
def test_a_table_is_found_by_its_name(
    client: bigquery.Client, sql: str, rows: list[tuple[int]]
) -> None:
    assert rows_of(client, sql.replace("{project}", client.project)) == rows


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("sql", ["SELECT d.other FROM d.Other AS d", "SELECT n FROM D.t"])
def test_a_name_in_other_letters_is_another_table(client: bigquery.Client, sql: str) -> None:
    with pytest.raises(NotFound, match=r"Not found: (Table|Dataset)"):
        rows_of(client, sql)


def test_a_query_s_own_table_comes_before_one_of_the_data_set(
    client: bigquery.Client, in_d: dict[str, str]
) -> None:
    sql = "WITH other AS (SELECT 5 AS n) SELECT n FROM other"
    assert rows_of(client, sql, **in_d) == [(5,)]


def test_a_column_with_the_name_of_a_table_outlives_the_table(
    client: bigquery.Client, in_d: dict[str, str]
) -> None:
    sql = "SELECT n FROM other"
    assert rows_of(client, sql, **in_d) == [(3,)]
    rows_of(client, "DROP TABLE d.n")
    assert rows_of(client, sql, **in_d) == [(3,)]
    rows_of(client, "DROP TABLE d.other")
    with pytest.raises(NotFound, match="Not found: Table"):
        rows_of(client, sql, **in_d)


@pytest.mark.usefixtures("tables")
def test_an_error_says_what_is_missing(client: bigquery.Client) -> None:
    with pytest.raises(NotFound, match=r"Not found: Table .*d\.gone"):
        rows_of(client, "SELECT n FROM d.t JOIN d.gone USING (n)")
    with pytest.raises(BadRequest, match=r"Unrecognized name: gone at \[1:8\]"):
        rows_of(client, "SELECT gone FROM `d.t`")
    with pytest.raises(
        MethodNotImplemented, match=r"ExportDataStatement.*not supported by the embedded"
    ):
        rows_of(client, "EXPORT DATA OPTIONS (uri = 'x') AS SELECT n FROM d.t")
