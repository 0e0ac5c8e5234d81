"""Detects a schema from a file's rows, for loads with `autodetect`."""

import re
from collections.abc import Iterable
from typing import Any

from bigquery_emulator.errors import InvalidError
from bigquery_emulator.tables.schema import Field, Json, Schema, parse_schema
from bigquery_emulator.tables.values import BadValueError, canonical_scalar

_INTEGER = re.compile(r"[-+]?\d{1,19}")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?")
# Narrowest first: the first type that matches all values is used.
_TEXT_TYPES = ("DATE", "TIMESTAMP")


def detect_schema(rows: Iterable[Json]) -> Schema:
    """Returns fields that match all rows.

    Args:
        rows: JSON objects, or a CSV file's cells keyed by column.

    Raises:
        InvalidError: there are no rows, or a column's name is not valid.
    """
    fields = _fields(rows)
    if not fields:
        raise InvalidError("Schema has no fields: the file used to detect them is empty.")
    return parse_schema([field.resource() for field in fields])


def _fields(rows: Iterable[Json]) -> Schema:
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return tuple(_field(name, values) for name, values in columns.items())


def _field(name: str, values: list[Any]) -> Field:
    present = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in present):
        items = [
            item for value in present for item in (value if isinstance(value, list) else [value])
        ]
        inner = _field(name, items)
        return Field(name, inner.type, "REPEATED", inner.fields)
    if any(isinstance(value, dict) for value in present):
        return Field(
            name, "RECORD", fields=_fields(value for value in present if isinstance(value, dict))
        )
    return Field(name, _scalar_type(present))


def _scalar_type(values: list[Any]) -> str:
    kinds = {_kind(value) for value in values}
    if kinds <= {"INTEGER", "FLOAT"} and kinds:
        return "FLOAT" if "FLOAT" in kinds else "INTEGER"
    if len(kinds) == 1:
        return kinds.pop()
    return "TIMESTAMP" if kinds == {"DATE", "TIMESTAMP"} else "STRING"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "INTEGER"
    if isinstance(value, float):
        return "FLOAT"
    if value.lower() in ("true", "false"):
        return "BOOLEAN"
    if _INTEGER.fullmatch(value):
        return "INTEGER"
    if _FLOAT.fullmatch(value):
        return "FLOAT"
    for kind in _TEXT_TYPES:
        try:
            canonical_scalar(kind, value)
        except BadValueError:
            continue
        return kind
    return "STRING"
