"""Evaluates the autoscaler's PromQL queries over simulated time series.

It uses promql-parser, a parser that follows Prometheus. An error names any unsupported expression,
so a rule is never simulated incorrectly.

Semantics: prometheus.io/docs/prometheus/latest/querying; extrapolation of `rate` and `increase` as
in prometheus/prometheus, promql/functions.go, `extrapolatedRate`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import promql_parser as parser

from penstock_planning.simulation.timeseries import (
    Labels,
    Matcher,
    Series,
    TimeSeries,
    newest,
    window,
)
from shared.errors import ConfigurationError

Vector = dict[Labels, float]
Value = float | Vector


def _as_in_go(function: np.ufunc) -> Callable[..., float]:
    """Returns the function with infinities and NaN where Python raises errors."""

    def compute(*values: float) -> float:
        with np.errstate(all="ignore"):
            return float(function(*map(float, values)))

    return compute


def _largest(values: list[float]) -> float:
    """Returns the maximum. Prometheus ignores NaN, unless there is nothing else."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _smallest(values: list[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else _divide_by_zero(left),
    "%": _as_in_go(np.fmod),
    "^": _as_in_go(np.power),
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": _largest,
    "min": _smallest,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
}
OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "avg_over_time": lambda values: sum(values) / len(values),
    "max_over_time": _largest,
    "min_over_time": _smallest,
    "sum_over_time": sum,
    "count_over_time": lambda values: float(len(values)),
    "last_over_time": lambda values: values[-1],
}
OF_EACH: dict[str, Callable[..., float]] = {
    "ceil": _as_in_go(np.ceil),
    "floor": _as_in_go(np.floor),
    "abs": abs,
    "clamp_min": _as_in_go(np.maximum),
    "clamp_max": _as_in_go(np.minimum),
    "clamp": lambda value, least, most: min(max(value, least), most),
}

LOOKBACK_S = 300.0
"""Maximum age of the newest sample in an instant vector, which is Prometheus' default."""

_MATCHES = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


def _divide_by_zero(left: float) -> float:
    return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left)


def increase(series: Series, first: int, last: int, from_s: float, to_s: float) -> float | None:
    """Returns a counter's growth, extrapolated to the range.

    None if there are fewer than two samples.

    Args:
        first: index of the counter's first sample in the range.
        last: index after the counter's last sample in the range.
        from_s: the start of the range.
    """
    if last - first < 2:
        return None
    times_s, values = series.times_s, series.values
    start_s, end_s = times_s[first], times_s[last - 1]
    grown = values[last - 1] - values[first]
    if series.has_fallen:
        # A counter that decreased was reset to zero.
        pairs = pairwise(values[first:last])
        grown += sum(before for before, after in pairs if after < before)
    sampled_s = end_s - start_s
    mean_s = sampled_s / (last - first - 1)
    to_start_s, to_end_s = start_s - from_s, to_s - end_s
    if to_start_s >= 1.1 * mean_s:
        to_start_s = mean_s / 2
    if grown > 0 and values[first] >= 0:
        # A counter starts at zero and never drops below it.
        to_start_s = min(to_start_s, sampled_s * values[first] / grown)
    if to_end_s >= 1.1 * mean_s:
        to_end_s = mean_s / 2
    return grown * (sampled_s + to_start_s + to_end_s) / sampled_s


def grouping(modifier: Any) -> Callable[[Labels], Labels]:
    """Returns a function that keeps the labels selected by an aggregation's `by` or `without`."""
    if modifier is None:
        return lambda labels: ()
    selected = frozenset(modifier.labels)
    is_by = str(modifier.type).endswith("By")
    return lambda labels: tuple(pair for pair in labels if (pair[0] in selected) == is_by)


def vector(value: Value) -> Vector:
    """Returns a value as a vector. A number has no labels."""
    return {(): value} if isinstance(value, float) else value


def number(value: Value) -> float:
    return value if isinstance(value, float) else only(value)


def only(vector: Vector) -> float:
    """Returns a vector's only element. Like `scalar`, returns NaN unless there is exactly one."""
    return next(iter(vector.values())) if len(vector) == 1 else math.nan


def apply_to_each(value: Value, how: Callable[[float], float]) -> Value:
    """Applies a function to each element."""
    if isinstance(value, float):
        return how(value)
    return {labels: how(element) for labels, element in value.items()}


def set_operation(symbol: str, left: Vector, right: Vector) -> Vector:
    """Evaluates `or`, `and`, and `unless`, matching all labels."""
    if symbol == "or":
        return {**right, **left}
    is_kept = symbol == "and"
    return {labels: element for labels, element in left.items() if (labels in right) == is_kept}


def combine(left: Value, right: Value, how: Callable[[float, float], float | None]) -> Value:
    """Combines values element by element. Vectors match if all their labels are equal."""
    if isinstance(left, float) and isinstance(right, float):
        return how(left, right) or 0.0
    return dict(_pairs(left, right, how))


def _pairs(
    left: Value, right: Value, how: Callable[[float, float], float | None]
) -> Iterator[tuple[Labels, float]]:
    for labels in left if isinstance(left, dict) else right:  # type: ignore[union-attr]
        first = left[labels] if isinstance(left, dict) else left
        second = right.get(labels) if isinstance(right, dict) else right
        if second is None:
            continue
        value = how(first, second)
        if value is not None:
            yield labels, value


class PromQuery:
    """One PromQL query, parsed once.

    Raises:
        ConfigurationError: the query can't be parsed, or contains something unsupported.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            parsed = parser.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"query {text!r}: {error}", field="query") from error
        compiler = _Compiler(text)
        self._evaluate = compiler.compile(parsed)
        self.metrics = frozenset(compiler.metrics)
        """Names of the metrics in the query."""
        self.looks_back_s = compiler.looks_back_s
        """Lookback in seconds."""

    def value(self, series: TimeSeries, now_s: float) -> Value:
        """Returns the value at a time in seconds: a number, or a vector keyed by labels."""
        return self._evaluate(_Moment(series, now_s, now_s))


@dataclass(frozen=True, slots=True)
class _Moment:
    """The evaluation time, and the query's time, which determines the samples that have arrived."""

    series: TimeSeries
    at_s: float
    now_s: float


_Step = Callable[[_Moment], Value]


class _Compiler:
    """Compiles an expression into nested functions, so that it is parsed only once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.metrics: set[str] = set()
        self.looks_back_s = 0.0
        self._outer_s = 0.0
        """Range in seconds of the subqueries that enclose the current expression."""

    def compile(self, node: Any) -> _Step:
        kind = type(node).__name__
        method = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise self._make_error(kind)
        step: _Step = method(node)
        return step

    def _make_error(self, construct: str) -> ConfigurationError:
        return ConfigurationError(
            f"query {self._text!r}: {construct} is not supported by the simulation "
            "(penstock_planning/simulation/promql.py)",
            field="query",
        )

    def _parenexpr(self, node: Any) -> _Step:
        return self.compile(node.expr)

    def _numberliteral(self, node: Any) -> _Step:
        value = float(node.val)
        return lambda at: value

    def _unaryexpr(self, node: Any) -> _Step:
        inner = self.compile(node.expr)
        return lambda at: apply_to_each(inner(at), operator.neg)

    def _vectorselector(self, node: Any) -> _Step:
        name, matchers, back_s = self._read_selector(node)

        def step(at: _Moment) -> Value:
            vector: Vector = {}
            for series in at.series.select(name, matchers):
                value = newest(series, at.at_s - back_s, at.now_s, LOOKBACK_S)
                if value is not None:
                    vector[series.labels] = value
            return vector

        return step

    def _read_selector(self, node: Any) -> tuple[str, tuple[Matcher, ...], float]:
        if node.at is not None or node.matchers.or_matchers or node.name is None:
            raise self._make_error("@, `or` between matchers or a selector without a name")
        matchers = tuple(
            Matcher(matcher.name, _MATCHES[str(matcher.op).rpartition(".")[2]], matcher.value)
            for matcher in node.matchers.matchers
        )
        self.metrics.add(node.name)
        back_s = node.offset.total_seconds() if node.offset else 0.0
        self._look_back(back_s + LOOKBACK_S)
        return node.name, matchers, back_s

    def _look_back(self, back_s: float) -> None:
        self.looks_back_s = max(self.looks_back_s, self._outer_s + back_s)

    def _aggregateexpr(self, node: Any) -> _Step:
        how = AGGREGATIONS.get(str(node.op))
        if how is None or node.param is not None:
            raise self._make_error(str(node.op))
        inner, key = self.compile(node.expr), grouping(node.modifier)

        def step(at: _Moment) -> Value:
            groups: dict[Labels, list[float]] = {}
            for labels, value in vector(inner(at)).items():
                groups.setdefault(key(labels), []).append(value)
            return {labels: how(values) for labels, values in groups.items()}

        return step

    def _call(self, node: Any) -> _Step:
        name, arguments = node.func.name, list(node.args)
        if name == "vector":
            scalar = self.compile(arguments[0])
            return lambda at: {(): number(scalar(at))}
        if name == "scalar":
            inner = self.compile(arguments[0])
            return lambda at: only(vector(inner(at)))
        if name == "time":
            return lambda at: at.at_s
        if name == "absent":
            inner = self.compile(arguments[0])
            return lambda at: {} if vector(inner(at)) else {(): 1.0}
        if name in ("rate", "increase", *OVER_TIME):
            return self._over_range(name, arguments[-1])
        if name in OF_EACH:
            return self._of_each(OF_EACH[name], arguments)
        raise self._make_error(f"{name}()")

    def _of_each(self, how: Callable[..., float], arguments: list[Any]) -> _Step:
        first, *others = (self.compile(argument) for argument in arguments)

        def step(at: _Moment) -> Value:
            bounds = [number(other(at)) for other in others]
            if len(bounds) == 2 and bounds[1] < bounds[0]:  # clamp() then has no result
                return {}
            return apply_to_each(first(at), lambda value: float(how(value, *bounds)))

        return step

    def _over_range(self, name: str, node: Any) -> _Step:
        if type(node).__name__ == "SubqueryExpr":
            return self._over_subquery(name, node)
        chosen, matchers, back_s = self._read_selector(node.vector_selector)
        range_s = node.range.total_seconds()
        self._look_back(back_s + range_s)
        how = OVER_TIME.get(name)

        def step(at: _Moment) -> Value:
            to_s = at.at_s - back_s
            vector: Vector = {}
            for series in at.series.select(chosen, matchers):
                first, last = window(series, to_s - range_s, to_s, at.now_s)
                if how is not None:
                    value = how(series.values[first:last]) if last > first else None
                else:
                    value = increase(series, first, last, to_s - range_s, to_s)
                    if value is not None and name == "rate":
                        value /= range_s
                if value is not None:
                    vector[series.labels] = value
            return vector

        return step

    def _over_subquery(self, name: str, node: Any) -> _Step:
        how = OVER_TIME.get(name)
        if how is None or node.at is not None or node.offset is not None or node.step is None:
            raise self._make_error(f"{name}() of such a subquery")
        range_s, step_s = node.range.total_seconds(), node.step.total_seconds()
        self._outer_s += range_s
        inner = self.compile(node.expr)
        self._outer_s -= range_s

        def step(at: _Moment) -> Value:
            groups: dict[Labels, list[float]] = {}
            # A subquery is evaluated at multiples of its step, regardless of the query's time.
            first = math.floor((at.at_s - range_s) / step_s) + 1
            for turn in range(first, math.floor(at.at_s / step_s) + 1):
                moment = _Moment(at.series, turn * step_s, at.now_s)
                for labels, value in vector(inner(moment)).items():
                    groups.setdefault(labels, []).append(value)
            return {labels: how(values) for labels, values in groups.items()}

        return step

    def _binaryexpr(self, node: Any) -> _Step:
        symbol, modifier = str(node.op), node.modifier
        left_step, right_step = self.compile(node.lhs), self.compile(node.rhs)
        if modifier is not None and (modifier.group_labels or modifier.matching):
            raise self._make_error("on, ignoring or group_left")
        if symbol in ("or", "and", "unless"):
            return lambda at: set_operation(symbol, vector(left_step(at)), vector(right_step(at)))
        if symbol in ARITHMETIC:
            how = ARITHMETIC[symbol]
            return lambda at: combine(left_step(at), right_step(at), lambda a, b: how(a, b))
        if symbol in COMPARISONS:
            test = COMPARISONS[symbol]
            if modifier is not None and modifier.return_bool:
                return lambda at: combine(
                    left_step(at), right_step(at), lambda a, b: float(test(a, b))
                )
            return lambda at: combine(
                left_step(at), right_step(at), lambda a, b: a if test(a, b) else None
            )
        raise self._make_error(symbol)
