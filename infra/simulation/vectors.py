"""Values of PromQL and what is computed with them.

Extrapolation of `rate` and `increase`: prometheus/prometheus, promql/functions.go,
`extrapolatedRate`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from infra.simulation.timeseries import Labels, Series

Vector = dict[Labels, float]
Value = float | Vector

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else _divided_by_zero(left),
    "%": math.fmod,
    "^": operator.pow,
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
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
}
OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "avg_over_time": lambda values: sum(values) / len(values),
    "max_over_time": max,
    "min_over_time": min,
    "sum_over_time": sum,
    "count_over_time": lambda values: float(len(values)),
    "last_over_time": lambda values: values[-1],
}
OF_EACH: dict[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "abs": abs,
    "clamp_min": max,
    "clamp_max": min,
    "clamp": lambda value, least, most: min(max(value, least), most),
}


def _divided_by_zero(left: float) -> float:
    return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left)


def increase(series: Series, first: int, last: int, from_s: float, to_s: float) -> float | None:
    """By how much a counter grew, extrapolated to the range. None for less than two samples.

    Args:
        series: the counter.
        first: the place of its first sample in the range.
        last: the place after the last one.
        from_s: the start of the range.
        to_s: its end.
    """
    if last - first < 2:
        return None
    times_s, values = series.times_s, series.values
    start_s, end_s = times_s[first], times_s[last - 1]
    grown = values[last - 1] - values[first]
    if series.has_fallen:
        # A counter that fell began anew at zero.
        pairs = pairwise(values[first:last])
        grown += sum(before for before, after in pairs if after < before)
    sampled_s = end_s - start_s
    mean_s = sampled_s / (last - first - 1)
    to_start_s, to_end_s = start_s - from_s, to_s - end_s
    if to_start_s >= 1.1 * mean_s:
        to_start_s = mean_s / 2
    if grown > 0 and values[first] >= 0:
        # A counter starts at zero, not below.
        to_start_s = min(to_start_s, sampled_s * values[first] / grown)
    if to_end_s >= 1.1 * mean_s:
        to_end_s = mean_s / 2
    return grown * (sampled_s + to_start_s + to_end_s) / sampled_s


def grouping(modifier: Any) -> Callable[[Labels], Labels]:
    """The labels that are left of an element's, by the `by` or `without` of an aggregation."""
    if modifier is None:
        return lambda labels: ()
    kept = frozenset(modifier.labels)
    is_by = str(modifier.type).endswith("By")
    return lambda labels: tuple(pair for pair in labels if (pair[0] in kept) == is_by)


def vector(value: Value) -> Vector:
    """A value as a vector. A number has no labels."""
    return {(): value} if isinstance(value, float) else value


def number(value: Value) -> float:
    """A value as a number."""
    return value if isinstance(value, float) else only(value)


def only(vector: Vector) -> float:
    """The only element of a vector. NaN if there is not exactly one, as `scalar` says."""
    return next(iter(vector.values())) if len(vector) == 1 else math.nan


def each(value: Value, how: Callable[[float], float]) -> Value:
    """A function of one number for each element."""
    if isinstance(value, float):
        return how(value)
    return {labels: how(one) for labels, one in value.items()}


def set_operation(symbol: str, left: Vector, right: Vector) -> Vector:
    """`or`, `and` and `unless`, by all labels."""
    if symbol == "or":
        return {**right, **left}
    is_kept = symbol == "and"
    return {labels: one for labels, one in left.items() if (labels in right) == is_kept}


def combined(left: Value, right: Value, how: Callable[[float, float], float | None]) -> Value:
    """Element by element. Vectors are matched by all of their labels."""
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
