"""Functions for JSON, and for STRINGs that contain JSON."""

from __future__ import annotations

import re

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.functions.json_text import json_text
from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
)
from bigquery_emulator.googlesql.translation.literals import text
from bigquery_emulator.udf.json_values import is_path

_PATH = re.compile(r"""\$(\.[A-Za-z_]\w*|\."[^"\\]+"|\[\d{1,9}\])*""", re.ASCII)
"""Paths that DuckDB interprets as BigQuery does."""
_MOST_DEPTH = 1_000
"""Exceeds JSON's nesting limit."""


def _path(call: Call) -> str:
    if len(call.sql) == 1:
        return "$"
    path = call.text(1)
    if path is None or not _PATH.fullmatch(path):
        raise unsupported("A JSON path that is not a literal of names and places")
    return path


def _text(call: Call) -> str:
    """Returns the call's STRING.

    An index such as `[0]` would also match the name 0 in an object.
    """
    value, path = call.sql[0], _path(call)
    prefixes = [path[: match.start()] for match in re.finditer(r"\[", path)]
    if not prefixes:
        return value
    tested = " OR ".join(
        f"json_type(TRY_CAST({value} AS JSON), {text(prefix)}) = 'OBJECT'" for prefix in prefixes
    )
    refused = "CAST(bq.refuse('a place in a JSON object is') AS VARCHAR)"
    return f"(CASE WHEN {tested} THEN {refused} ELSE {value} END)"


def _query(call: Call) -> str:
    path = text(_path(call))
    if call.kind() == types.TYPE_JSON:
        return f"json_extract({call.sql[0]}, {path})"
    if call.kind() != types.TYPE_STRING:
        raise call.refused()
    return f"bq.json_query_text({_text(call)}, {path})"


def _value(call: Call) -> str:
    if call.kind() not in (types.TYPE_JSON, types.TYPE_STRING):
        raise call.refused()
    value, path = call.sql[0], text(_path(call))
    if call.kind() == types.TYPE_STRING:
        value = f"bq.text_json({_text(call)}, {path})"
    return f"bq.json_value({value}, {path})"


def _array(macro: str, *, of_text: str) -> Translate:
    def write(call: Call) -> str:
        name = {types.TYPE_JSON: macro, types.TYPE_STRING: of_text}.get(call.kind())
        if name is None:
            raise call.refused()
        value = call.sql[0] if call.kind() == types.TYPE_JSON else _text(call)
        return f"bq.{name}({value}, {text(_path(call))})"

    return write


def _parse(call: Call) -> str:
    # The mode for numbers that FLOAT64 can't represent, which is 'exact' by default.
    if len(call.sql) > 1 and call.text(1) != "exact":
        raise call.refused()
    return f"bq.parse_json({call.sql[0]})"


def _of_json(macro: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != types.TYPE_JSON:
            raise call.refused()
        # The mode for numbers that FLOAT64 can't represent. Such numbers are rejected.
        if len(call.sql) > 1 and call.text(1) != "round":
            raise call.refused()
        return f"bq.{macro}({call.sql[0]})"

    return write


def _to_text(call: Call) -> str:
    # A second argument requests line breaks.
    if len(call.sql) > 1 and call.sql[1] != "false":
        if call.sql[1] != "true" or call.kind() != types.TYPE_JSON:
            raise call.refused()
        return f"coalesce(bq_json_pretty(CAST({call.sql[0]} AS VARCHAR)), 'null')"
    return json_text(call.sql[0], call.nodes[0].type)


def _to_json(call: Call) -> str:
    # A second argument requests that wide numbers be written as strings.
    if len(call.sql) > 1 and call.sql[1] != "false":
        raise call.refused()
    return f"CAST({json_text(call.sql[0], call.nodes[0].type, is_json=True)} AS JSON)"


def _json_array(call: Call) -> str:
    values = [
        json_text(sql, node.type, is_json=True)
        for sql, node in zip(call.sql, call.nodes, strict=True)
    ]
    inside = " || ',' || ".join(values) or "''"
    return f"CAST('[' || {inside} || ']' AS JSON)"


def _json_object(call: Call) -> str:
    """Builds an object from alternating names and values.

    Duplicate names can't be handled without comparing all names.
    """
    names = [call.text(place) for place in range(0, len(call.sql), 2)]
    if any(node.type.type_kind == types.TYPE_ARRAY for node in call.nodes[::2]):
        raise call.refused()
    if len(names) > 1 and (None in names or len(set(names)) < len(names)):
        raise unsupported("JSON_OBJECT with names that are equal or not literals")
    parts = [
        f"bq.json_of_name({name}) || ':' || {json_text(value, node.type, is_json=True)}"
        for name, value, node in zip(call.sql[::2], call.sql[1::2], call.nodes[1::2], strict=True)
    ]
    if len(names) > 1:
        parts = [part for _, part in sorted(zip(names, parts, strict=True))]
    inside = " || ',' || ".join(parts) or "''"
    return f"CAST('{{' || {inside} || '}}' AS JSON)"


def _path_steps(call: Call, place: int) -> str:
    """Returns DuckDB's SQL for a path that is known in advance."""
    path = call.text(place)
    if path is None or not is_path(path):
        raise unsupported("A JSON path that is not a literal of names and places")
    return text(path)


def _keys(call: Call) -> str:
    depth, mode = [*call.sql[1:], "NULL", "NULL"][:2]
    depth = f"coalesce({depth}, {_MOST_DEPTH})"
    keys = f"bq_json_keys(CAST({call.sql[0]} AS VARCHAR), {depth}, coalesce({mode}, 'strict'))"
    return f"CAST({keys} AS VARCHAR[])"


def _set(call: Call) -> str:
    *pairs, creates = call.sql[1:]
    document = f"CAST({call.sql[0]} AS VARCHAR)"
    for place in range(1, 1 + len(pairs), 2):
        value = json_text(call.sql[place + 1], call.nodes[place + 1].type, is_json=True)
        path = _path_steps(call, place)
        # If `creates` is NULL, nothing changes.
        document = f"coalesce(bq_json_set({document}, {path}, {value}, {creates}), {document})"
    return f"CAST({document} AS JSON)"


def _remove(call: Call) -> str:
    document = f"CAST({call.sql[0]} AS VARCHAR)"
    for place in range(1, len(call.sql)):
        if call.text(place) == "$":
            raise InvalidQueryError("The JSONPath cannot be '$'")
        document = f"bq_json_remove({document}, {_path_steps(call, place)})"
    return f"CAST({document} AS JSON)"


JSON: Functions = {
    "json_query": _query,
    "json_extract": _query,
    "json_value": _value,
    "json_extract_scalar": _value,
    "json_query_array": _array("json_query_array", of_text="json_query_array_text"),
    "json_extract_array": _array("json_query_array", of_text="json_query_array_text"),
    "json_value_array": _array("json_value_array", of_text="json_value_array_text"),
    "json_extract_string_array": _array("json_value_array", of_text="json_value_array_text"),
    "json_type": _of_json("json_type_name"),
    "bool": _of_json("json_bool"),
    "int64": _of_json("json_int64"),
    "double": _of_json("json_float64"),
    "float64": _of_json("json_float64"),
    "lax_bool": _of_json("json_lax_bool"),
    "lax_int64": _of_json("json_lax_int64"),
    "lax_double": _of_json("json_lax_float64"),
    "lax_float64": _of_json("json_lax_float64"),
    "lax_string": _of_json("json_lax_string"),
    "parse_json": _parse,
    "to_json_string": _to_text,
    "to_json": _to_json,
    "json_array": _json_array,
    "json_object": _json_object,
    "json_keys": _keys,
    "json_set": _set,
    "json_remove": _remove,
}
