"""Requests from Grafana's BigQuery data source: names, fields, a dry run, and time series.

Grafana's macros expand to the SQL below. Source:
https://github.com/grafana/google-bigquery-datasource/blob/main/pkg/bigquery/macros.go
"""

from datetime import UTC, datetime

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud import bigquery

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

# $__timeGroup(received_at, 5m), and filters from the editor and the back end.
GROUP = "TIMESTAMP_MILLIS(DIV(UNIX_MILLIS(received_at), 300000) * 300000)"
MONTH = (
    'TIMESTAMP((PARSE_DATE("%Y-%m-%d",CONCAT( CAST((EXTRACT(YEAR FROM received_at)) AS STRING),'
    "'-',CAST((EXTRACT(MONTH FROM received_at)) AS STRING),'-','01'))))"
)
FILTERS = (
    "received_at >= '2026-01-31T00:00:00Z' AND received_at <= '2026-02-01T00:00:00Z'",
    "received_at BETWEEN TIMESTAMP_MILLIS(1769817600000) AND TIMESTAMP_MILLIS(1769904000000)",
)


@pytest.fixture(autouse=True)
def _rows(client: bigquery.Client, dataset: str) -> None:
    rows_of(
        client,
        f"CREATE TABLE {dataset}.rows (received_at TIMESTAMP, model STRING, total_s FLOAT64)"
        " PARTITION BY DATE(received_at) OPTIONS(require_partition_filter=true)",
    )
    rows = [
        ("2026-01-31T10:01:00Z", "sd", 1.0),
        ("2026-01-31T10:04:59Z", "sd", 3.0),
        ("2026-01-31T10:05:00Z", "minilm", 0.5),
        ("2026-02-02T00:00:00Z", "sd", 9.0),
    ]
    named = [dict(zip(("received_at", "model", "total_s"), row, strict=True)) for row in rows]
    assert client.insert_rows_json("d.rows", named) == []


@pytest.mark.parametrize("time_filter", FILTERS)
def test_a_series_is_grouped_by_time(client: bigquery.Client, time_filter: str) -> None:
    rows = rows_of(
        client,
        f"SELECT {GROUP} AS time, model AS metric, AVG(total_s) AS total_s FROM d.rows"
        f" WHERE {time_filter} GROUP BY 1, 2 ORDER BY 1",
        labels={"grafana": "dashboard"},
    )
    assert rows == [
        (datetime(2026, 1, 31, 10, 0, tzinfo=UTC), "sd", 2.0),
        (datetime(2026, 1, 31, 10, 5, tzinfo=UTC), "minilm", 0.5),
    ]


def test_a_series_is_grouped_by_month(client: bigquery.Client) -> None:
    rows = rows_of(
        client,
        f"SELECT {MONTH} AS time, SUM(total_s) FROM d.rows"
        " WHERE received_at > TIMESTAMP '2026-01-01' GROUP BY time ORDER BY time",
    )
    assert rows == [
        (datetime(2026, 1, 1, tzinfo=UTC), 4.5),
        (datetime(2026, 2, 1, tzinfo=UTC), 9.0),
    ]


def test_the_editor_finds_its_names(client: bigquery.Client) -> None:
    assert [item.dataset_id for item in client.list_datasets()] == ["d"]
    assert [item.table_id for item in client.list_tables("d")] == ["rows"]
    fields = [(field.name, field.field_type) for field in client.get_table("d.rows").schema]
    assert fields == [("received_at", "TIMESTAMP"), ("model", "STRING"), ("total_s", "FLOAT")]


def test_the_editor_tries_a_query_without_running_it(client: bigquery.Client) -> None:
    config = bigquery.QueryJobConfig(dry_run=True)
    tried = f"SELECT {GROUP} AS time, total_s FROM d.rows WHERE {FILTERS[0]}"
    assert client.query(tried, job_config=config).total_bytes_processed > 0
    with pytest.raises(BadRequest, match="without a filter"):
        client.query("SELECT model FROM d.rows", job_config=config).result(timeout=WAIT_LIMIT_S)
