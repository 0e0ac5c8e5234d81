"""Values as JSON text, in the format used by TO_JSON_STRING and TO_JSON.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/json_functions#json_encodings
"""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.analysis.types import struct_field_names, type_name
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.literals import text
from bigquery_emulator.tables.schema import quoted

_FORMS = {
    types.TYPE_BOOL: "CAST({0} AS VARCHAR)",
    types.TYPE_INT64: "bq.json_of_int64({0})",
    types.TYPE_DOUBLE: "bq.json_of_float64({0})",
    types.TYPE_NUMERIC: "bq.json_of_numeric({0})",
    types.TYPE_STRING: "bq.json_of_text({0})",
    types.TYPE_BYTES: "('\"' || to_base64({0}) || '\"')",
    types.TYPE_DATE: "('\"' || bq.date_text({0}) || '\"')",
    types.TYPE_TIME: "('\"' || bq.time_text({0}) || '\"')",
    types.TYPE_DATETIME: "('\"' || replace(bq.datetime_text({0}), ' ', 'T') || '\"')",
    types.TYPE_JSON: "bq_json_canonical(CAST({0} AS VARCHAR))",
    types.TYPE_TIMESTAMP: (
        "('\"' || replace(bq.datetime_text(CAST({0} AS TIMESTAMP)), ' ', 'T') || 'Z\"')"
    ),
}
_FORMS_OF_JSON = {
    **_FORMS,
    types.TYPE_INT64: "CAST({0} AS VARCHAR)",
    types.TYPE_DOUBLE: "bq.json_float64_value({0})",
    types.TYPE_NUMERIC: "bq.json_numeric_value({0})",
    types.TYPE_JSON: "CAST({0} AS VARCHAR)",
}
"""A JSON value stores all numbers as numbers. JSON text stores wide numbers as strings."""


def json_text(value: str, kind: TypeProto, depth: int = 0, *, is_json: bool = False) -> str:
    """Returns the DuckDB SQL for a value's text.

    Args:
        is_json: True if the text becomes a JSON value, as in TO_JSON.

    Raises:
        UnsupportedError: the type has no translation.
    """
    if kind.type_kind == types.TYPE_ARRAY:
        element = f"e{depth}"
        of_element = json_text(element, kind.array_type.element_type, depth + 1, is_json=is_json)
        items = f"list_transform({value}, lambda {element}: {of_element})"
        written = f"'[' || array_to_string({items}, ',') || ']'"
    elif kind.type_kind == types.TYPE_STRUCT:
        written = f"CASE WHEN {value} IS NOT NULL THEN {_struct(value, kind, depth, is_json)} END"
    elif kind.type_kind in (forms := _FORMS_OF_JSON if is_json else _FORMS):
        written = forms[kind.type_kind].format(value)
    else:
        raise unsupported(f"TO_JSON_STRING of {type_name(kind)}")
    return f"coalesce({written}, 'null')"


def _struct(value: str, kind: TypeProto, depth: int, is_json: bool) -> str:
    parts: dict[str, str] = {}
    for field, name in zip(kind.struct_type.field, struct_field_names(kind), strict=True):
        if is_json and field.field_name in parts:
            continue  # JSON keeps only the first of any duplicate names
        head = f"bq.json_of_text({text(field.field_name)}) || ':'"
        inner = json_text(f"({value}).{quoted(name)}", field.field_type, depth, is_json=is_json)
        # TO_JSON_STRING keeps all of them.
        parts[field.field_name if is_json else name] = f"{head} || {inner}"
    if is_json:
        parts = dict(sorted(parts.items()))
    return " || ".join(["'{'", " || ',' || ".join(parts.values()) or "''", "'}'"])
