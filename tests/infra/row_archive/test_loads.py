"""The archive loads the same rows into BigQuery that insertAll writes, with the same reports as a
result.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec
import pytest
from google.cloud import bigquery

from infra import bigquery as tables
from infra.row_archive.archive import ArchivedDays, RowArchive
from infra.row_archive.loads import BigQueryLoader
from infra.row_archive.parquet import parquet_of_lines
from shared.errors import Unavailable
from shared.reports.definitions import ReportQuestion, reports
from shared.reports.runner import ReportRunner
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import BigQuerySender, Fields
from shared.usage.senders import ObjectSender
from tests.bigquery_client import connected, rows_of
from tests.infra.reports import generated
from tests.infra.row_archive.stores import archive_all, row

pytestmark = pytest.mark.slow

PROJECTED = "month_end_usd"
"""A column that changes with each second of the month."""
SENT_TOGETHER = 500
DIRECT, ARCHIVED = "direct", "archived"


class Both(NamedTuple):
    """Two datasets that got the same rows in two different ways."""

    client: bigquery.Client
    endpoint: str
    url: str


def as_sent(row: Fields) -> Fields:
    """The row as writers send it: times are Unix seconds."""
    return {
        name: value.timestamp() if isinstance(value, dt.datetime) else value
        for name, value in row.items()
        if value is not None
    }


@pytest.fixture(scope="module")
def both(bigquery_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    url = f"file://{tmp_path_factory.mktemp('objects')}"
    # Each row_id is kept once: insertAll drops duplicates that arrive within a minute, regardless
    # of their content.
    sent = {row["row_id"]: as_sent(row) for row in generated.rows(requests=400)}
    rows = [msgspec.json.encode(row) for row in sent.values()]
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        for dataset in (DIRECT, ARCHIVED):
            tables.create(client, dataset)
        direct = BigQuerySender(client.project, f"{DIRECT}.rows", bigquery_endpoint)
        stored = ObjectSender(url, "rows")
        for first in range(0, len(rows), SENT_TOGETHER):
            for sender in (direct, stored):
                assert sender.send(rows[first : first + SENT_TOGETHER]) == []
        loader = BigQueryLoader(client.project, ARCHIVED, bigquery_endpoint)
        asyncio.run(archive_all(RowArchive(ObjectStore(url), "rows", loader)))
        yield Both(client, bigquery_endpoint, url)


def all_rows(client: bigquery.Client, dataset: str) -> list[tuple[object, ...]]:
    query = f"SELECT * FROM {dataset}.rows WHERE received_at >= TIMESTAMP '2000-01-01'"
    return rows_of(client, f"{query} ORDER BY row_id")


def test_tables_have_the_same_rows(both: Both) -> None:
    direct = all_rows(both.client, DIRECT)
    assert len(direct) > 400
    assert all_rows(both.client, ARCHIVED) == direct


def test_every_report_says_the_same(both: Both) -> None:
    question = ReportQuestion(generated.FIRST, generated.AFTER, "Europe/Berlin")
    direct, archived = (ReportRunner(both.client, dataset) for dataset in (DIRECT, ARCHIVED))
    without_rows = set()
    for report in reports().values():
        wanted, found = direct.run(report, question), archived.run(report, question)
        assert found.heads == wanted.heads
        expected = [about(row, wanted.heads) for row in wanted.rows]
        assert [list(row) for row in found.rows] == expected, report.name
        if not wanted.rows:
            without_rows.add(report.name)
    assert without_rows == {"starts", "webhooks"}, "they are about tables that are empty here"


def about(row: Sequence[object], heads: Sequence[str]) -> list[object]:
    """The row, with tolerance for the last digits of sums, which depend on row order."""
    return [
        approximately(value, head) if isinstance(value, float) else value
        for value, head in zip(row, heads, strict=True)
    ]


def approximately(value: float, head: str) -> Any:
    """Percentiles are approximate and rounded to a tenth, so the next tenth is accepted too."""
    if head == PROJECTED:
        return pytest.approx(value, rel=0.05)
    is_rounded = round(value, 1) == value
    return pytest.approx(value, abs=0.1 + 2e-9 if is_rounded else 2e-9)


def test_file_is_loaded_once_by_its_name(both: Both, tmp_path: Path) -> None:
    loader = BigQueryLoader(both.client.project, ARCHIVED, both.endpoint)
    path = tmp_path / "hours.parquet"
    columns = ", ".join(
        f"{'now()' if one['type'] == 'TIMESTAMP' else 1}::{TYPES[one['type']]} AS {one['name']}"
        for one in tables.schema("worker_hours")
    )
    duckdb.sql(f"COPY (SELECT {columns}) TO '{path}' (FORMAT parquet)")
    for _ in range(2):
        loader.load("worker_hours", path, "one")
    loader.load("worker_hours", path, "another")
    query = f"SELECT COUNT(*) FROM {ARCHIVED}.worker_hours WHERE hour >= TIMESTAMP '2000-01-01'"
    assert rows_of(both.client, query) == [(2,)]


def test_file_that_was_loaded_in_a_region_is_left_alone(both: Both, tmp_path: Path) -> None:
    """The process that started the load died before it learned that the load had completed."""
    name = f"north_{uuid.uuid4().hex[:8]}"
    dataset = bigquery.Dataset(f"{both.client.project}.{name}")
    dataset.location = "europe-west4"
    both.client.create_dataset(dataset)
    tables.create(both.client, name)
    (path,) = parquet_files(tmp_path, [row(0)])
    loader = BigQueryLoader(both.client.project, name, both.endpoint)
    for _ in range(2):
        loader.load("rows", path, "one")
    assert loader.days("rows") == {"2026-09-21": 1}


def parquet_files(folder: Path, rows: list[Fields]) -> list[Path]:
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return list(parquet_of_lines("rows", lines, folder).by_day.values())


TYPES = {
    "STRING": "VARCHAR",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "TIMESTAMP": "TIMESTAMPTZ",
}


def test_load_that_failed_is_tried_again_under_the_same_name(both: Both, tmp_path: Path) -> None:
    """The table is created after the archive has started."""
    dataset = f"late_{uuid.uuid4().hex[:8]}"
    both.client.create_dataset(dataset)
    objects, loader = (
        ObjectStore(both.url),
        BigQueryLoader(both.client.project, dataset, both.endpoint),
    )
    both.client.create_table(
        bigquery.Table(
            f"{both.client.project}.{dataset}.rows", [bigquery.SchemaField("other", "STRING")]
        )
    )
    days = ArchivedDays(objects, "rows")
    with pytest.raises(Unavailable, match="BigQuery"):
        asyncio.run(days.restore(loader, {}, "2026-10-06", "2026-10-06"))
    both.client.delete_table(f"{dataset}.rows")
    tables.create(both.client, dataset)
    assert asyncio.run(days.restore(loader, {}, "2026-10-06", "2026-10-06")) == ["2026-10-06"]
    found = loader.days("rows")
    assert list(found) == ["2026-10-06"]
    assert asyncio.run(days.restore(loader, found, "2026-10-06", "2026-10-06")) == []


def test_bigquery_that_is_away_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(Unavailable, match="BigQuery"):
        BigQueryLoader("p", "d", "http://127.0.0.1:1").load("rows", path, "one")
