"""Values as the text of JSON, as TO_JSON_STRING writes them.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/json_functions#json_encodings
"""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from infra.emulators.bigquery.googlesql.analysis.types import struct_field_names, type_name
from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.translation.literals import text
from infra.emulators.bigquery.tables.schema import quoted

_FORMS = {
    types.TYPE_BOOL: "CAST({0} AS VARCHAR)",
    types.TYPE_INT64: "bq.json_of_int64({0})",
    types.TYPE_DOUBLE: "bq.json_of_float64({0})",
    types.TYPE_NUMERIC: "('\"' || bq.numeric_text({0}) || '\"')",
    types.TYPE_STRING: "bq.json_of_text({0})",
    types.TYPE_BYTES: "('\"' || to_base64({0}) || '\"')",
    types.TYPE_DATE: "('\"' || bq.date_text({0}) || '\"')",
    types.TYPE_TIME: "('\"' || bq.time_text({0}) || '\"')",
    types.TYPE_DATETIME: "('\"' || replace(bq.datetime_text({0}), ' ', 'T') || '\"')",
    types.TYPE_TIMESTAMP: (
        "('\"' || replace(bq.datetime_text(CAST({0} AS TIMESTAMP)), ' ', 'T') || 'Z\"')"
    ),
}


def json_text(value: str, kind: TypeProto, depth: int = 0) -> str:
    """Returns DuckDB's SQL for the text of a value.

    Args:
        value: its SQL.
        kind: its type.
        depth: of arrays around it.

    Raises:
        UnsupportedError: for a type without a translation.
    """
    if kind.type_kind == types.TYPE_ARRAY:
        one = f"e{depth}"
        of_one = json_text(one, kind.array_type.element_type, depth + 1)
        items = f"list_transform({value}, lambda {one}: {of_one})"
        written = f"'[' || array_to_string({items}, ',') || ']'"
    elif kind.type_kind == types.TYPE_STRUCT:
        written = f"CASE WHEN {value} IS NOT NULL THEN {_struct(value, kind, depth)} END"
    elif kind.type_kind in _FORMS:
        written = _FORMS[kind.type_kind].format(value)
    else:
        raise unsupported(f"TO_JSON_STRING of {type_name(kind)}")
    return f"coalesce({written}, 'null')"


def _struct(value: str, kind: TypeProto, depth: int) -> str:
    parts = []
    for field, name in zip(kind.struct_type.field, struct_field_names(kind), strict=True):
        head = f"bq.json_of_text({text(field.field_name)}) || ':'"
        parts.append(f"{head} || {json_text(f'({value}).{quoted(name)}', field.field_type, depth)}")
    return " || ".join(["'{'", " || ',' || ".join(parts) or "''", "'}'"])
