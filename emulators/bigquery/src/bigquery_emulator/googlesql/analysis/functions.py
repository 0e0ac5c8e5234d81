"""BigQuery functions that the analyzer doesn't support.

Some are described to the analyzer here. The others are only listed by name, so that they can be
rejected.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/functions-all
"""

from __future__ import annotations

from typing import Any

from zetasql.wasi._pb2.zetasql.proto import function_pb2 as functions
from zetasql.wasi._pb2.zetasql.public import function_pb2 as enums
from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

_GROUP = "BigQuery"
NOT_HERE = frozenset(
    {
        "AEAD.DECRYPT_BYTES",
        "AEAD.DECRYPT_STRING",
        "AEAD.ENCRYPT",
        "APPENDS",
        "BAG_OF_WORDS",
        "CHANGES",
        "COLLATE",
        "DETERMINISTIC_DECRYPT_BYTES",
        "DETERMINISTIC_DECRYPT_STRING",
        "DETERMINISTIC_ENCRYPT",
        "DLP_DETERMINISTIC_DECRYPT",
        "DLP_DETERMINISTIC_ENCRYPT",
        "DLP_KEY_CHAIN",
        "EXTERNAL_OBJECT_TRANSFORM",
        "EXTERNAL_QUERY",
        "GAP_FILL",
        "JSON_FLATTEN",
        "OBJ.FETCH_METADATA",
        "OBJ.GET_ACCESS_URL",
        "OBJ.GET_READ_URL",
        "OBJ.MAKE_REF",
        "RANGE_SESSIONIZE",
        "SEARCH",
        "ST_REGIONSTATS",
        "TEXT_ANALYZE",
        "TF_IDF",
        "TYPEOF",
        "VECTOR_SEARCH",
    }
)
"""Names from BigQuery's reference that are unknown here."""
NOT_HERE_BEGINNINGS = ("AI.", "KEYS.", "KLL_QUANTILES.", "ML.")


def is_not_here(name: str) -> bool:
    """Returns True if BigQuery has a function with this name but this server does not."""
    name = name.upper()
    return name in NOT_HERE or name.startswith(NOT_HERE_BEGINNINGS)


def own_functions() -> list[functions.FunctionProto]:
    """Returns the functions to describe to the analyzer."""
    any_1, any_2 = enums.ARG_TYPE_ANY_1, enums.ARG_TYPE_ANY_2
    return [
        *(
            _function(name, [_argument(any_1), _argument(any_2, must_support_ordering=True)], any_1)
            for name in ("max_by", "min_by")
        ),
        _function(
            "contains_substr",
            [_argument(any_1), _text(must_be_constant=True)],
            types.TYPE_BOOL,
            is_aggregate=False,
        ),
    ]


def _function(
    name: str, arguments: list[Any], result: int, *, is_aggregate: bool = True
) -> functions.FunctionProto:
    mode = enums.FunctionEnums.AGGREGATE if is_aggregate else enums.FunctionEnums.SCALAR
    function = functions.FunctionProto(name_path=[name], group=_GROUP, mode=mode)
    signature = function.signature.add(argument=arguments)
    signature.return_type.CopyFrom(_argument(result) if is_aggregate else _fixed(result))
    function.options.sql_name = name.upper()
    function.options.supports_over_clause = is_aggregate
    function.options.supports_safe_error_mode = not is_aggregate
    return function


def _argument(kind: int, **options: bool) -> functions.FunctionArgumentTypeProto:
    argument = functions.FunctionArgumentTypeProto(kind=kind, num_occurrences=-1)
    argument.options.cardinality = enums.FunctionEnums.REQUIRED
    for name, value in options.items():
        setattr(argument.options, name, value)
    return argument


def _fixed(kind: int, **options: bool) -> functions.FunctionArgumentTypeProto:
    argument = _argument(enums.ARG_TYPE_FIXED, **options)
    argument.type.type_kind = kind
    return argument


def _text(**options: bool) -> functions.FunctionArgumentTypeProto:
    return _fixed(types.TYPE_STRING, **options)
