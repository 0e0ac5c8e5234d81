"""Writes what a report says as a text table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.text_table import table
from shared.errors import BadInput
from shared.reports.invoice import plain_cell
from shared.reports.runner import ReportResult

Formatted = Callable[[Sequence[ReportResult]], bytes]
_DUCKDB_TYPES = {
    "STRING": "VARCHAR",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "DATE": "DATE",
    "DATETIME": "TIMESTAMP",
    "TIMESTAMP": "TIMESTAMPTZ",
    "NUMERIC": "DECIMAL(38, 9)",
}


def as_text(results: Sequence[ReportResult]) -> bytes:
    """Aligned tables, with titles if there are several."""
    parts = []
    for result in results:
        shown = table(result.heads, result.rows) if result.rows else _nothing(result)
        parts.append(shown if len(results) == 1 else f"{result.report.title}\n\n{shown}\n")
    return ("\n".join(parts) + "\n").encode()


def _nothing(result: ReportResult) -> str:
    since, until = result.question[:2]
    return f"no rows from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"


def as_json(results: Sequence[ReportResult]) -> bytes:
    """The rows as objects. Of several reports an object by their names.

    Times and decimals, which JSON does not have, become strings.
    """
    shown: Any = {result.report.name: result.records() for result in results}
    if len(results) == 1:
        (shown,) = shown.values()
    return (json.dumps(shown, indent=2, default=str) + "\n").encode()


def as_csv(results: Sequence[ReportResult]) -> bytes:
    """CSV (RFC 4180) of one report. NULL is an empty cell.

    Raises:
        BadInput: there are several.
    """
    result = _only(results, "csv")
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(result.heads)
    writer.writerows([_cell(value) for value in row] for row in result.rows)
    return file.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return plain_cell(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


def as_parquet(results: Sequence[ReportResult]) -> bytes:
    """Parquet of one report, with its types.

    Raises:
        BadInput: there are several, or DuckDB, which writes it, is not installed.
    """
    result = _only(results, "parquet")
    try:
        import duckdb
    except ImportError:
        raise BadInput("format: parquet needs the `local` extra", field="format") from None
    columns = ", ".join(
        '"{}" {}'.format(column.name.replace('"', '""'), _DUCKDB_TYPES[column.type])
        for column in result.columns
    )
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE result ({columns})")
        if result.rows:
            places = ", ".join("?" for _ in result.columns)
            connection.executemany(f"INSERT INTO result VALUES ({places})", list(result.rows))
        path = Path(folder) / "result.parquet"
        connection.execute("COPY result TO ? (FORMAT parquet)", [str(path)])
        return path.read_bytes()


def _only(results: Sequence[ReportResult], format_: str) -> ReportResult:
    if len(results) != 1:
        raise BadInput(f"format: {format_} is for one report; name it", field="format")
    return results[0]


FORMATS: Mapping[str, Formatted] = {
    "table": as_text,
    "csv": as_csv,
    "json": as_json,
    "parquet": as_parquet,
}
"""Writers by the word after --format. The page is in infra/reports/page.py."""
