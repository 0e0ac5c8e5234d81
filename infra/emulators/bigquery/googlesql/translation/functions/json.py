"""Functions of JSON."""

from __future__ import annotations

import re

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.translation.functions.registry import Call, Functions

_PATH = re.compile(r"""\$(\.[A-Za-z_]\w*|\."[^"\\]+"|\[\d+\])*""", re.ASCII)
"""Paths that DuckDB reads as BigQuery does."""


def _path(call: Call) -> str:
    if len(call.sql) == 1:
        return "'$'"
    path = call.text(1)
    if path is None or not _PATH.fullmatch(path):
        raise unsupported("A JSON path that is not a literal of names and places")
    return call.sql[1]


def _query(call: Call) -> str:
    if call.kind() != types.TYPE_JSON:
        # BigQuery gives a STRING for a STRING, written as it stands there.
        raise call.refused()
    return f"json_extract({call.sql[0]}, {_path(call)})"


def _value(call: Call) -> str:
    if call.kind() not in (types.TYPE_JSON, types.TYPE_STRING):
        raise call.refused()
    value = call.sql[0]
    if call.kind() == types.TYPE_STRING:
        value = f"TRY_CAST({value} AS JSON)"  # a STRING that is no JSON gives NULL
    return f"bq.json_value({value}, {_path(call)})"


def _parse(call: Call) -> str:
    # The mode for numbers that FLOAT64 can't hold, which is 'exact' if nothing is said.
    if len(call.sql) > 1 and call.text(1) != "exact":
        raise call.refused()
    return f"CAST({call.sql[0]} AS JSON)"


JSON: Functions = {
    "json_query": _query,
    "json_extract": _query,
    "json_value": _value,
    "json_extract_scalar": _value,
    "parse_json": _parse,
}
