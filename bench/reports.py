"""How long each report takes for five million rows in the embedded BigQuery.

SQL files in bench generate the rows, and load jobs load them, just as a user's load jobs would.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from google.cloud import bigquery

from bench.pipeline import emulator
from bench.report import Figure, Outcome
from bigquery_emulator import parse_schema
from infra import bigquery as tables
from shared.reports.definitions import ReportQuestion, reports
from shared.reports.runner import ReportRunner
from shared.usage.bigquery import open_client

ROWS = int(os.environ.get("BENCH_REPORT_ROWS", "5000000"))
REQUESTS = round(ROWS / 1.92)
"""A request has an average of 1.9 items, and one in a hundred rows is a duplicate."""
PART = 125_000
"""Number of requests per load job."""
SINCE = datetime(2026, 10, 5, tzinfo=UTC)
UNTIL = SINCE + timedelta(days=35)
SEED = "18"
ROUNDS = 3
LIMIT_S = 3.0
DATASET = "penstock"


def run() -> Outcome:
    with (
        tempfile.TemporaryDirectory() as folder,
        emulator("bigquery", Path(folder), "--data-dir", f"{folder}/data") as (_, port),
        open_client("bench", f"http://127.0.0.1:{port}") as client,
    ):
        loaded_s = _fill(client)
        (rows,) = next(iter(client.query(COUNT).result()))
        took_s, details = _ask_all(client)
    figures = [
        Figure("rows", rows, "", ">=", 0.98 * ROWS),
        Figure("rows loaded a second", rows / loaded_s, "1/s"),
        *(
            Figure(f"report {name}", statistics.median(of), "s", "<=", LIMIT_S)
            for name, of in took_s.items()
        ),
    ]
    return Outcome(figures, details)


COUNT = f"SELECT COUNT(*) FROM {DATASET}.rows WHERE received_at >= '2000-01-01'"


def _fill(client: bigquery.Client) -> float:
    """Returns the seconds taken by the load jobs, excluding the generation of the rows."""
    tables.create(client, DATASET)
    sql = _read("reports")
    took_s = 0.0
    with duckdb.connect() as database, tempfile.TemporaryDirectory() as folder:
        database.execute("SET TimeZone = 'UTC'")
        typed = _typed(database, sql)
        path, rows = Path(folder) / "rows.json", Path(folder) / "rows.parquet"
        for first in range(0, REQUESTS, PART):
            after = min(first + PART, REQUESTS)
            parameters = {"seed": SEED, "first": first, "after": after, "since": SINCE.isoformat()}
            database.execute(f"COPY ({typed}) TO '{rows}' (FORMAT parquet)", parameters)
            took_s += _load(client, "rows", rows)
            print(f"  {after:,} of {REQUESTS:,} requests, {took_s:.0f} s", flush=True)
        for table in ("worker_hours", "webhook_deliveries"):
            statement = f"COPY ({_read(f'report_{table}')}) TO '{path}' (FORMAT json)"
            database.execute(statement, {"since": str(SINCE)})
            _load(client, table, path)
    return took_s


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")


def _typed(database: duckdb.DuckDBPyConnection, sql: str) -> str:
    """Returns the query with the table's column types, which Parquet requires."""
    types = {field.name: field.duckdb_type for field in parse_schema(tables.schema("rows"))}
    parameters = {"seed": SEED, "first": 0, "after": 1, "since": SINCE.isoformat()}
    columns = [name for name, *_ in database.execute(sql, parameters).description or ()]
    return f"SELECT {', '.join(f'{c}::{types[c]} AS {c}' for c in columns)} FROM ({sql})"


def _load(client: bigquery.Client, table: str, path: Path) -> float:
    source_format = "PARQUET" if path.suffix == ".parquet" else "NEWLINE_DELIMITED_JSON"
    config = bigquery.LoadJobConfig(source_format=source_format, write_disposition="WRITE_APPEND")
    began_s = time.monotonic()
    with path.open("rb") as file:
        client.load_table_from_file(file, f"{DATASET}.{table}", job_config=config).result()
    return time.monotonic() - began_s


def _ask_all(client: bigquery.Client) -> tuple[dict[str, list[float]], dict[str, Any]]:
    runner = ReportRunner(client, DATASET, budgets_usd={"tenant-00": 100.0})
    question = ReportQuestion(SINCE, UNTIL, "Europe/Berlin")
    took_s: dict[str, list[float]] = {name: [] for name in reports()}
    lines = {}
    for _ in range(ROUNDS):
        for name, report in reports().items():
            began_s = time.monotonic()
            result = runner.run(report, question)
            took_s[name].append(time.monotonic() - began_s)
            lines[name] = len(result.rows)
    return took_s, {"seconds": took_s, "lines": lines}
