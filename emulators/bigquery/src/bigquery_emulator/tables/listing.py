"""Rows that the server itself generates, such as INFORMATION_SCHEMA, to be queried as a table."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bigquery_emulator.tables.schema import Field, Schema, quoted

Row = tuple[Any, ...]


def fields(text: str) -> Schema:
    """Parses a schema: `name` is a STRING, and `name:INTEGER` has an explicit type."""
    named = [word.partition(":") for word in text.split()]
    return tuple(Field(name, kind or "STRING") for name, _, kind in named)


@dataclass(frozen=True)
class Listing:
    """Rows with a schema. A TIMESTAMP is in milliseconds since 1970; a record is a tuple."""

    schema: Schema
    rows: list[Row]

    @property
    def json(self) -> str:
        """The rows in the format that DuckDB's from_json reads."""
        records = [_record(self.schema, row) for row in self.rows]
        return json.dumps(records, ensure_ascii=False)

    @property
    def structure(self) -> str:
        """The rows' type, in the format that from_json uses."""
        return json.dumps([{field.name: field.duckdb_type for field in self.schema}])

    def sql(self) -> str:
        """Returns the DuckDB SQL that goes after FROM, without an alias."""
        columns = ", ".join(f"r.{quoted(field.name)}" for field in self.schema)
        rows, structure = (text.replace("'", "''") for text in (self.json, self.structure))
        return f"(SELECT {columns} FROM (SELECT unnest(from_json('{rows}', '{structure}')) AS r))"


def _record(schema: Schema, row: Row) -> dict[str, Any]:
    return {field.name: _value(field, value) for field, value in zip(schema, row, strict=True)}


def _value(field: Field, value: Any) -> Any:
    if value is None:
        return [] if field.mode == "REPEATED" else None
    if field.mode == "REPEATED":
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: Field, value: Any) -> Any:
    if field.type == "RECORD":
        return _record(field.fields, value)
    if field.type == "TIMESTAMP":
        return datetime.fromtimestamp(value / 1_000, UTC).isoformat(" ")
    return value
