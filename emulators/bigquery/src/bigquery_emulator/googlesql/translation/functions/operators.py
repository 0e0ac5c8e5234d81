"""Operators and conditional expressions.

In GoogleSQL, NaN is not equal to anything and is not greater than any number. In DuckDB, NaN equals
itself and is greater than all numbers, so FLOAT64 comparisons check for it.
"""

from __future__ import annotations

import math

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.googlesql.analysis.types import duckdb_type
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
)

_NESTED = (types.TYPE_ARRAY, types.TYPE_STRUCT)
_TEXTS = (types.TYPE_STRING, types.TYPE_BYTES)
_WHOLE = (types.TYPE_INT64, types.TYPE_NUMERIC)


def _compare(operator: str) -> Translate:
    def write(call: Call) -> str:
        if operator in ("=", "<>") and call.kind() == types.TYPE_STRUCT:
            equal = _equal(call.sql[0], call.sql[1], call.nodes[0].type, call.nodes[1].type)
            return equal if operator == "=" else f"(NOT {equal})"
        _check_comparable(call)
        nan = [_may_be_nan(call, 0), _may_be_nan(call, 1)]
        return comparison(operator, call.sql[0], call.sql[1], nan)

    return write


def _equal(left: str, right: str, kind: TypeProto, other: TypeProto) -> str:
    """True if two values are equal. STRUCTs are compared field by field, by position."""
    if kind.type_kind != types.TYPE_STRUCT:
        if types.TYPE_ARRAY in (kind.type_kind, other.type_kind):
            raise unsupported("Comparison of ARRAY")
        nan = [operand.type_kind == types.TYPE_DOUBLE for operand in (kind, other)]
        return comparison("=", left, right, nan)
    pairs = zip(kind.struct_type.field, other.struct_type.field, strict=True)
    parts = [
        _equal(
            f"struct_extract_at({left}, {place})",
            f"struct_extract_at({right}, {place})",
            field.field_type,
            other_field.field_type,
        )
        for place, (field, other_field) in enumerate(pairs, 1)
    ]
    return f"({' AND '.join(parts)})"


def _not_distinct(left: str, right: str, kind: TypeProto, other: TypeProto) -> str:
    """True if two values are equal or are both NULL; STRUCTs are compared field by field."""
    if types.TYPE_ARRAY in (kind.type_kind, other.type_kind):
        raise unsupported("Comparison of ARRAY")
    if kind.type_kind != types.TYPE_STRUCT:
        return f"({left} IS NOT DISTINCT FROM {right})"
    parts = [f"(({left} IS NULL) = ({right} IS NULL))"]
    pairs = zip(kind.struct_type.field, other.struct_type.field, strict=True)
    for place, (field, other_field) in enumerate(pairs, 1):
        own, wanted = f"struct_extract_at({left}, {place})", f"struct_extract_at({right}, {place})"
        parts.append(_not_distinct(own, wanted, field.field_type, other_field.field_type))
    return f"({' AND '.join(parts)})"


def comparison(operator: str, left: str, right: str, may_be_nan: list[bool]) -> str:
    """Compares two numbers, either of which may be NaN."""
    plain = f"({left} {operator} {right})"
    if operator in ("=", "<>"):
        if not all(may_be_nan):
            return plain
        both = f"isnan({left}) AND isnan({right})"
        return f"(CASE WHEN {both} THEN {'false' if operator == '=' else 'true'} ELSE {plain} END)"
    # The side that would be greater.
    greater, other = (right, left) if operator in ("<", "<=") else (left, right)
    if not may_be_nan[0 if greater is left else 1]:
        return plain
    return f"(CASE WHEN isnan({greater}) AND {other} IS NOT NULL THEN false ELSE {plain} END)"


def _may_be_nan(call: Call, place: int) -> bool:
    if call.kind(place) != types.TYPE_DOUBLE:
        return False
    node = call.nodes[place]
    if node.kind == "Cast" and node.expr.type.type_kind in _WHOLE:
        return False
    return node.kind != "Literal" or math.isnan(node.value.value.double_value)


def _check_comparable(call: Call) -> None:
    if any(call.kind(place) in _NESTED for place in range(len(call.nodes))):
        raise call.refused()


def _between(call: Call) -> str:
    _check_comparable(call)
    if call.kind() != types.TYPE_DOUBLE:
        return call.put("({0} BETWEEN {1} AND {2})")
    nan = [_may_be_nan(call, place) for place in range(3)]
    value, low, high = call.sql
    above = comparison(">=", value, low, [nan[0], nan[1]])
    return f"({above} AND {comparison('<=', value, high, [nan[0], nan[2]])})"


def _in(call: Call) -> str:
    if call.kind() == types.TYPE_STRUCT:
        parts = [
            _equal(call.sql[0], sql, call.nodes[0].type, node.type)
            for sql, node in zip(call.sql[1:], call.nodes[1:], strict=True)
        ]
        return f"({' OR '.join(parts)})"
    _check_comparable(call)
    value, *others = call.sql
    is_in = f"({value} IN ({', '.join(others)}))"
    if not _may_be_nan(call, 0):
        return is_in
    has_null = " OR ".join(f"{other} IS NULL" for other in others)
    unknown = f"CASE WHEN {has_null} THEN CAST(NULL AS BOOLEAN) ELSE false END"
    return f"(CASE WHEN isnan({value}) THEN {unknown} ELSE {is_in} END)"


def _in_array(call: Call) -> str:
    value, array = call.sql
    element = call.nodes[1].type.array_type.element_type.type_kind
    if element in _NESTED or element == types.TYPE_DOUBLE:
        raise call.refused()
    return f"({value} IN (SELECT unnest({array})))"


def _distinct(word: str) -> Translate:
    def write(call: Call) -> str:
        kinds = [node.type for node in call.nodes]
        same = _not_distinct(call.sql[0], call.sql[1], kinds[0], kinds[1])
        return same if word else f"(NOT {same})"

    return write


def _arithmetic(operator: str) -> Translate:
    def write(call: Call) -> str:
        left_sql, right_sql = call.sql
        if call.type.type_kind == types.TYPE_DOUBLE:
            return f"bq.finite({left_sql} {operator} {right_sql}, '{operator}')"
        if call.type.type_kind == types.TYPE_NUMERIC:
            return f"CAST(({left_sql} {operator} {right_sql}) AS DECIMAL(38,9))"
        if call.type.type_kind == types.TYPE_INT64 and call.kind() == call.kind(1):
            return f"({left_sql} {operator} {right_sql})"
        if (
            types.TYPE_DATE in (call.kind(), call.kind(1))
            and call.type.type_kind == types.TYPE_DATE
        ):
            # DATE plus a number of days.
            day, days = (
                (left_sql, right_sql) if call.kind() == types.TYPE_DATE else (right_sql, left_sql)
            )
            return f"bq.add_days({day}, {operator if operator == '-' else ''}({days}))"
        raise call.refused()

    return write


def _divide(call: Call) -> str:
    if call.type.type_kind == types.TYPE_DOUBLE:
        return call.put("bq.divide({0}, {1})")
    if call.type.type_kind == types.TYPE_NUMERIC:
        return call.put("bq.numeric_divide({0}, {1})")
    raise call.refused()


def _bits(operator: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != types.TYPE_INT64:
            raise call.refused()
        if operator == "xor":
            return f"xor({call.sql[0]}, {call.sql[1]})"
        return f"({call.sql[0]} {operator} {call.sql[1]})"

    return write


def _bit_not(call: Call) -> str:
    if call.kind() != types.TYPE_INT64:
        raise call.refused()
    return call.put("(~({0}))")


def _shift(macro: str) -> Translate:
    def write(call: Call) -> str:
        if call.kind() != types.TYPE_INT64:
            raise call.refused()
        return f"bq.{macro}({call.sql[0]}, {call.sql[1]})"

    return write


def _minus(call: Call) -> str:
    if call.kind() == types.TYPE_INT64:
        # A minus sign in front of the smallest number would widen its type.
        return f"(CAST(0 AS BIGINT) - {call.sql[0]})"
    return f"(-({call.sql[0]}))"


def _logic(operator: str) -> Translate:
    return lambda call: f"({f' {operator} '.join(call.sql)})"


def _case_value(call: Call) -> str:
    value, *rest = call.sql
    kind, last = call.nodes[0].type, len(rest) - 1
    return _case(
        [
            _equal(value, sql, kind, call.nodes[place + 1].type)
            if place % 2 == 0 and place < last
            else sql
            for place, sql in enumerate(rest)
        ]
    )


def _null_if(call: Call) -> str:
    equal = _equal(call.sql[0], call.sql[1], call.nodes[0].type, call.nodes[1].type)
    return f"(CASE WHEN {equal} THEN NULL ELSE {call.sql[0]} END)"


def _case_condition(call: Call) -> str:
    return _case(call.sql)


def _case(parts: list[str]) -> str:
    pairs = zip(parts[0::2], parts[1::2], strict=False)
    whens = " ".join(f"WHEN {condition} THEN {value}" for condition, value in pairs)
    otherwise = f" ELSE {parts[-1]}" if len(parts) % 2 else ""
    return f"(CASE {whens}{otherwise} END)"


def _many(name: str) -> Translate:
    return lambda call: f"{name}({', '.join(call.sql)})"


def _extreme(name: str) -> Translate:
    """Translates GREATEST or LEAST, which is NULL if any argument is NULL. DuckDB skips NULLs."""

    def write(call: Call) -> str:
        if call.type.type_kind == types.TYPE_DOUBLE and any(
            _may_be_nan(call, place) for place in range(len(call.sql))
        ):
            has_nan = " OR ".join(f"isnan({sql})" for sql in call.sql)
            plain = f"{name}({', '.join(call.sql)})"
            value = f"CASE WHEN {has_nan} THEN CAST('NaN' AS DOUBLE) ELSE {plain} END"
        else:
            _check_comparable(call)
            value = f"{name}({', '.join(call.sql)})"
        empty = " OR ".join(f"{sql} IS NULL" for sql in call.sql)
        return f"(CASE WHEN {empty} THEN CAST(NULL AS {duckdb_type(call.type)}) ELSE {value} END)"

    return write


def _like(call: Call) -> str:
    if call.kind() != types.TYPE_STRING:
        raise call.refused()
    # GoogleSQL's escape character is a backslash; by default, DuckDB has no escape character.
    return f"({call.sql[0]} LIKE {call.sql[1]} ESCAPE '\\')"


def _error(call: Call) -> str:
    return f"CAST(error('bq: ' || {call.sql[0]}) AS {duckdb_type(call.type)})"


OPERATORS: Functions = {
    "$equal": _compare("="),
    "$not_equal": _compare("<>"),
    "$less": _compare("<"),
    "$less_or_equal": _compare("<="),
    "$greater": _compare(">"),
    "$greater_or_equal": _compare(">="),
    "$between": _between,
    "$in": _in,
    "$in_array": _in_array,
    "$is_distinct_from": _distinct(""),
    "$is_not_distinct_from": _distinct("NOT "),
    "$is_null": "({0} IS NULL)",
    "$is_true": "({0} IS TRUE)",
    "$is_false": "({0} IS FALSE)",
    "$and": _logic("AND"),
    "$or": _logic("OR"),
    "$not": "(NOT {0})",
    "$add": _arithmetic("+"),
    "$subtract": _arithmetic("-"),
    "$multiply": _arithmetic("*"),
    "$divide": _divide,
    "$unary_minus": _minus,
    "$bitwise_and": _bits("&"),
    "$bitwise_or": _bits("|"),
    "$bitwise_xor": _bits("xor"),
    "$bitwise_not": _bit_not,
    "$bitwise_left_shift": _shift("shift_left"),
    "$bitwise_right_shift": _shift("shift_right"),
    "$like": _like,
    "$concat_op": "({0} || {1})",
    "$case_with_value": _case_value,
    "$case_no_value": _case_condition,
    "if": "(CASE WHEN {0} THEN {1} ELSE {2} END)",
    "coalesce": _many("coalesce"),
    "ifnull": "coalesce({0}, {1})",
    "nullif": _null_if,
    "greatest": _extreme("greatest"),
    "least": _extreme("least"),
    "error": _error,
}
