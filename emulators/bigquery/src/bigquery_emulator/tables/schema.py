"""Table schemas: the API's fields, and the DuckDB types that store them.

Used by everything that reads or writes a table. NUMERIC is DECIMAL(38, 9). A TIMESTAMP is a
TIMESTAMPTZ in the session's time zone, which is UTC. A DATETIME is a plain TIMESTAMP.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.tables.limits import NO_LIMITS, TypeLimits, parse_limits

Json = dict[str, Any]

_DUCKDB_TYPES = {
    "STRING": "VARCHAR",
    "BYTES": "BLOB",
    "INTEGER": "BIGINT",
    "FLOAT": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "TIMESTAMP": "TIMESTAMP WITH TIME ZONE",
    "DATETIME": "TIMESTAMP",
    "DATE": "DATE",
    "TIME": "TIME",
    "NUMERIC": "DECIMAL(38,9)",
    "JSON": "JSON",
}
# The API accepts the type names of both SQL dialects and returns the older ones.
_TYPE_NAMES = {
    **{name: name for name in (*_DUCKDB_TYPES, "RECORD")},
    "INT64": "INTEGER",
    "FLOAT64": "FLOAT",
    "BOOL": "BOOLEAN",
    "STRUCT": "RECORD",
    "DECIMAL": "NUMERIC",
}
_RESULT_TYPES = {
    "VARCHAR": "STRING",
    "BLOB": "BYTES",
    "TINYINT": "INTEGER",
    "SMALLINT": "INTEGER",
    "INTEGER": "INTEGER",
    "BIGINT": "INTEGER",
    "HUGEINT": "INTEGER",
    "UTINYINT": "INTEGER",
    "USMALLINT": "INTEGER",
    "UINTEGER": "INTEGER",
    "UBIGINT": "INTEGER",
    "UHUGEINT": "INTEGER",
    # GoogleSQL assigns a bare NULL the type INT64.
    '"NULL"': "INTEGER",
    "FLOAT": "FLOAT",
    "DOUBLE": "FLOAT",
    "BOOLEAN": "BOOLEAN",
    "TIMESTAMP WITH TIME ZONE": "TIMESTAMP",
    "TIMESTAMP": "DATETIME",
    "DATE": "DATE",
    "TIME": "TIME",
    "JSON": "JSON",
    "UUID": "STRING",
}
_MODES = ("NULLABLE", "REQUIRED", "REPEATED")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,299}")
_RESERVED = ("_PARTITIONTIME", "_PARTITIONDATE", "_TABLE_SUFFIX", "_FILE_NAME")
_UNSUPPORTED_KEYS = (
    "collation",
    "defaultValueExpression",
    "rangeElementType",
)


@dataclass(frozen=True)
class Field:
    """A column, or a field of a RECORD."""

    name: str
    type: str
    mode: str = "NULLABLE"
    fields: tuple["Field", ...] = ()
    description: str | None = None
    limits: TypeLimits = NO_LIMITS

    def resource(self) -> Json:
        """Returns the API's representation of the field, a TableFieldSchema."""
        resource: Json = {"name": self.name, "type": self.type, "mode": self.mode}
        resource |= self.limits.resource()
        if self.description is not None:
            resource["description"] = self.description
        if self.fields:
            resource["fields"] = [field.resource() for field in self.fields]
        return resource

    @property
    def element_type(self) -> str:
        """The DuckDB type for a single value, that is, without a REPEATED field's array."""
        if self.type == "RECORD":
            return f"STRUCT({', '.join(f'{quoted(f.name)} {f.duckdb_type}' for f in self.fields)})"
        return _DUCKDB_TYPES[self.type]

    @property
    def duckdb_type(self) -> str:
        return self.element_type + ("[]" if self.mode == "REPEATED" else "")

    def checks(self, within: str = "") -> list[str]:
        """Returns the DuckDB conditions on the column's values, including nested fields' values."""
        value = within + quoted(self.name)
        own = self.limits.check_sql(self.type, value)
        nested = [check for field in self.fields for check in field.checks(f"{value}.")]
        return ([] if own is None else [own]) + nested


Schema = tuple[Field, ...]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def parse_schema(fields: Sequence[Json]) -> Schema:
    """Parses a request's `schema.fields`.

    Raises:
        InvalidError: BigQuery rejects a name, type, or mode, or a name is used twice.
        UnsupportedError: this server does not support a type or an option.
    """
    schema = tuple(_parse_field(field) for field in fields)
    names: set[str] = set()
    for field in schema:
        name = field.name.lower()
        if name in names:
            raise InvalidError(f"Field {name} already exists in schema")
        names.add(name)
    return schema


def _parse_field(field: Json) -> Field:
    name = str(field.get("name", ""))
    if not _NAME.fullmatch(name) or name.upper().startswith(_RESERVED):
        raise InvalidError(f'Invalid field name "{name}".')
    kind = str(field.get("type", "")).upper()
    for key in _UNSUPPORTED_KEYS:
        if field.get(key):
            raise UnsupportedError(f"Field {name}: {key} is not supported by the embedded BigQuery")
    if kind in ("BIGNUMERIC", "BIGDECIMAL", "GEOGRAPHY", "INTERVAL", "RANGE", "FOREIGN"):
        raise UnsupportedError(
            f"Field {name}: type {kind} is not supported by the embedded BigQuery"
        )
    if kind not in _TYPE_NAMES:
        raise InvalidError(f"Invalid value for type: {kind} is not a valid value")
    mode = str(field.get("mode") or "NULLABLE").upper()
    if mode not in _MODES:
        raise InvalidError(f"Invalid value for mode: {mode} is not a valid value")
    limits = parse_limits(field, name, _TYPE_NAMES[kind], mode == "REPEATED")
    nested = parse_schema(field.get("fields") or ())
    if (_TYPE_NAMES[kind] == "RECORD") != bool(nested):
        raise InvalidError(
            f"Field {name} is type RECORD but has no schema"
            if not nested
            else f"Field {name}: only a RECORD can have fields"
        )
    parsed = Field(name, _TYPE_NAMES[kind], mode, nested, field.get("description"), limits)
    if mode == "REPEATED" and parsed.checks():
        raise UnsupportedError(
            f"Field {name}: type parameters in an array are not supported by the embedded BigQuery"
        )
    return parsed


def result_schema(columns: Sequence[tuple[str, Any]]) -> Schema:
    """Returns a query result's schema.

    Args:
        columns: each column's name and DuckDB type object.

    Raises:
        InvalidError: a name occurs twice.
        UnsupportedError: BigQuery's results can't contain one of the types, or this server does not
            support it.
    """
    seen: set[str] = set()
    for name, _ in columns:
        if name.lower() in seen:
            raise InvalidError(
                "Duplicate column names in the result are not supported. Found duplicate(s):"
                f" {name}",
                "query",
            )
        seen.add(name.lower())
    return tuple(_result_field(name, kind) for name, kind in columns)


def _result_field(name: str, kind: Any) -> Field:
    if kind.id == "list":
        inner = _result_field(name, kind.child)
        if inner.mode == "REPEATED":
            raise InvalidError(
                "Cannot construct array with element type ARRAY because nested arrays are not"
                " supported"
            )
        return replace(inner, mode="REPEATED")
    if kind.id == "struct":
        nested = tuple(_result_field(child, child_kind) for child, child_kind in kind.children)
        return Field(name, "RECORD", fields=nested)
    if kind.id == "decimal":
        return Field(name, "NUMERIC")
    type_name = _RESULT_TYPES.get(str(kind))
    if type_name is None:
        raise UnsupportedError(
            f"Column {name}: a result of type {kind} is not supported by the embedded BigQuery"
        )
    return Field(name, type_name)


def widened(old: Schema, new: Schema, path: str = "") -> list[Field]:
    """Checks that one schema may replace another in tables.update and loads.

    Args:
        new: the new fields, which must include all of the old ones.
        path: the record that contains the fields, for the message.

    Returns:
        Columns of `new` that do not exist yet or whose DuckDB type differs.

    Raises:
        InvalidError: a field is missing, has a different type, or has become stricter.
    """
    wanted = {field.name.lower(): field for field in new}
    changed: list[Field] = []
    for field in old:
        match = wanted.pop(field.name.lower(), None)
        if match is None:
            raise InvalidError(
                f"Provided Schema does not match. Field {path}{field.name} is missing in new schema"
            )
        if match.type != field.type:
            raise InvalidError(
                f"Provided Schema does not match. Field {path}{field.name} has changed type from"
                f" {field.type} to {match.type}"
            )
        if match.mode != field.mode and (field.mode, match.mode) != ("REQUIRED", "NULLABLE"):
            raise InvalidError(
                f"Provided Schema does not match. Field {path}{field.name} has changed mode from"
                f" {field.mode} to {match.mode}"
            )
        widened(field.fields, match.fields, f"{path}{field.name}.")
        _check_limits(field, match, path)
        if (match.duckdb_type, match.mode, match.checks()) != (
            field.duckdb_type,
            field.mode,
            field.checks(),
        ):
            changed.append(match)
    for field in wanted.values():
        if field.mode == "REQUIRED":
            raise InvalidError(
                f"Provided Schema does not match. Cannot add required field {path}{field.name}"
            )
        changed.append(field)
    return changed


def _check_limits(old: Field, new: Field, path: str) -> None:
    if not new.limits.holds(old.limits):
        raise InvalidError(
            f"Provided Schema does not match. Field {path}{old.name} has changed type from "
            f"{old.type}{old.limits.sql} to {new.type}{new.limits.sql}, which is narrower"
        )


def alterations(physical: str, field: Field, exists: bool) -> list[str]:
    """Returns the DuckDB statements that add a column to a physical table or widen a column."""
    name = quoted(field.name)
    if not exists:
        default = " DEFAULT []" if field.mode == "REPEATED" else ""
        return [f"ALTER TABLE {physical} ADD COLUMN {name} {field.duckdb_type}{default}"]
    statements = [f"ALTER TABLE {physical} ALTER COLUMN {name} TYPE {field.duckdb_type}"]
    if field.mode == "NULLABLE":
        statements.append(f"ALTER TABLE {physical} ALTER COLUMN {name} DROP NOT NULL")
    return statements
