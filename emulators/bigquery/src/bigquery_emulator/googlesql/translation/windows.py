"""Window functions: OVER with its partitions, order, and frame."""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.aggregates import analytic
from bigquery_emulator.googlesql.translation.expressions import expression
from bigquery_emulator.googlesql.translation.ordering import order_by
from bigquery_emulator.googlesql.translation.scope import Scope

_FRAME_ENDS = {
    "UNBOUNDED_PRECEDING": "UNBOUNDED PRECEDING",
    "OFFSET_PRECEDING": "PRECEDING",
    "CURRENT_ROW": "CURRENT ROW",
    "OFFSET_FOLLOWING": "FOLLOWING",
    "UNBOUNDED_FOLLOWING": "UNBOUNDED FOLLOWING",
}


def window_functions(scan: Node, scope: Scope) -> dict[int, str]:
    """Returns the DuckDB SQL for each function in an AnalyticScan, by column ID.

    Raises:
        UnsupportedError: a function has no translation.
    """
    computed: dict[int, str] = {}
    for group in scan.function_group_list:
        parts = []
        if group.partition_by is not None:
            keys = [expression(ref, scope) for ref in group.partition_by.partition_by_list]
            parts.append(f"PARTITION BY {', '.join(keys)}")
        items = [] if group.order_by is None else group.order_by.order_by_item_list
        for function in group.analytic_function_list:
            frame = function.expr.window_frame
            by_value = frame is not None and _is_by_value(frame)
            if by_value and items[0].column_ref.type.type_kind == types.TYPE_DOUBLE:
                _check_bounded(frame)
            window = [*parts]
            if items:
                window.append(f"ORDER BY {order_by(items, scope, is_one_key=by_value)}")
            if frame is not None:
                window.append(_frame(frame, scope))
            computed[function.column.column_id] = analytic(function.expr, scope, " ".join(window))
    return computed


def _is_by_value(frame: Node) -> bool:
    """True if a frame's bounds are calculated from the key's value."""
    ends = (frame.start_expr, frame.end_expr)
    is_offset = any(end.enum("boundary_type").startswith("OFFSET") for end in ends)
    return frame.enum("frame_unit") == "RANGE" and is_offset


def _check_bounded(frame: Node) -> None:
    """Rejects frames that may start or end at NaN, which DuckDB sorts at the opposite end."""
    for end in (frame.start_expr, frame.end_expr):
        if end.enum("boundary_type").startswith("UNBOUNDED"):
            raise unsupported("RANGE over FLOAT64 with one end UNBOUNDED")


def _frame(frame: Node, scope: Scope) -> str:
    ends = []
    for end in (frame.start_expr, frame.end_expr):
        words = _FRAME_ENDS[end.enum("boundary_type")]
        if end.expression is not None:
            words = f"{expression(end.expression, scope)} {words}"
        ends.append(words)
    return f"{frame.enum('frame_unit')} BETWEEN {ends[0]} AND {ends[1]}"
