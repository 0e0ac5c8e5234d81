"""Writes a report as a Parquet file, with its column types."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shared.errors import BadInput
from shared.reports.runner import ReportResult

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


def report_parquet(result: ReportResult) -> bytes:
    """Returns a Parquet file with the rows exactly as in the result. Timestamps are in UTC.

    Raises:
        BadInput: DuckDB, which writes the file, is not installed.
    """
    try:
        # Imported only when needed, because it takes 26 MB of memory.
        import duckdb
    except ImportError:
        raise BadInput("format: parquet requires the `api` extra", field="format") from None
    columns = ", ".join(
        'unnest(?::{}[]) AS "{}"'.format(_DUCKDB_TYPES[type_], name.replace('"', '""'))
        for name, type_ in result.columns
    )
    values = [[row[at] for row in result.rows] for at in range(len(result.columns))]
    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={"threads": 1}) as connection,
    ):
        path = Path(folder) / "result.parquet"
        connection.execute(f"COPY (SELECT {columns}) TO ? (FORMAT parquet)", [*values, str(path)])
        return path.read_bytes()
