"""Creates, fills, widens, and rebuilds the DuckDB tables behind BigQuery tables.

The catalog calls this module in its transactions. DuckDB's errors about rows are converted here.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import duckdb

from bigquery_emulator.duckdb_words import message_of
from bigquery_emulator.errors import InvalidError
from bigquery_emulator.store import Cursor
from bigquery_emulator.tables.resources import PARTITION_TIME, TableResource
from bigquery_emulator.tables.schema import Schema, alterations, quoted

_NOT_NULL = re.compile(r"NOT NULL constraint failed: \w+\.(\w+)")
_CHECK = re.compile(r"CHECK constraint failed on table .* with expression CHECK\((.*)\)")


def create(cursor: Cursor, table: TableResource) -> None:
    cursor.execute(f"CREATE TABLE {table.physical} ({table.columns_sql()})")


def fill(
    cursor: Cursor,
    table: TableResource,
    given: Schema,
    source: str,
    partition_time: str | None = None,
) -> None:
    """Adds rows to a table.

    Args:
        given: the table's fields, except any that the rows lack.
        source: the DuckDB table or parenthesized query that contains the rows.
        partition_time: the DuckDB SQL for the rows' ingestion time. None: now.

    Raises:
        InvalidError: a value is NULL where that is not allowed, or exceeds its type's limits.
    """
    limits = {field.name.lower(): field.limits for field in table.schema}
    names = [quoted(field.name) for field in given]
    values = [
        limits[field.name.lower()].stored_sql(quoted(field.name))
        if field.name.lower() in limits
        else quoted(field.name)
        for field in given
    ]
    if partition_time is not None:
        names.append(quoted(PARTITION_TIME))
        values.append(partition_time)
    with accepted():
        cursor.execute(
            f"INSERT INTO {table.physical} ({', '.join(names)})"
            f" SELECT {', '.join(values)} FROM {source}"
        )


def alter(cursor: Cursor, old: TableResource, new: TableResource, changed: Schema) -> None:
    """Adds columns to a DuckDB table or widens existing ones.

    Args:
        old: the table before the change.
        new: the table with its new schema.
        changed: fields in `new` that differ.

    Raises:
        InvalidError: a row does not match.
    """
    if old.view_query is None and not old.schema and new.schema:
        # Adds the table's first fields, which may be REQUIRED because there are no rows.
        rebuild(cursor, old, new, {})
        return
    if any(field.checks() for field in (*old.schema, *changed)):
        # DuckDB can neither add a column with a CHECK constraint nor change one.
        old_names = {field.name.lower() for field in old.schema}
        same = {f.name: quoted(f.name) for f in new.schema if f.name.lower() in old_names}
        rebuild(cursor, old, new, same)
        return
    known = {field.name.lower() for field in old.schema}
    for field in changed:
        for statement in alterations(new.physical, field, field.name.lower() in known):
            cursor.execute(statement)


def rebuild(
    cursor: Cursor, old: TableResource, new: TableResource, sources: Mapping[str, str]
) -> None:
    """Rebuilds a DuckDB table, keeping its rows in the same order.

    Args:
        cursor: a session in a transaction.
        old: the table before the change.
        new: the same table with a different schema.
        sources: DuckDB SQL over the old columns, keyed by column name. A column without SQL is
            NULL, or an empty array.

    Raises:
        InvalidError: a row does not match the new schema.
    """
    values = dict(sources)
    if new.has_partition_time:
        values[PARTITION_TIME] = quoted(PARTITION_TIME)
    fresh = f"{new.physical}_new"
    cursor.execute(f"CREATE TABLE {fresh} ({new.columns_sql()})")
    names = ", ".join(quoted(name) for name in values)
    if values:
        with accepted():
            cursor.execute(
                f"INSERT INTO {fresh} ({names}) SELECT {', '.join(values.values())}"
                f" FROM {old.physical} ORDER BY rowid"
            )
    cursor.execute(f"DROP TABLE {old.physical}")
    cursor.execute(f"ALTER TABLE {fresh} RENAME TO {new.physical.rpartition('.')[2]}")


@contextmanager
def accepted() -> Iterator[None]:
    """Converts DuckDB's errors about rows to the service's.

    Raises:
        InvalidError: a value is NULL, exceeds its type's limits, or has the wrong type.
    """
    try:
        yield
    except (duckdb.ConstraintException, duckdb.ConversionException) as error:
        raise InvalidError(refusal(error)) from error


def refusal(error: duckdb.Error) -> str:
    """Returns the reason why a row was rejected, including the column's name."""
    text = str(error).split("\n")[0]
    if match := _NOT_NULL.search(text):
        return f"Required field {match.group(1)} cannot be null"
    if match := _CHECK.search(text):
        return f"A value is outside the limits of its column's type: {match.group(1)}"
    return message_of(error)
