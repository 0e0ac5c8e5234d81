"""Functions of JSON."""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from infra.emulators.bigquery.googlesql.translation.functions.registry import Call, Functions


def _path(call: Call) -> str:
    return call.sql[1] if len(call.sql) > 1 else "'$'"


def _query(call: Call) -> str:
    if call.kind() != types.TYPE_JSON:
        # BigQuery gives a STRING for a STRING, written as it stands there.
        raise call.refused()
    return f"json_extract({call.sql[0]}, {_path(call)})"


def _value(call: Call) -> str:
    if call.kind() not in (types.TYPE_JSON, types.TYPE_STRING):
        raise call.refused()
    return f"bq.json_value({call.sql[0]}, {_path(call)})"


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
