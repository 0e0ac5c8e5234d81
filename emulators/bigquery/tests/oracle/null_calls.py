"""Calls every translated function, with each argument NULL in turn.

The argument types come from the analyzer's own signatures, so a newly translated function is tested
automatically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from zetasql.wasi._pb2.zetasql.local_service import local_service_pb2 as service
from zetasql.wasi._pb2.zetasql.proto.options_pb2 import ZetaSQLBuiltinFunctionOptionsProto
from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.language import language
from bigquery_emulator.googlesql.analysis.module import AnalyzerModule

# Values that some functions treat specially come first, because those values must not be checked
# before a NULL in another argument is.
_VALUES: dict[int, tuple[str, list[str]]] = {
    types.TYPE_INT64: ("INT64", ["0", "64", "-1"]),
    types.TYPE_DOUBLE: ("FLOAT64", ["0.0", "CAST('inf' AS FLOAT64)", "-1.0"]),
    types.TYPE_NUMERIC: ("NUMERIC", ["NUMERIC '0'", "NUMERIC '-1.5'"]),
    types.TYPE_BOOL: ("BOOL", ["FALSE", "TRUE"]),
    types.TYPE_STRING: ("STRING", ["''", "'a'", "'é'"]),
    types.TYPE_BYTES: ("BYTES", ["b''", "b'a'"]),
    types.TYPE_DATE: ("DATE", ["DATE '0001-01-01'", "DATE '9999-12-31'"]),
    types.TYPE_TIME: ("TIME", ["TIME '00:00:00'"]),
    types.TYPE_DATETIME: ("DATETIME", ["DATETIME '0001-01-01 00:00:00'"]),
    types.TYPE_TIMESTAMP: ("TIMESTAMP", ["TIMESTAMP '9999-12-31 23:59:59+00'"]),
    types.TYPE_JSON: ("JSON", ["JSON 'null'", "JSON '{}'"]),
}
_ARRAY = ("ARRAY<INT64>", ["CAST([] AS ARRAY<INT64>)", "[1, NULL]"])
_TEXTS = ("ARRAY<STRING>", ["CAST([] AS ARRAY<STRING>)", "['a', 'b']"])
_MOST_VARIANTS = 12

_OPERATORS = {
    "$add": "({0} + {1})",
    "$subtract": "({0} - {1})",
    "$multiply": "({0} * {1})",
    "$divide": "({0} / {1})",
    "$unary_minus": "(-{0})",
    "$equal": "({0} = {1})",
    "$not_equal": "({0} != {1})",
    "$less": "({0} < {1})",
    "$less_or_equal": "({0} <= {1})",
    "$greater": "({0} > {1})",
    "$greater_or_equal": "({0} >= {1})",
    "$between": "({0} BETWEEN {1} AND {2})",
    "$in": "({0} IN ({1}, {1}))",
    "$in_array": "({0} IN UNNEST([{1}]))",
    "$is_distinct_from": "({0} IS DISTINCT FROM {1})",
    "$is_not_distinct_from": "({0} IS NOT DISTINCT FROM {1})",
    "$is_null": "({0} IS NULL)",
    "$is_true": "({0} IS TRUE)",
    "$is_false": "({0} IS FALSE)",
    "$and": "({0} AND {0})",
    "$or": "({0} OR {0})",
    "$not": "(NOT {0})",
    "$bitwise_and": "({0} & {1})",
    "$bitwise_or": "({0} | {1})",
    "$bitwise_xor": "({0} ^ {1})",
    "$bitwise_not": "(~{0})",
    "$bitwise_left_shift": "({0} << {1})",
    "$bitwise_right_shift": "({0} >> {1})",
    "$like": "({0} LIKE {1})",
    "$concat_op": "({0} || {1})",
    "$case_with_value": "(CASE {0} WHEN {1} THEN 1 ELSE 2 END)",
    "$case_no_value": "(CASE WHEN {0} THEN 1 ELSE 2 END)",
    "$make_array": "ARRAY_LENGTH([{0}, {0}])",
    "$array_at_offset": "{0}[OFFSET({1})]",
    "$safe_array_at_offset": "{0}[SAFE_OFFSET({1})]",
    "$array_at_ordinal": "{0}[ORDINAL({1})]",
    "$safe_array_at_ordinal": "{0}[SAFE_ORDINAL({1})]",
    "$subscript": "{0}[{1}]",
    "$extract": "EXTRACT(YEAR FROM {0})",
    "$extract_date": "EXTRACT(DATE FROM {0})",
    "$extract_time": "EXTRACT(TIME FROM {0})",
    "$extract_datetime": "EXTRACT(DATETIME FROM {0})",
}
_PARTS = {"time_trunc": "HOUR", "time_diff": "HOUR", "timestamp_diff": "HOUR"}
_LITERALS = {
    **dict.fromkeys(("format_date", "parse_date", "format_datetime", "parse_datetime"), "'%Y'"),
    **dict.fromkeys(("format_timestamp", "parse_timestamp"), "'%Y'"),
    **dict.fromkeys(("format_time", "parse_time"), "'%H'"),
}
_WITH_PATHS = frozenset({"json_remove", "json_set"})
_PATTERNS = frozenset(
    f"regexp_{name}"
    for name in ("contains", "extract", "extract_all", "instr", "replace", "substr")
)
NEVER_ASKED = frozenset(
    {"current_timestamp", "double", "error", "generate_uuid", "lax_double"}
    | {"octet_length", "rand", "regexp_substr", "contains_substr"}
)
"""Functions that have no arguments, are aliases of tested ones, or are unknown to the analyzer."""
_VOLATILE = frozenset({"rand", "generate_uuid", "error"})


def builtin_functions() -> list[Any]:
    """Returns every function in the dialect, as the analyzer describes it."""
    wanted = ZetaSQLBuiltinFunctionOptionsProto()
    wanted.language_options.CopyFrom(language())
    answer = AnalyzerModule().call(
        "GetBuiltinFunctions", wanted, service.GetBuiltinFunctionsResponse
    )
    return list(answer.function)


def null_calls(functions: Sequence[Any], names: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yields each function's name and a query that calls it with a NULL argument."""
    for function in functions:
        name = function.name_path[-1]
        if len(function.name_path) > 1 or name not in names - _VOLATILE:
            continue
        for signature in function.signature:
            for sql in _of_signature(name, signature):
                yield name, sql


def _of_signature(name: str, signature: Any) -> Iterator[str]:
    kinds = [_kind(name, place, argument) for place, argument in enumerate(signature.argument)]
    required = [
        kind
        for kind, argument in zip(kinds, signature.argument, strict=True)
        if argument.options.cardinality == 0 or kind is not None  # 0: REQUIRED
    ]
    if any(kind is None for kind in required):
        return
    for size in {len(required), _required(signature)}:
        wanted = [kind for kind in required[:size] if kind is not None]
        for place, (null, _) in enumerate(wanted):
            if null == "":
                continue
            others = [
                [f"CAST(NULL AS {null})"] if at == place else values
                for at, (_, values) in enumerate(wanted)
            ]
            for chosen in list(product(*others))[:_MOST_VARIANTS]:
                yield f"SELECT {_written(name, chosen)}"


def _required(signature: Any) -> int:
    return sum(1 for argument in signature.argument if argument.options.cardinality == 0)


def _kind(name: str, place: int, argument: Any) -> tuple[str, list[str]] | None:
    """Returns an argument's type name, or "" if it is never NULL, and values of that type."""
    if argument.type.type_kind == types.TYPE_ENUM:
        part = "UNNAMED" if "DateTimestampPart" not in str(argument) else _PARTS.get(name, "DAY")
        return None if part == "UNNAMED" else ("", [part])
    if argument.type.type_kind == types.TYPE_INTERVAL:
        return "", ["INTERVAL 0 DAY", "INTERVAL 1 DAY"]
    if place and name in _WITH_PATHS and argument.type.type_kind == types.TYPE_STRING:
        return "STRING", ["'$.a'"]
    if place == 0 and name in _LITERALS:
        return "", [_LITERALS[name]]
    if place == 1 and name in _PATTERNS:
        return "", ["'a'"]
    if argument.kind == 0 and argument.type.type_kind in _VALUES:  # ARG_TYPE_FIXED
        return _VALUES[argument.type.type_kind]
    if argument.type.type_kind == types.TYPE_ARRAY:
        element = argument.type.array_type.element_type.type_kind
        return {types.TYPE_STRING: _TEXTS, types.TYPE_INT64: _ARRAY}.get(element)
    text = str(argument)
    if "ARRAY_TYPE_ANY" in text or "ARG_ARRAY_TYPE" in text:
        return _ARRAY
    is_any = "ARG_TYPE_ANY" in text or "ARG_TYPE_ARBITRARY" in text
    return _VALUES[types.TYPE_INT64] if is_any else None


def _written(name: str, arguments: Sequence[str]) -> str:
    form = _OPERATORS.get(name)
    if form is not None:
        return form.format(*arguments, *[arguments[-1]] * 3)
    kind = name.rpartition("_")[0]
    if name.endswith(("_add", "_sub")) and kind in ("date", "time", "datetime", "timestamp"):
        part = "HOUR" if kind == "time" else "DAY"
        return f"{name}({arguments[0]}, INTERVAL {arguments[1]} {part})"
    return f"{name}({', '.join(arguments)})"
