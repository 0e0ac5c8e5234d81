"""Array functions."""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.types import duckdb_type
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
)
from bigquery_emulator.googlesql.translation.literals import text


def _made(call: Call) -> str:
    if not call.sql:
        return f"CAST([] AS {duckdb_type(call.type)})"
    return f"[{', '.join(call.sql)}]"


def _subscript(call: Call) -> str:
    if call.kind() != types.TYPE_JSON:
        return call.put("bq.at_offset({0}, {1})")
    key, place = call.text(1), call.integer(1)
    if key is not None and '"' not in key:
        path = f'$."{key}"'
        return f"json_extract({call.sql[0]}, {text(path)})"
    if place is not None and place >= 0:
        return f"json_extract({call.sql[0]}, '$[{place}]')"
    raise call.refused()


def _concat(call: Call) -> str:
    joined = call.sql[0]
    for other in call.sql[1:]:
        joined = f"bq.array_concat({joined}, {other})"
    return joined


def _to_string(call: Call) -> str:
    if call.nodes[0].type.array_type.element_type.type_kind != types.TYPE_STRING:
        raise call.refused()
    if call.nodes[1].kind != "Literal":
        raise unsupported("ARRAY_TO_STRING with a separator that is not a literal")
    if len(call.sql) == 2:
        return call.put("bq.array_text({0}, {1})")
    return call.put("bq.filled_array_text({0}, {1}, {2})")


def _generate(call: Call) -> str:
    step = call.sql[2] if len(call.sql) > 2 else "1"
    if call.kind() == types.TYPE_INT64:
        return f"bq.generate_array({call.sql[0]}, {call.sql[1]}, {step})"
    macro = {types.TYPE_DOUBLE: "generate_floats", types.TYPE_NUMERIC: "generate_numbers"}
    if call.kind() not in macro:
        raise call.refused()
    kind = duckdb_type(call.type)
    element = kind.removesuffix("[]")
    step = f"CAST({step} AS {element})"
    return f"CAST(bq.{macro[call.kind()]}({call.sql[0]}, {call.sql[1]}, {step}) AS {kind})"


ARRAYS: Functions = {
    "$make_array": _made,
    "$array_at_offset": "bq.at_offset({0}, {1})",
    "$safe_array_at_offset": "bq.safe_at_offset({0}, {1})",
    "$array_at_ordinal": "bq.at({0}, {1})",
    "$safe_array_at_ordinal": "bq.safe_at({0}, {1})",
    "$subscript": _subscript,
    "array_length": "CAST(len({0}) AS BIGINT)",
    "array_concat": _concat,
    "array_reverse": "list_reverse({0})",
    "array_to_string": _to_string,
    "generate_array": _generate,
    "array_first": "bq.at({0}, 1)",
    "array_last": "bq.at({0}, greatest(len({0}), 1))",
}
