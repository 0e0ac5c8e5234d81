"""Converts types between the API's schemas and the analyzer."""

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.errors import InvalidQueryError, UnsupportedError
from bigquery_emulator.tables.schema import Field, Json, Schema, quoted

_KINDS = {
    "STRING": types.TYPE_STRING,
    "BYTES": types.TYPE_BYTES,
    "INTEGER": types.TYPE_INT64,
    "FLOAT": types.TYPE_DOUBLE,
    "BOOLEAN": types.TYPE_BOOL,
    "TIMESTAMP": types.TYPE_TIMESTAMP,
    "DATETIME": types.TYPE_DATETIME,
    "DATE": types.TYPE_DATE,
    "TIME": types.TYPE_TIME,
    "NUMERIC": types.TYPE_NUMERIC,
    "JSON": types.TYPE_JSON,
}
TIMESTAMP = TypeProto(type_kind=types.TYPE_TIMESTAMP)
DATE = TypeProto(type_kind=types.TYPE_DATE)

_NAMES = {number: name for name, number in _KINDS.items()}
_SQL_NAMES = {"INT64": "INTEGER", "FLOAT64": "FLOAT", "BOOL": "BOOLEAN", "DECIMAL": "NUMERIC"}


def type_of_field(field: Field) -> TypeProto:
    if field.type == "RECORD":
        kind = TypeProto(type_kind=types.TYPE_STRUCT)
        for inner in field.fields:
            kind.struct_type.field.add(field_name=inner.name, field_type=type_of_field(inner))
    else:
        kind = TypeProto(type_kind=_KINDS[field.type])
    return _array_of(kind) if field.mode == "REPEATED" else kind


def type_of_parameter(kind: Json) -> TypeProto:
    """Returns the type described by a QueryParameterType resource.

    Raises:
        InvalidQueryError: there is no such type.
        UnsupportedError: this server does not support the type.
    """
    name = str(kind.get("type", "")).upper()
    if name == "ARRAY":
        return _array_of(type_of_parameter(kind.get("arrayType") or {}))
    if name in ("STRUCT", "RECORD"):
        struct = TypeProto(type_kind=types.TYPE_STRUCT)
        for part in kind.get("structTypes") or []:
            struct.struct_type.field.add(
                field_name=str(part.get("name") or ""),
                field_type=type_of_parameter(part.get("type") or {}),
            )
        return struct
    name = _SQL_NAMES.get(name, name)
    if name in ("BIGNUMERIC", "BIGDECIMAL", "GEOGRAPHY", "INTERVAL", "RANGE"):
        raise UnsupportedError(
            f"Query parameters of type {name} are not supported by the embedded BigQuery", "query"
        )
    if name not in _KINDS:
        raise InvalidQueryError(f"Invalid value for parameterType: {name or 'no type'}")
    return TypeProto(type_kind=_KINDS[name])


def field_of(name: str, kind: TypeProto) -> Field:
    """Returns the field for a result column.

    Raises:
        UnsupportedError: this server does not support the type in results.
    """
    if kind.type_kind == types.TYPE_ARRAY:
        inner = field_of(name, kind.array_type.element_type)
        return Field(name, inner.type, "REPEATED", inner.fields)
    if kind.type_kind == types.TYPE_STRUCT:
        return Field(name, "RECORD", fields=_struct_fields(kind))
    if kind.type_kind not in _NAMES:
        raise UnsupportedError(
            f"Column {name}: a result of type {type_name(kind)} is not supported by the embedded"
            " BigQuery",
            "query",
        )
    return Field(name, _NAMES[kind.type_kind])


def duckdb_type(kind: TypeProto) -> str:
    """Returns the DuckDB type for the values of a type.

    Raises:
        UnsupportedError: this server does not support the type.
    """
    if kind.type_kind == types.TYPE_ARRAY:
        return f"{duckdb_type(kind.array_type.element_type)}[]"
    if kind.type_kind == types.TYPE_STRUCT:
        parts = [
            f"{quoted(name)} {duckdb_type(field.field_type)}"
            for name, field in zip(struct_field_names(kind), kind.struct_type.field, strict=True)
        ]
        return f"STRUCT({', '.join(parts)})"
    name = _NAMES.get(kind.type_kind)
    if name is None:
        raise UnsupportedError(
            f"Values of type {type_name(kind)}: not supported by the embedded BigQuery", "query"
        )
    return Field("", name).duckdb_type


def type_name(kind: TypeProto) -> str:
    """Returns a type's name in GoogleSQL."""
    if kind.type_kind == types.TYPE_ARRAY:
        return f"ARRAY<{type_name(kind.array_type.element_type)}>"
    if kind.type_kind == types.TYPE_STRUCT:
        parts = (
            f"{field.field_name} {type_name(field.field_type)}".strip()
            for field in kind.struct_type.field
        )
        return f"STRUCT<{', '.join(parts)}>"
    name = str(types.TypeKind.Name(kind.type_kind)).removeprefix("TYPE_")
    return "FLOAT64" if name == "DOUBLE" else name


def struct_field_names(kind: TypeProto) -> list[str]:
    """Returns a struct's field names in DuckDB: BigQuery's names, or names such as `_field_2`.

    Duplicate names are replaced with numbered names too, because DuckDB requires unique names.
    """
    names: list[str] = []
    for position, field in enumerate(kind.struct_type.field, 1):
        name = field.field_name or f"_field_{position}"
        is_taken = name.lower() in {other.lower() for other in names}
        names.append(f"_field_{position}" if is_taken else name)
    return names


def _struct_fields(kind: TypeProto) -> Schema:
    names = [field.field_name.lower() for field in kind.struct_type.field if field.field_name]
    for name in names:
        if names.count(name) > 1:
            raise InvalidQueryError(
                "Duplicate column names in the result are not supported. Found duplicate(s):"
                f" {name}"
            )
    return tuple(
        field_of(name, field.field_type)
        for name, field in zip(struct_field_names(kind), kind.struct_type.field, strict=True)
    )


def _array_of(element: TypeProto) -> TypeProto:
    array = TypeProto(type_kind=types.TYPE_ARRAY)
    array.array_type.element_type.CopyFrom(element)
    return array
