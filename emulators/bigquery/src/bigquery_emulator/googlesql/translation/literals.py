"""Converts the analyzer's values to DuckDB SQL.

Source of the encodings:
https://github.com/google/googlesql/blob/master/googlesql/public/value.proto
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from typing import Any

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.functions import datetime_pb2
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.analysis.types import (
    duckdb_type,
    struct_field_names,
    type_name,
)
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.tables.schema import quoted
from bigquery_emulator.udf.json_values import canonical

_NANOS_BITS = 30
_EXACT = Context(prec=60)


def text(value: str) -> str:
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\0")]
    return parts[0] if len(parts) == 1 else f"({' || chr(0) || '.join(parts)})"


def date_part(value: Any) -> str:
    """Returns a date part's name from the analyzer's enum, such as `ISOWEEK`."""
    return str(datetime_pb2.DateTimestampPart.Name(value.enum_value))


def literal(value: Any, kind: TypeProto) -> str:
    """Returns a typed literal.

    Args:
        value: a ValueProto. The value is NULL if no field is set.

    Raises:
        UnsupportedError: DuckDB has no equivalent type.
    """
    if not value.ListFields() and kind.type_kind != types.TYPE_ENUM:
        return f"CAST(NULL AS {duckdb_type(kind)})"
    if kind.type_kind == types.TYPE_ARRAY:
        element = kind.array_type.element_type
        items = ", ".join(literal(item, element) for item in value.array_value.element)
        return f"[{items}]" if items else f"CAST([] AS {duckdb_type(kind)})"
    if kind.type_kind == types.TYPE_STRUCT:
        return _struct(value, kind)
    write = _SCALARS.get(kind.type_kind)
    if write is None:
        raise unsupported(f"Literals of type {type_name(kind)}")
    return write(value)


def _struct(value: Any, kind: TypeProto) -> str:
    names = struct_field_names(kind)
    parts = zip(names, kind.struct_type.field, value.struct_value.field, strict=True)
    fields = [f"{quoted(name)} := {literal(field, part.field_type)}" for name, part, field in parts]
    if not fields:
        raise unsupported("A STRUCT without fields")
    return f"struct_pack({', '.join(fields)})"


def _integer(value: Any) -> str:
    number = value.int64_value
    # The smallest number has no positive counterpart to put after a minus sign.
    return f"CAST('{number}' AS BIGINT)" if number < 0 else f"CAST({number} AS BIGINT)"


def _double(value: Any) -> str:
    number = value.double_value
    if math.isfinite(number):
        # A minus sign before 0 would be lost.
        is_negative = math.copysign(1, number) < 0
        return f"CAST('{number!r}' AS DOUBLE)" if is_negative else f"CAST({number!r} AS DOUBLE)"
    return f"CAST('{number}' AS DOUBLE)"


def _bytes(value: Any) -> str:
    return f"from_hex('{value.bytes_value.hex()}')"


def _date(value: Any) -> str:
    return f"(DATE '1970-01-01' + CAST({value.date_value} AS INTEGER))"


def _timestamp(value: Any) -> str:
    timestamp = value.timestamp_value
    return f"bq.from_micros({timestamp.seconds * 1_000_000 + timestamp.nanos // 1_000})"


def _datetime(value: Any) -> str:
    bits = value.datetime_value.bit_field_datetime_seconds
    second, minute, hour = bits & 63, bits >> 6 & 63, bits >> 12 & 31
    day, month, year = bits >> 17 & 31, bits >> 22 & 15, bits >> 26
    micros = value.datetime_value.nanos // 1_000
    clock = f"{hour:02}:{minute:02}:{second:02}.{micros:06}"
    return f"TIMESTAMP '{year:04}-{month:02}-{day:02} {clock}'"


def _time(value: Any) -> str:
    bits = value.time_value
    micros, bits = (bits & (1 << _NANOS_BITS) - 1) // 1_000, bits >> _NANOS_BITS
    return f"TIME '{bits >> 12:02}:{bits >> 6 & 63:02}:{bits & 63:02}.{micros:06}'"


def _numeric(value: Any) -> str:
    scaled = int.from_bytes(value.numeric_value, "little", signed=True)
    number = _EXACT.divide(Decimal(scaled), Decimal(10**9))
    return f"CAST('{number:f}' AS DECIMAL(38,9))"


def _json(value: Any) -> str:
    return f"CAST({text(canonical(value.json_value))} AS JSON)"


_SCALARS = {
    types.TYPE_INT64: _integer,
    types.TYPE_DOUBLE: _double,
    types.TYPE_BOOL: lambda value: "true" if value.bool_value else "false",
    types.TYPE_STRING: lambda value: text(value.string_value),
    types.TYPE_BYTES: _bytes,
    types.TYPE_DATE: _date,
    types.TYPE_TIMESTAMP: _timestamp,
    types.TYPE_DATETIME: _datetime,
    types.TYPE_TIME: _time,
    types.TYPE_NUMERIC: _numeric,
    types.TYPE_JSON: _json,
}
