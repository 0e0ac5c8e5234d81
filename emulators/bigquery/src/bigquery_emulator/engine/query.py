"""Runs translated statements on DuckDB: queries store results in memory, changes write to `data`.

This layer sits between a job and the store. Everything here blocks, so it runs in one of the
server's threads.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import duckdb

from bigquery_emulator.duckdb_words import in_googlesql
from bigquery_emulator.errors import (
    BytesBilledError,
    InvalidQueryError,
    StoppedError,
    UnsupportedError,
    as_service_error,
    is_unavailable,
)
from bigquery_emulator.googlesql.parameters import values_in
from bigquery_emulator.googlesql.translate import Statement
from bigquery_emulator.store import Cursor, Store
from bigquery_emulator.tables.physical import refusal
from bigquery_emulator.tables.resources import TableResource
from bigquery_emulator.tables.rows import readable_columns, size_sql
from bigquery_emulator.tables.schema import Schema, quoted

_MIB = 1024 * 1024
_LEAST_BILLED_BYTES = 10 * _MIB
_KEPT_SIZES = 256
_MOST_FEW_ROWS = 1_000
_MOST_FEW_BYTES = 256 * 1024
"""Maximum size of a result held in Python. The results of the last 1,000 jobs are kept."""
_FIRST_ROWS = 10
_MOST_ROWS_READ_TWICE = 100_000
_RAISED = re.compile(r"[\"']bq: (.*)[\"'](?: to INT32|, expected format)", re.DOTALL)
"""The error from a macro: a failed cast."""
_RAISED_AS_IT_IS = re.compile(r"(?:executing the UDF: \w+|Input Error): bq: (.*)", re.DOTALL)
"""An error raised by a Python function or by the ERROR function."""
_UNKNOWN_ZONE = re.compile(r"Unknown TimeZone '(?:bq: (.*embedded BigQuery)|(.*?))'!", re.DOTALL)
"""A macro rejected a time zone that is invalid or that DuckDB does not support."""
_UNKNOWN_COLUMN = re.compile(r'Referenced (?:column|table) "([^"]+)" not found')
# Called with the session that is about to run, so that it can be interrupted.
OnCursor = Callable[[Cursor], None]


@dataclass(frozen=True)
class Result:
    """A query's rows: large results are in a DuckDB table until `drop`, small ones in `values`.

    `values` are as DuckDB's Python client returns them, for `rows.wire_rows`.
    """

    schema: Schema
    rows: int
    physical: str = ""
    values: Sequence[tuple[Any, ...]] = ()


@dataclass(frozen=True)
class ReadSize:
    """The size of a statement's input, counting whole tables: columns' logical bytes, and rows."""

    size_bytes: int = 0
    rows: int = 0


class Queries:
    """Runs statements."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._size = lru_cache(_KEPT_SIZES)(self._counted)

    def select(self, statement: Statement, on_cursor: OnCursor) -> Result:
        """Runs a query and stores its rows.

        Args:
            on_cursor: called with the session before the query runs.

        Raises:
            InvalidQueryError: the query fails, at the start or later.
            StoppedError: the session was interrupted.
        """
        # A query that turns out to have too many rows for Python runs twice, so this step is
        # skipped if that is known in advance or if the query reads a lot.
        most = _MOST_FEW_ROWS if statement.gives_all else _MOST_ROWS_READ_TWICE
        if self.read_size(statement).rows <= most:
            values = self.few_rows(statement, on_cursor)
            if values is not None:
                return Result(statement.schema, len(values), values=values)
        return self.select_into_table(statement, on_cursor)

    def few_rows(self, statement: Statement, on_cursor: OnCursor) -> list[tuple[Any, ...]] | None:
        """Returns a query's rows, or None if there are too many to hold in Python. See `select`."""
        columns = [f"c{number}" for number in range(len(statement.schema))]
        named = f"({statement.sql}) AS r({', '.join(columns)})"
        query = f"SELECT {readable_columns(statement.schema, columns)} FROM {named}"
        values: list[tuple[Any, ...]] = []
        size_bytes = 0
        with _translated(statement), self._store.reading() as cursor:
            on_cursor(cursor)
            # Rows are read as they are produced, so if there are too many, closing the session ends
            # the query.
            rows = cursor.execute(query, values_in(statement.sql, statement.values))
            count = _FIRST_ROWS  # a single row may be large
            while some := rows.fetchmany(count):
                values += some
                size_bytes += sum(map(_size_bytes, some))
                if len(values) > _MOST_FEW_ROWS or size_bytes > _MOST_FEW_BYTES:
                    return None
                count = 2 * len(values)
        return values

    def select_into_table(self, statement: Statement, on_cursor: OnCursor) -> Result:
        """Runs a query and stores its rows in a table, which will be copied into another table.

        See `select`.
        """
        schema = statement.schema
        physical = f"memory.main.r{next(self._numbers)}"
        with _translated(statement), self._store.reading() as cursor:
            on_cursor(cursor)
            columns = ", ".join(f"{quoted(field.name)} {field.duckdb_type}" for field in schema)
            cursor.execute(f"CREATE TABLE {physical} ({columns})")
            try:
                values = values_in(statement.sql, statement.values)
                (rows,) = cursor.execute(
                    f"INSERT INTO {physical} {statement.sql}", values
                ).fetchone()
            except BaseException:
                cursor.execute(f"DROP TABLE {physical}")
                raise
        return Result(schema, rows, physical)

    def stage(self, schema: Schema) -> str:
        """Creates an empty in-memory table for incoming rows. Returns its DuckDB name."""
        physical = f"memory.main.r{next(self._numbers)}"
        with self._store.reading() as cursor:
            columns = ", ".join(f"{quoted(field.name)} {field.duckdb_type}" for field in schema)
            cursor.execute(f"CREATE TABLE {physical} ({columns})")
        return physical

    def drop(self, physical: str) -> None:
        """Drops a table created by `select_into_table` or `stage`."""
        with self._store.reading() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {physical}")

    def manipulate(self, statement: Statement, on_cursor: OnCursor) -> int:
        """Runs an INSERT, UPDATE, DELETE, or MERGE statement.

        Must be called in the server's writer thread.

        Returns:
            The number of rows inserted, changed or removed.

        Raises:
            InvalidQueryError: the statement failed and changed nothing.
            StoppedError: the session was interrupted.
        """
        # Checks and changes see the same snapshot of the data, which matters because rows are
        # streamed concurrently.
        with _translated(statement), self._store.transaction() as cursor:
            on_cursor(cursor)
            for check in statement.checks:
                cursor.execute(check, values_in(check, statement.values)).fetchall()
            values = values_in(statement.sql, statement.values)
            (rows,) = cursor.execute(statement.sql, values).fetchone()
        return int(rows)

    def read_size(self, statement: Statement) -> ReadSize:
        """Returns how much a statement reads from the columns it names.

        BigQuery counts only partitions that match the filter, so this is an upper bound.
        """
        changes = self._store.changes
        sizes = [
            self._size(table.physical, size_sql(_read_fields(statement, table)), changes)
            for table in statement.tables
        ]
        return ReadSize(sum(size.size_bytes for size in sizes), sum(size.rows for size in sizes))

    def _counted(self, physical: str, row_bytes: str, changes: int) -> ReadSize:
        """Measures a table's columns. `changes` identifies the data version."""
        with self._store.reading() as cursor:
            query = f"SELECT coalesce(sum({row_bytes}), 0), count(*) FROM {physical}"
            size_bytes, rows = cursor.execute(query).fetchone()
            return ReadSize(int(size_bytes), int(rows))


def check_billed(read_bytes: int, limit_bytes: int | None) -> int:
    """Returns the bytes BigQuery would bill: whole MiB, and at least ten if a table is read.

    Args:
        read_bytes: logical bytes read.
        limit_bytes: the job's `maximumBytesBilled`.

    Raises:
        BytesBilledError: the limit is lower than the number of bytes billed.
    """
    billed = max(-(-read_bytes // _MIB) * _MIB, _LEAST_BILLED_BYTES) if read_bytes else 0
    if limit_bytes is not None and billed > limit_bytes:
        raise BytesBilledError(
            f"Query exceeded limit for bytes billed: {limit_bytes}. {billed} or higher required."
        )
    return billed


def table_size(cursor: Cursor, table: TableResource) -> tuple[int, int]:
    """Returns a table's row count and the logical bytes of its rows."""
    if table.view_query is not None:
        return 0, 0
    query = f"SELECT count(*), coalesce(sum({size_sql(table.schema)}), 0) FROM {table.physical}"
    rows, size_bytes = cursor.execute(query).fetchone()
    return int(rows), int(size_bytes)


def _size_bytes(value: Any) -> int:
    """Returns the approximate amount of memory that a value or row takes up."""
    if isinstance(value, str | bytes):
        return 50 + len(value)
    if isinstance(value, dict):
        return 200 + sum(map(_size_bytes, value.values()))
    return 50 + sum(map(_size_bytes, value)) if isinstance(value, list | tuple) else 30


def _read_fields(statement: Statement, table: TableResource) -> Schema:
    columns = statement.columns[table.number]
    return tuple(field for field in table.schema if field.name.lower() in columns)


@contextmanager
def _translated(statement: Statement) -> Iterator[None]:
    """Converts DuckDB's errors to the service's errors, using BigQuery's names."""
    try:
        yield
    except duckdb.InterruptException as error:
        raise StoppedError("Job execution was cancelled: User requested cancellation") from error
    except duckdb.NotImplementedException as error:
        if match := _UNKNOWN_ZONE.search(str(error)):
            if match.group(1) is not None:
                raise UnsupportedError(match.group(1), "query") from error
            raise InvalidQueryError(f"Invalid time zone: {match.group(2)}") from error
        raise UnsupportedError(
            f"Not supported by the embedded BigQuery: {_clean_message(error, statement)}"
        ) from error
    except UnicodeDecodeError as error:
        # DuckDB cut its message off in the middle of a character.
        message = duckdb.Error(error.object.decode("utf-8", "replace"))
        raise InvalidQueryError(_clean_message(message, statement)) from error
    except duckdb.Error as error:
        if is_unavailable(error):
            raise as_service_error(error) from error
        raise InvalidQueryError(_clean_message(error, statement)) from error


def _clean_message(error: Exception, statement: Statement) -> str:
    text = str(error)
    if match := _RAISED.search(text) or _RAISED_AS_IT_IS.search(text):
        return match.group(1)
    if match := _UNKNOWN_COLUMN.search(text):
        return f"Unrecognized name: {match.group(1)}"
    if isinstance(error, duckdb.ConstraintException):
        return refusal(error)
    text = re.sub(r"^[A-Z]\w*(?: \w+)* Error: ", "", text.split("\n")[0])
    for table in statement.tables:
        name = str(table.key).replace(":", ".")
        text = re.sub(rf"\b(?:data\.main\.)?t{table.number}\b", name, text)
    return in_googlesql(text)
