"""Moves rows in and out of DuckDB: inserts canonical rows and reads pages in wire format.

The wire format is `{"f": [{"v": ...}]}` with every scalar as text. Source:
https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/tabledata/list
"""

import base64
import json
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.store import Cursor
from bigquery_emulator.tables.resources import PARTITION_TIME
from bigquery_emulator.tables.schema import Field, Json, Schema, quoted

_EPOCH = datetime(1970, 1, 1)


def insert_rows(
    cursor: Cursor,
    physical: str,
    schema: Schema,
    rows: Sequence[Json],
    partition_time: str | None = None,
) -> None:
    """Inserts rows in one statement, which is many times faster than one statement per row.

    Args:
        partition_time: the DuckDB SQL for the rows' ingestion time. None: now.
    """
    structure = json.dumps([{field.name: _structure(field) for field in schema}])
    names = ", ".join(quoted(field.name) for field in schema)
    values = ", ".join(f"CAST(r.{quoted(field.name)} AS {field.duckdb_type})" for field in schema)
    if partition_time is not None:
        names += f", {quoted(PARTITION_TIME)}"
        values += f", {partition_time}"
    cursor.execute(
        f"INSERT INTO {physical} ({names}) SELECT {values} FROM"
        " (SELECT unnest(from_json(CAST(? AS VARCHAR),"
        f" '{structure.replace(chr(39), chr(39) * 2)}')) AS r)",
        [msgspec.json.encode(rows).decode()],
    )


def _structure(field: Field) -> Any:
    if field.type == "RECORD":
        inner: Any = {nested.name: _structure(nested) for nested in field.fields}
    else:
        # BYTES are strings here; the cast, which handles the escapes, converts them.
        inner = "VARCHAR" if field.type == "BYTES" else field.element_type
    return [inner] if field.mode == "REPEATED" else inner


def read_rows(
    cursor: Cursor, physical: str, schema: Schema, start: int, count: int, is_micros: bool
) -> list[Json]:
    """Returns a page of rows in wire format, in the order in which they were written.

    Args:
        start: index of the first row, from 0.
        is_micros: True to return TIMESTAMPs as whole microseconds instead of as seconds in a float.
    """
    page = f"{physical} ORDER BY rowid LIMIT {int(count)} OFFSET {int(start)}"
    return _read(cursor, page, schema, is_micros)


def read_all_rows(cursor: Cursor, physical: str, schema: Schema, is_micros: bool) -> list[Json]:
    """Like `read_rows`, for a whole table.

    For a whole table, DuckDB preserves the order on its own, which is faster.
    """
    return _read(cursor, physical, schema, is_micros)


def _read(cursor: Cursor, source: str, schema: Schema, is_micros: bool) -> list[Json]:
    if not schema:
        return []
    columns = readable_columns(schema, [quoted(field.name) for field in schema])
    return wire_rows(
        schema, cursor.execute(f"SELECT {columns} FROM {source}").fetchall(), is_micros
    )


def readable_columns(schema: Schema, names: Sequence[str]) -> str:
    """Returns DuckDB SQL for columns, using types that DuckDB's Python client can return.

    Args:
        names: column names, quoted where necessary.
    """
    return ", ".join(
        # DuckDB's client needs pytz for a TIMESTAMPTZ, but not for the same time without a time
        # zone.
        f"CAST(CAST({name} AS {field.duckdb_type}) AS {plain})"
        if (plain := field.duckdb_type.replace("TIMESTAMP WITH TIME ZONE", "TIMESTAMP"))
        != field.duckdb_type
        else f"CAST({name} AS {plain})"
        for name, field in zip(names, schema, strict=True)
    )


def wire_rows(schema: Schema, values: Sequence[tuple[Any, ...]], is_micros: bool) -> list[Json]:
    """Returns rows in the wire format.

    Args:
        values: the values, row by row, as DuckDB's Python client returns them for
            `readable_columns`.
        is_micros: see `read_rows`.
    """
    # Done column by column, so that each type's formatter is selected only once.
    columns_found = zip(*values, strict=True)
    written = [
        _wire_column(field, column, is_micros)
        for field, column in zip(schema, columns_found, strict=False)
    ]
    return [{"f": [{"v": value} for value in row]} for row in zip(*written, strict=True)]


def _wire_column(field: Field, values: Sequence[Any], is_micros: bool) -> list[Any]:
    """Returns a column's values in the wire format."""
    text = _TEXTS.get(field.type) if field.mode != "REPEATED" else None
    if text is None:
        return [wire_value(field, value, is_micros) for value in values]
    return [None if value is None else text(value) for value in values]


def wire_value(field: Field, value: Any, is_micros: bool) -> Any:
    """Returns a value in the wire format.

    Args:
        value: as returned by DuckDB's Python client.
        is_micros: see `read_rows`.
    """
    if field.mode == "REPEATED":
        return [{"v": _single(field, item, is_micros)} for item in value or []]
    return _single(field, value, is_micros)


def _single(field: Field, value: Any, is_micros: bool) -> Any:
    if value is None:
        return None
    if isinstance(value, str) and field.type in ("TIMESTAMP", "DATETIME", "DATE"):
        # DuckDB supports times that neither Python nor BigQuery supports, and it returns them as
        # strings.
        raise InvalidQueryError(f"Field {field.name}: {value} is out of range for {field.type}")
    if field.type == "RECORD":
        parts = value.values() if isinstance(value, dict) else value
        return {
            "f": [
                {"v": wire_value(inner, part, is_micros)}
                for inner, part in zip(field.fields, parts, strict=True)
            ]
        }
    match field.type:
        case "BOOLEAN":
            return "true" if value else "false"
        case "FLOAT":
            return _float_text(value)
        case "TIMESTAMP":
            return _timestamp_text(value, is_micros)
        case "DATETIME":
            return value.isoformat()
        case "BYTES":
            return base64.b64encode(value).decode()
        case "NUMERIC":
            return _numeric_text(value)
        case _:
            return str(value)


def _float_text(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_TEXTS: dict[str, Callable[[Any], str]] = {
    "STRING": str,
    "INTEGER": str,
    "FLOAT": _float_text,
}
"""How to format types whose values need no further checks."""


def _timestamp_text(value: datetime, is_micros: bool) -> str:
    since = value.replace(tzinfo=None) - _EPOCH
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    if is_micros:
        return str(micros)
    digits, exponent = f"{micros / 1_000_000:.15E}".split("E")
    return f"{digits}E{int(exponent)}"


def _numeric_text(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_sql(schema: Schema) -> str:
    """Returns SQL for a row's logical size in bytes, as BigQuery counts it for billing.

    Source:
        https://docs.cloud.google.com/bigquery/docs/reference/standard-sql/data-types#data_type_sizes
    """
    return " + ".join(_size(quoted(field.name), field) for field in schema) or "0"


def _size(name: str, field: Field) -> str:
    if field.mode == "REPEATED":
        if field.type in _WIDTHS:
            return f"coalesce(len({name}) * {_WIDTHS[field.type]}, 0)"
        # For a string of unknown length inside an array or record, the size of its JSON is close
        # enough.
        return f"coalesce(strlen(CAST(to_json({name}) AS VARCHAR)), 0)"
    if field.type == "RECORD":
        return f"coalesce(strlen(CAST(to_json({name}) AS VARCHAR)), 0)"
    if field.type in _WIDTHS:
        return f"CASE WHEN {name} IS NULL THEN 0 ELSE {_WIDTHS[field.type]} END"
    length = (
        f"octet_length({name})" if field.type == "BYTES" else f"strlen(CAST({name} AS VARCHAR))"
    )
    return f"coalesce(2 + {length}, 0)"


_WIDTHS = {
    "INTEGER": 8,
    "FLOAT": 8,
    "BOOLEAN": 1,
    "TIMESTAMP": 8,
    "DATETIME": 8,
    "DATE": 8,
    "TIME": 8,
    "NUMERIC": 16,
}
