"""Writes rows as Parquet with DuckDB: from JSON lines, or by merging files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb

from infra.bigquery import schema, table_options

_SQL_TYPES = {
    "STRING": "VARCHAR",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "TIMESTAMP": "DOUBLE",
}
_MEMORY = "512MB"
_OPTIONS = "FORMAT parquet, COMPRESSION zstd"


def partition_column(table: str) -> str:
    """Returns the TIMESTAMP column whose UTC day determines a row's partition."""
    return str(table_options(table)["timePartitioning"]["field"])


class ParquetFiles(NamedTuple):
    """Files containing the rows from a set of lines."""

    whole: Path
    """A file containing all rows."""
    by_day: dict[str, Path]
    """The per-day files, keyed by day, such as `2026-11-23`."""


def parquet_of_lines(table: str, lines: Path, folder: Path) -> ParquetFiles:
    """Writes one Parquet file with all rows, and one per day. Duplicate rows are written once."""
    columns = {field["name"]: _SQL_TYPES[field["type"]] for field in schema(table)}
    read = f"read_json({_text(lines)}, format = 'newline_delimited', columns = {columns})"
    chosen = ", ".join(
        f'make_timestamptz(round("{name}" * 1e6)::BIGINT) AS "{name}"'
        if field["type"] == "TIMESTAMP"
        else f'"{name}"'
        for field in schema(table)
        for name in [field["name"]]
    )
    day = f"strftime(\"{partition_column(table)}\" AT TIME ZONE 'UTC', '%Y-%m-%d')"
    with _connect(folder) as connection:
        connection.execute(f"CREATE TABLE found AS SELECT DISTINCT {chosen} FROM {read}")
        days = connection.execute(f"SELECT DISTINCT {day} AS day FROM found ORDER BY day")
        files = {date: folder / f"{date}.parquet" for (date,) in days.fetchall()}
        for date, path in files.items():
            connection.execute(
                f"COPY (SELECT * FROM found WHERE {day} = ?) TO {_text(path)} ({_OPTIONS})", [date]
            )
        if len(files) == 1:
            return ParquetFiles(next(iter(files.values())), files)
        whole = folder / "whole.parquet"
        connection.execute(f"COPY found TO {_text(whole)} ({_OPTIONS})")
    return ParquetFiles(whole, files)


def merge(files: Sequence[Path], merged: Path) -> int:
    """Merges files, which may be from several releases, into one. Drops duplicate rows.

    Args:
        merged: file to write, in a folder where DuckDB may keep temporary files.
    """
    with _connect(merged.parent) as connection:
        connection.execute(
            f"COPY (SELECT DISTINCT * FROM {_read(files)}) TO {_text(merged)} ({_OPTIONS})"
        )
        (rows,) = connection.execute(f"SELECT count(*) FROM {_text(merged)}").fetchone() or (0,)
    return int(rows)


def count_different_rows(files: Sequence[Path]) -> int:
    """Returns the number of rows in these files, counting each row_id once."""
    if not files:
        return 0
    with _connect(files[0].parent) as connection:
        query = f"SELECT count(DISTINCT row_id) FROM {_read(files)}"
        (rows,) = connection.execute(query).fetchone() or (0,)
    return int(rows)


def _read(files: Sequence[Path]) -> str:
    return f"read_parquet([{', '.join(map(_text, files))}], union_by_name = true)"


def _connect(folder: Path) -> duckdb.DuckDBPyConnection:
    spilled = folder / "spilled"
    config = {"memory_limit": _MEMORY, "threads": 2, "temp_directory": str(spilled)}
    connection = duckdb.connect(config=config)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _text(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
