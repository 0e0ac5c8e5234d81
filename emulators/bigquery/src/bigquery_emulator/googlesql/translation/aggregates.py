"""Aggregate and analytic functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context, Decimal

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.analysis.types import struct_field_names
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.expressions import call_of, expression
from bigquery_emulator.googlesql.translation.functions.registry import Call
from bigquery_emulator.googlesql.translation.literals import text
from bigquery_emulator.googlesql.translation.ordering import order_by
from bigquery_emulator.googlesql.translation.scope import Scope

_MOST_QUANTILES = 10_000
_PLACE_DIGITS = 28
_PLACE_CONTEXT = Context(prec=60)


@dataclass(frozen=True)
class Aggregate:
    """An aggregate function call and the text inside its parentheses."""

    call: Call
    node: Node
    distinct: str
    order: str
    over: str

    @property
    def is_plain(self) -> bool:
        """True if the call has neither DISTINCT nor ORDER BY."""
        return not self.distinct and not self.order

    def of(self, name: str, *others: str, condition: str = "") -> str:
        """Returns a call to a DuckDB aggregate function, with the first argument and `others`."""
        inside = ", ".join([*self.call.sql[:1], *others])
        filtering = f" FILTER (WHERE {condition})" if condition else ""
        return f"{name}({self.distinct}{inside}{self.order}){filtering}{self.over}"


def aggregate(node: Node, scope: Scope) -> str:
    """Returns the DuckDB SQL for an AggregateFunctionCall.

    Raises:
        UnsupportedError: a function or modifier has no translation.
    """
    if node.having_modifier is not None:
        return _having(node, scope)
    if node.group_by_list or node.group_by_aggregate_list or node.having_expr is not None:
        raise unsupported("GROUP BY in an aggregate")
    items = node.order_by_item_list
    order = f" ORDER BY {order_by(items, scope)}" if items else ""
    return _write(node, scope, order, "")


def _having(node: Node, scope: Scope) -> str:
    """Returns ANY_VALUE from the row in which another value is the maximum or minimum."""
    call, modifier = call_of(node, scope), node.having_modifier
    if call.name != "any_value":
        raise unsupported("HAVING MAX and HAVING MIN in this aggregate")
    kind = modifier.enum("kind")
    by = modifier.having_expr
    return _at_extreme(
        kind, call.sql[0], expression(by, scope), by.type.type_kind, f"HAVING {kind}"
    )


def _at_extreme(kind: str, value: str, by: str, by_kind: int, told: str) -> str:
    """Returns a value from the row in which another value is the maximum or minimum."""
    if by_kind in (types.TYPE_STRUCT, types.TYPE_ARRAY, types.TYPE_JSON):
        raise unsupported(f"{told} of this type")
    if by_kind == types.TYPE_DOUBLE:
        by = f"bq.not_nan({by}, '{told}')"
    return f"arg_{kind.lower()}_null({value}, {by})"


def _by(kind: str) -> Callable[[Aggregate], str]:

    def write(one: Aggregate) -> str:
        if not one.is_plain:
            raise one.call.refused()
        value, by = one.call.sql
        return _at_extreme(kind, value, by, one.call.kind(1), f"{kind}_BY") + one.over

    return write


def analytic(node: Node, scope: Scope, window: str) -> str:
    """Returns the DuckDB SQL for an AnalyticFunctionCall over a window.

    Args:
        window: the text in the parentheses after OVER.
    """
    call = call_of(node, scope)
    write = _WINDOWS.get(call.name)
    if write is not None:
        if node.distinct or (node.where_expr is not None):
            raise call.refused()
        nulls = node.enum("null_handling_modifier")
        return f"{write(call, nulls)} OVER ({window})"
    return _write(node, scope, "", f" OVER ({window})")


def _write(node: Node, scope: Scope, order: str, over: str) -> str:
    if node.where_expr is not None:
        raise unsupported("WHERE in an aggregate")
    call = call_of(node, scope)
    write = _AGGREGATES.get(call.name)
    if write is None or (node.error_mode and node.enum("error_mode") == "SAFE_ERROR_MODE"):
        raise unsupported(f"Aggregate function {call.name.strip('$').upper()}")
    limit = node.limit if node.has("limit") else None
    if limit is not None and call.name not in _LIMITED:
        raise unsupported("LIMIT in this aggregate")
    distinct = "DISTINCT " if node.distinct else ""
    return write(Aggregate(call, node, distinct, order, over))


def _plain(name: str) -> Callable[[Aggregate], str]:
    return lambda one: one.of(name)


def _count(one: Aggregate) -> str:
    return one.of("count")


def _count_if(one: Aggregate) -> str:
    if one.distinct:
        raise one.call.refused()
    return f"count(CASE WHEN {one.call.sql[0]} THEN true END){one.over}"


def _sum(one: Aggregate) -> str:
    kind = one.call.type.type_kind
    if kind == types.TYPE_INT64:
        return f"CAST({one.of('sum')} AS BIGINT)"
    if kind == types.TYPE_NUMERIC:
        return f"CAST({one.of('sum')} AS DECIMAL(38,9))"
    return f"bq.finite({one.of('sum')}, 'SUM')"


def _avg(one: Aggregate) -> str:
    if one.call.kind() == types.TYPE_NUMERIC:
        if one.distinct:
            raise one.call.refused()
        total, count = one.of("sum"), one.of("count")
        return f"bq.numeric_divide(CAST({total} AS DECIMAL(38,9)), {count})"
    return f"bq.finite({one.of('avg')}, 'AVG')"


def _extreme(name: str) -> Callable[[Aggregate], str]:
    def write(one: Aggregate) -> str:
        if one.call.kind() != types.TYPE_DOUBLE:
            return one.of(name)
        has_nan = f"bool_or(isnan({one.call.sql[0]})){one.over}"
        return f"(CASE WHEN {has_nan} THEN CAST('NaN' AS DOUBLE) ELSE {one.of(name)} END)"

    return write


def _array_agg(one: Aggregate) -> str:
    nulls = one.node.enum("null_handling_modifier")
    value = one.call.sql[0]
    if nulls == "IGNORE_NULLS":
        elements = one.of("list", condition=f"{value} IS NOT NULL")
    else:
        elements = one.of("list")
    return _limit(one, elements)


def _limit(one: Aggregate, found: str) -> str:
    if one.node.has("limit") and one.node.limit is not None:
        return f"list_slice({found}, 1, {one.node.limit.value.value.int64_value})"
    return found


def _array_concat_agg(one: Aggregate) -> str:
    if one.distinct:
        raise one.call.refused()
    return f"flatten({_limit(one, one.of('list', condition=f'{one.call.sql[0]} IS NOT NULL'))})"


def _string_agg(one: Aggregate) -> str:
    if one.call.kind() != types.TYPE_STRING:
        raise one.call.refused()
    separator = one.call.sql[1] if len(one.call.sql) > 1 else "','"
    if len(one.call.sql) > 1 and one.call.text(1) is None:
        raise unsupported("STRING_AGG with a separator that is not a literal")
    elements = one.of("list", condition=f"{one.call.sql[0]} IS NOT NULL")
    return f"array_to_string({_limit(one, elements)}, {separator})"


def _quantiles(one: Aggregate) -> str:
    """Returns exact quantiles, which are valid approximations and are the same on every run."""
    buckets = one.call.integer(1)
    if buckets is None or not 0 < buckets <= _MOST_QUANTILES:
        raise InvalidQueryError("Argument 2 to APPROX_QUANTILES must be a positive integer literal")
    if one.node.enum("null_handling_modifier") == "RESPECT_NULLS" or one.order:
        raise one.call.refused()
    points = ", ".join(f"{place / buckets!r}" for place in range(buckets + 1))
    return one.of("quantile_disc", f"[{points}]")


def _top_count(one: Aggregate) -> str:
    """Returns exact counts, which are valid as approximate counts.

    Among equal counts, the smaller value comes first.
    """
    most = one.call.integer(1)
    if most is None or most < 1:
        raise InvalidQueryError("Argument 2 to APPROX_TOP_COUNT must be a positive integer literal")
    if one.node.enum("null_handling_modifier") != "DEFAULT_NULL_HANDLING" or not one.is_plain:
        raise one.call.refused()
    value, count = struct_field_names(one.call.type.array_type.element_type)
    entry = f"{{{text(value)}: e.v, {text(count)}: -e.c}}"
    return f"list_transform(bq.top_count({one.of('list')}, {most}), lambda e: {entry})"


def _statistic(name: str) -> Callable[[Aggregate], str]:
    def write(one: Aggregate) -> str:
        if any(one.call.kind(place) != types.TYPE_DOUBLE for place in range(len(one.call.sql))):
            raise one.call.refused()
        statistic = f"bq.statistic({one.of(name, *one.call.sql[1:])})"
        if len(one.call.sql) == 1:
            return statistic
        if one.distinct:
            raise one.call.refused()
        # DuckDB returns NaN for a single pair.
        least = 1 if name == "covar_pop" else 2
        count = one.of("regr_count", *one.call.sql[1:])
        return f"(CASE WHEN {count} >= {least} THEN {statistic} END)"

    return write


_LIMITED = frozenset({"array_agg", "string_agg", "array_concat_agg"})
_AGGREGATES: dict[str, Callable[[Aggregate], str]] = {
    "$count_star": lambda one: f"count(*){one.over}",
    "count": _count,
    "countif": _count_if,
    "sum": _sum,
    "avg": _avg,
    "min": _extreme("min"),
    "max": _extreme("max"),
    "max_by": _by("MAX"),
    "min_by": _by("MIN"),
    "any_value": _plain("any_value"),
    "logical_and": _plain("bool_and"),
    "logical_or": _plain("bool_or"),
    "bit_and": _plain("bit_and"),
    "bit_or": _plain("bit_or"),
    "bit_xor": _plain("bit_xor"),
    "array_agg": _array_agg,
    "array_concat_agg": _array_concat_agg,
    "string_agg": _string_agg,
    "approx_count_distinct": lambda one: f"count(DISTINCT {one.call.sql[0]}){one.over}",
    "approx_quantiles": _quantiles,
    "approx_top_count": _top_count,
    "stddev": _statistic("stddev_samp"),
    "stddev_samp": _statistic("stddev_samp"),
    "stddev_pop": _statistic("stddev_pop"),
    "variance": _statistic("var_samp"),
    "var_samp": _statistic("var_samp"),
    "var_pop": _statistic("var_pop"),
    "corr": _statistic("corr"),
    "covar_pop": _statistic("covar_pop"),
    "covar_samp": _statistic("covar_samp"),
}


def _numbering(name: str) -> Callable[[Call, str], str]:
    return lambda call, nulls: f"{name}({', '.join(call.sql)})"


def _write_shifted(name: str) -> Callable[[Call, str], str]:
    def write(call: Call, nulls: str) -> str:
        words = " IGNORE NULLS" if nulls == "IGNORE_NULLS" else ""
        arguments = list(call.sql)
        if name in ("lag", "lead") and len(arguments) > 1:
            # DuckDB would then look in the other direction.
            message = f"The offset to the function {name.upper()} must not be negative"
            arguments[1] = (
                f"CASE WHEN {arguments[1]} < 0 THEN bq.fail('{message}') ELSE {arguments[1]} END"
            )
        return f"{name}({', '.join(arguments)}{words})"

    return write


def _percentile(name: str) -> Callable[[Call, str], str]:
    def write(call: Call, nulls: str) -> str:
        if nulls == "RESPECT_NULLS" or call.nodes[1].kind != "Literal":
            raise call.refused()
        value = call.sql[0]
        if call.kind() == types.TYPE_DOUBLE:
            value = f"bq.not_nan({value}, '{call.name.upper()}')"
        place = call.sql[1]
        if name == "quantile_disc" and call.kind(1) == types.TYPE_DOUBLE:
            place = _exact(call.nodes[1].value.value.double_value)
        return f"{name}({value}, {place})"

    return write


def _exact(place: float) -> str:
    """Returns a percentile as a DECIMAL, which DuckDB multiplies as exactly as GoogleSQL does.

    The lost digits would matter only if there were more rows than fit in memory. The value is
    truncated rather than rounded, so that an exact percentile that falls on a row stays there.
    """
    digits = Decimal(place).quantize(Decimal(1).scaleb(-_PLACE_DIGITS), ROUND_DOWN, _PLACE_CONTEXT)
    return f"CAST('{digits:f}' AS DECIMAL({_PLACE_DIGITS + 1},{_PLACE_DIGITS}))"


_WINDOWS: dict[str, Callable[[Call, str], str]] = {
    "row_number": _numbering("row_number"),
    "rank": _numbering("rank"),
    "dense_rank": _numbering("dense_rank"),
    "percent_rank": _numbering("percent_rank"),
    "cume_dist": _numbering("cume_dist"),
    "ntile": _numbering("ntile"),
    "lag": _write_shifted("lag"),
    "lead": _write_shifted("lead"),
    "first_value": _write_shifted("first_value"),
    "last_value": _write_shifted("last_value"),
    "nth_value": _write_shifted("nth_value"),
    "percentile_cont": _percentile("quantile_cont"),
    "percentile_disc": _percentile("quantile_disc"),
}
