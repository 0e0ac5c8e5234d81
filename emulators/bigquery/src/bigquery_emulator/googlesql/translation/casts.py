"""CAST and SAFE_CAST, and coercions that the analyzer made explicit.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/conversion_functions
"""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_parameters_pb2 import TypeParametersProto
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.analysis.types import (
    duckdb_type,
    struct_field_names,
    type_name,
)
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.tables.schema import quoted

_INT, _DOUBLE, _NUMERIC = types.TYPE_INT64, types.TYPE_DOUBLE, types.TYPE_NUMERIC
_STRING, _BYTES, _BOOL = types.TYPE_STRING, types.TYPE_BYTES, types.TYPE_BOOL
_DATE, _DATETIME = types.TYPE_DATE, types.TYPE_DATETIME
_TIMESTAMP, _TIME = types.TYPE_TIMESTAMP, types.TYPE_TIME
_MOST_WHOLE_DIGITS = 29
"""Maximum number of digits that a NUMERIC may have before the decimal point."""

_MACROS: dict[tuple[int, int], str] = {
    (_INT, _STRING): "CAST({0} AS VARCHAR)",
    (_BOOL, _STRING): "CAST({0} AS VARCHAR)",
    (_DATE, _STRING): "bq.date_text({0})",
    (_DATETIME, _STRING): "bq.datetime_text({0})",
    (_TIMESTAMP, _STRING): "bq.timestamp_text({0})",
    (_TIME, _STRING): "bq.time_text({0})",
    (_DOUBLE, _STRING): "bq.float_text({0})",
    (_NUMERIC, _STRING): "bq.numeric_text({0})",
    (_BYTES, _STRING): "decode({0})",
    (_STRING, _BYTES): "encode({0})",
    (_STRING, _INT): "bq.text_int64({0})",
    (_DOUBLE, _INT): "bq.float_int64({0})",
    (_NUMERIC, _INT): "CAST(round({0}, 0) AS BIGINT)",
    (_BOOL, _INT): "CAST({0} AS BIGINT)",
    (_STRING, _BOOL): "bq.text_bool({0})",
    (_INT, _BOOL): "({0} <> 0)",
    (_STRING, _DOUBLE): "bq.text_float64({0})",
    (_INT, _DOUBLE): "CAST({0} AS DOUBLE)",
    (_NUMERIC, _DOUBLE): "CAST({0} AS DOUBLE)",
    (_INT, _NUMERIC): "CAST({0} AS DECIMAL(38,9))",
    (_DOUBLE, _NUMERIC): "bq.float_numeric({0})",
    (_STRING, _NUMERIC): "bq.text_numeric({0})",
    (_STRING, _DATE): "bq.text_date({0})",
    (_STRING, _DATETIME): "bq.text_datetime({0})",
    (_STRING, _TIMESTAMP): "bq.text_timestamp({0})",
    (_STRING, _TIME): "bq.text_time({0})",
    (_DATETIME, _DATE): "CAST({0} AS DATE)",
    (_TIMESTAMP, _DATE): "CAST({0} AS DATE)",
    (_DATE, _DATETIME): "CAST({0} AS TIMESTAMP)",
    (_TIMESTAMP, _DATETIME): "CAST({0} AS TIMESTAMP)",
    (_DATE, _TIMESTAMP): "CAST({0} AS TIMESTAMPTZ)",
    (_DATETIME, _TIMESTAMP): "CAST({0} AS TIMESTAMPTZ)",
    (_DATETIME, _TIME): "CAST({0} AS TIME)",
    (_TIMESTAMP, _TIME): "CAST(CAST({0} AS TIMESTAMP) AS TIME)",
}


def cast(value: str, source: TypeProto, target: TypeProto) -> str:
    """Returns a value converted to another type.

    Raises:
        UnsupportedError: there is no translation for this pair of types.
    """
    if _is_same(source, target):
        return value
    return _cast(value, source, target)


def limited(value: str, kind: int, parameters: TypeParametersProto) -> str:
    """Checks a value against a type's parameters, as in `NUMERIC(10, 2)`.

    Raises:
        UnsupportedError: the type can't have parameters here.
    """
    if kind in (_STRING, _BYTES) and parameters.string_type_parameters.HasField("max_length"):
        most = parameters.string_type_parameters.max_length
        size = f"octet_length({value})" if kind == _BYTES else f"length({value})"
        failed = f"{type_name(TypeProto(type_kind=kind))}({most}) has maximum length {most}"
        fail = f"CAST(bq.fail('{failed}') AS VARCHAR)"
        fail = f"encode({fail})" if kind == _BYTES else fail
        return f"(CASE WHEN {size} > {most} THEN {fail} ELSE {value} END)"
    if kind == _NUMERIC and parameters.numeric_type_parameters.HasField("precision"):
        digits = parameters.numeric_type_parameters
        rounded = f"CAST(round({value}, {digits.scale}) AS DECIMAL(38,9))"
        whole = digits.precision - digits.scale
        if whole >= _MOST_WHOLE_DIGITS:
            return rounded
        failed = (
            f"NUMERIC({digits.precision}, {digits.scale}) allows only {whole} digits before "
            "the decimal point"
        )
        return (
            f"(CASE WHEN abs({rounded}) >= 1{'0' * whole}"
            f" THEN CAST(bq.fail('{failed}') AS DECIMAL(38,9)) ELSE {rounded} END)"
        )
    raise unsupported("CAST to this type with parameters")


def _cast(value: str, source: TypeProto, target: TypeProto) -> str:
    if source.type_kind == target.type_kind == types.TYPE_STRUCT:
        return _cast_struct(value, source, target)
    if source.type_kind == target.type_kind == types.TYPE_ARRAY:
        inner, wanted = source.array_type.element_type, target.array_type.element_type
        if _is_same(inner, wanted):
            return value
        return f"list_transform({value}, lambda e: {_cast('e', inner, wanted)})"
    template = _MACROS.get((source.type_kind, target.type_kind))
    if template is None:
        raise unsupported(f"CAST of {type_name(source)} to {type_name(target)}")
    return template.format(value)


def _cast_struct(value: str, source: TypeProto, target: TypeProto) -> str:
    """Casts a struct's fields by position. DuckDB's own cast matches fields by name."""
    names = struct_field_names(target)
    parts = []
    for place, (own, wanted) in enumerate(
        zip(source.struct_type.field, target.struct_type.field, strict=True), 1
    ):
        field = f"struct_extract_at({value}, {place})"
        if not _is_same(own.field_type, wanted.field_type):
            field = _cast(field, own.field_type, wanted.field_type)
        parts.append(f"{quoted(names[place - 1])} := {field}")
    packed = f"struct_pack({', '.join(parts)})"
    return f"CASE WHEN {value} IS NULL THEN CAST(NULL AS {duckdb_type(target)}) ELSE {packed} END"


def _is_same(one: TypeProto, other: TypeProto) -> bool:
    """True if DuckDB's types are the same, including field names."""
    if one.type_kind != other.type_kind:
        return False
    if one.type_kind in (types.TYPE_ARRAY, types.TYPE_STRUCT):
        return duckdb_type(one) == duckdb_type(other)
    return True
