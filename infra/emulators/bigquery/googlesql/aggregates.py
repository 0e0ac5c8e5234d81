"""Aggregate functions whose meaning differs between GoogleSQL and DuckDB: nulls, limits, widths.

Part of the rewriting in rewrite.py.
"""

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import Rewrite, call, number, text, unsupported


def _count_if(node: exp.Expr) -> exp.Expr:
    # DuckDB's count_if is 128 bits wide; COUNT over a CASE is not, and works in a window as well.
    if isinstance(node.this, exp.Distinct):
        raise unsupported("COUNTIF(DISTINCT ...)")
    return exp.Count(this=exp.Case(ifs=[exp.If(this=node.this, true=exp.true())]))


def _quantiles(node: exp.Expr) -> exp.Expr:
    # Exact quantiles: within the promise of an approximation, and the same on every run.
    is_distinct = isinstance(node.this, exp.Distinct)
    value, count = node.this.expressions if is_distinct else (node.this, node.expression)
    plain = count.this if isinstance(count, exp.Cast) else count
    if not (isinstance(plain, exp.Literal) and str(plain.this).isdigit() and int(plain.this) > 0):
        raise InvalidQueryError("Argument 2 to APPROX_QUANTILES must be a positive integer literal")
    buckets = int(plain.this)
    points = exp.Array(
        expressions=[exp.Literal.number(f"{i / buckets!r}") for i in range(buckets + 1)]
    )
    return call(
        "quantile_disc", exp.Distinct(expressions=[value]) if is_distinct else value, points
    )


def _ignore_nulls(node: exp.Expr) -> exp.Expr:
    inner: exp.Expr = node.this
    if isinstance(inner, exp.Anonymous) and inner.name == "quantile_disc":
        return inner
    aggregate = inner.find(exp.ArrayAgg)
    if aggregate is None:
        return node
    kept = _without_nulls(aggregate)
    if aggregate is inner:
        return kept
    aggregate.replace(kept)
    return inner


def _without_nulls(aggregate: exp.Expr) -> exp.Expr:
    value = aggregate.this
    while isinstance(value, exp.Order | exp.Distinct):
        value = value.expressions[0] if isinstance(value, exp.Distinct) else value.this
    condition = exp.Not(this=exp.Is(this=value.copy(), expression=exp.null()))
    return exp.Filter(this=aggregate.copy(), expression=exp.Where(this=condition))


def _array_agg(node: exp.Expr) -> exp.Expr:
    inner = node.this
    if not isinstance(inner, exp.Limit):
        return node
    return call("list_slice", exp.ArrayAgg(this=inner.this), number(1), inner.expression)


def _string_agg(node: exp.Expr) -> exp.Expr:
    inner = node.this
    separator = node.args.get("separator") or text(",")
    if isinstance(inner, exp.Limit):
        kept = _without_nulls(exp.ArrayAgg(this=inner.this))
        return call(
            "array_to_string", call("list_slice", kept, number(1), inner.expression), separator
        )
    return call("string_agg", *_with_separator(inner, separator))


def _with_separator(value: exp.Expr, separator: exp.Expr) -> list[exp.Expr]:
    if not isinstance(value, exp.Order):
        return [value, separator]
    return [value.this, exp.Order(this=separator, expressions=value.expressions)]


AGGREGATES: dict[type[exp.Expr], Rewrite] = {
    exp.CountIf: _count_if,
    exp.ApproxQuantiles: _quantiles,
    exp.IgnoreNulls: _ignore_nulls,
    exp.ArrayAgg: _array_agg,
    exp.GroupConcat: _string_agg,
}
