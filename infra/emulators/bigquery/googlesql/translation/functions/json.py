"""Functions of JSON, and of a STRING that holds JSON."""

from __future__ import annotations

import re

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.translation.functions.json_text import json_text
from infra.emulators.bigquery.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
)
from infra.emulators.bigquery.googlesql.translation.literals import text

_PATH = re.compile(r"""\$(\.[A-Za-z_]\w*|\."[^"\\]+"|\[\d+\])*""", re.ASCII)
"""Paths that DuckDB reads as BigQuery does."""


def _path(call: Call) -> str:
    if len(call.sql) == 1:
        return "$"
    path = call.text(1)
    if path is None or not _PATH.fullmatch(path):
        raise unsupported("A JSON path that is not a literal of names and places")
    return path


def _query(call: Call) -> str:
    path = text(_path(call))
    if call.kind() == types.TYPE_JSON:
        return f"json_extract({call.sql[0]}, {path})"
    if call.kind() != types.TYPE_STRING:
        raise call.refused()
    return f"bq.json_query_text({call.sql[0]}, {path})"


def _value(call: Call) -> str:
    if call.kind() not in (types.TYPE_JSON, types.TYPE_STRING):
        raise call.refused()
    value = call.sql[0]
    if call.kind() == types.TYPE_STRING:
        value = f"bq.text_json({value})"  # a STRING that is no JSON gives NULL
    return f"bq.json_value({value}, {text(_path(call))})"


def _array(macro: str, *, of_text: str) -> Translate:
    def write(call: Call) -> str:
        name = {types.TYPE_JSON: macro, types.TYPE_STRING: of_text}.get(call.kind())
        if name is None:
            raise call.refused()
        return f"bq.{name}({call.sql[0]}, {text(_path(call))})"

    return write


def _parse(call: Call) -> str:
    # The mode for numbers that FLOAT64 can't hold, which is 'exact' if nothing is said.
    if len(call.sql) > 1 and call.text(1) != "exact":
        raise call.refused()
    return f"CAST({call.sql[0]} AS JSON)"


def _of_json(macro: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != types.TYPE_JSON:
            raise call.refused()
        # The mode for numbers that FLOAT64 can't hold. They are refused.
        if len(call.sql) > 1 and call.text(1) != "round":
            raise call.refused()
        return f"bq.{macro}({call.sql[0]})"

    return write


def _to_text(call: Call) -> str:
    # A second argument asks for line breaks.
    if len(call.sql) > 1 and call.sql[1] != "false":
        raise call.refused()
    return json_text(call.sql[0], call.nodes[0].type)


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
}
