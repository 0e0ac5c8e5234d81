"""Query parameters: types for the analyzer, and typed placeholders for DuckDB."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.analyzer import ParameterTypes
from bigquery_emulator.googlesql.analysis.types import (
    duckdb_type,
    struct_field_names,
    type_of_parameter,
)
from bigquery_emulator.tables.schema import Json, parse_schema, quoted
from bigquery_emulator.tables.values import BadValueError, canonical_scalar, decode_base64

_PLACEHOLDER = re.compile(r"\$(bq_(?:zone_)?\d+)\b")
_PLAIN_ZONE = re.compile(r"UTC|(?!SystemV|Canada)[A-Z][a-z]+/[A-Z][A-Za-z_]+")


@dataclass
class Parameters:
    """A statement's parameters.

    `types` are for the analyzer. `sql` contains the DuckDB SQL for each parameter, keyed by
    lowercase name or by position from 1. `values` are the values for the placeholders.
    """

    types: ParameterTypes
    sql: dict[str | int, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def form(self) -> tuple[object, ...]:
        """The parts that a translation depends on: names, types, and SQL, but not values."""
        kinds = [*(kind for _, kind in self.types.named), *self.types.positional]
        return (*self.sql.items(), *(kind.SerializeToString() for kind in kinds))


def values_in(sql: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for the placeholders in a DuckDB statement, which accepts no other values."""
    return {name: values[name] for name in _PLACEHOLDER.findall(sql) if name in values}


def is_plain_zone(name: str) -> bool:
    """True if the text is a time zone that has the same name in BigQuery and DuckDB."""
    return _PLAIN_ZONE.fullmatch(name) is not None


def is_zone_parameter(sql: str) -> bool:
    """True if this SQL is a parameter whose value is one of those time zones."""
    return sql.startswith("CAST($bq_zone_") and sql.endswith(" AS VARCHAR)")


def read_parameters(parameters: Sequence[Json]) -> Parameters:
    """Parses QueryParameter resources, which must be all named or all positional.

    Raises:
        InvalidQueryError: a value does not match its type, or a parameter has no type.
        UnsupportedError: this server does not support a type.
    """
    kinds = [type_of_parameter(item.get("parameterType") or {}) for item in parameters]
    names = [str(item.get("name") or "").lower() for item in parameters]
    if any(names) and not all(names):
        raise InvalidQueryError("Query parameters must be all named or all positional")
    named = list(zip(names, kinds, strict=True)) if any(names) else []
    bound = Parameters(ParameterTypes(named, [] if named else kinds))
    for position, (name, item) in enumerate(zip(names, parameters, strict=True), 1):
        try:
            sql = _typed(item["parameterType"], item.get("parameterValue") or {}, bound.values)
        except BadValueError as error:
            raise InvalidQueryError(
                f"Invalid value for query parameter: {error.message}"
            ) from error
        except KeyError as error:
            raise InvalidQueryError(f"Query parameter without {error}") from error
        bound.sql[name or position] = sql
    return bound


def _typed(kind: Json, value: Json, values: dict[str, Any]) -> str:
    name = str(kind["type"]).upper()
    if name == "ARRAY":
        items = [
            _typed(kind["arrayType"], element, values) for element in value.get("arrayValues") or []
        ]
        return f"CAST([{', '.join(items)}] AS {duckdb_type(type_of_parameter(kind))})"
    if name in ("STRUCT", "RECORD"):
        parts = value.get("structValues") or {}
        names = struct_field_names(type_of_parameter(kind))
        fields = [
            f"{quoted(own)} := {_typed(part['type'], parts.get(part.get('name')) or {}, values)}"
            for own, part in zip(names, kind["structTypes"], strict=True)
        ]
        return f"struct_pack({', '.join(fields)})"
    return _scalar(name, value.get("value"), values)


def _scalar(name: str, value: Any, values: dict[str, Any]) -> str:
    (kind,) = parse_schema([{"name": "value", "type": name}])
    is_zone = kind.type == "STRING" and isinstance(value, str) and is_plain_zone(value)
    # The translation may assume that the zone is valid, because it is cached for statements with
    # the same placeholders.
    placeholder = f"bq_zone_{len(values)}" if is_zone else f"bq_{len(values)}"
    if value is not None and kind.type == "BYTES":
        canonical_scalar("BYTES", value)
        values[placeholder] = decode_base64(value)
    else:
        scalar = canonical_scalar(kind.type, value)
        values[placeholder] = bytes(scalar).decode() if isinstance(scalar, msgspec.Raw) else scalar
    return f"CAST(${placeholder} AS {kind.duckdb_type})"
