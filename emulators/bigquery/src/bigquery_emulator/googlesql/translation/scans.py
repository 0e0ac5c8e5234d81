"""Translates queries: each scan in a resolved tree becomes a SELECT whose columns are named by ID.

Source of the tree: https://github.com/google/googlesql/blob/master/docs/resolved_ast.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.aggregates import aggregate
from bigquery_emulator.googlesql.translation.expressions import expression
from bigquery_emulator.googlesql.translation.ordering import order_by
from bigquery_emulator.googlesql.translation.scope import Scope
from bigquery_emulator.googlesql.translation.windows import window_functions
from bigquery_emulator.tables.schema import quoted

_JOINS = {"INNER": "JOIN", "LEFT": "LEFT JOIN", "RIGHT": "RIGHT JOIN", "FULL": "FULL JOIN"}
_LEVEL = "level"
_MOST_ITERATIONS = 500
"""Maximum iterations of a recursive WITH query, as in the service."""
_SET_OPERATIONS = {
    "UNION_ALL": "UNION ALL",
    "UNION_DISTINCT": "UNION",
    "INTERSECT_DISTINCT": "INTERSECT",
    "EXCEPT_DISTINCT": "EXCEPT",
}


def query(scan: Node, scope: Scope) -> str:
    """Returns the SELECT for a scan. `scope.column` names its columns.

    Raises:
        UnsupportedError: a scan or an expression has no translation.
    """
    translate = _SCANS.get(scan.kind)
    if translate is None:
        raise unsupported(_in_words(scan.kind))
    return translate(scan, scope)


def subquery(node: Node, scope: Scope) -> str:
    """Returns the SQL of a SubqueryExpr."""
    kind = node.enum("subquery_type")
    inner = query(node.subquery, scope)
    if kind == "EXISTS":
        return f"EXISTS ({inner})"
    name = scope.column(node.subquery.column_list[0].column_id)
    if kind == "SCALAR":
        return f"(SELECT {name} FROM ({inner}))"
    if kind == "ARRAY":
        return f"coalesce(ARRAY(SELECT {name} FROM ({inner})), [])"
    if kind == "IN":
        value = expression(node.in_expr, scope)
        is_in = f"({value} IN (SELECT {name} FROM ({inner})))"
        if node.in_expr.type.type_kind == types.TYPE_DOUBLE:
            # NaN is not equal to anything in GoogleSQL.
            unknown = f"CASE WHEN bool_or({name} IS NULL) THEN NULL ELSE false END"
            none = f"(SELECT {unknown} FROM ({inner}))"
            return f"(CASE WHEN isnan({value}) THEN {none} ELSE {is_in} END)"
        return is_in
    raise unsupported(f"Subqueries with {kind.replace('_', ' ')}")


def _single_row(scan: Node, scope: Scope) -> str:
    return "SELECT 1 AS one"


def _table(scan: Node, scope: Scope) -> str:
    if scan.for_system_time_expr is not None:
        raise unsupported("FOR SYSTEM_TIME AS OF")
    source = scope.source(scan.table)
    columns = [
        f"{source.columns[column.name]} AS {scope.column(column.column_id)}"
        for column in scan.column_list
    ]
    return f"SELECT {', '.join(columns) or '1 AS one'} FROM {source.sql}"


def _filter(scan: Node, scope: Scope) -> str:
    return (
        f"SELECT {_columns(scan, scope)} FROM ({query(scan.input_scan, scope)})"
        f" WHERE {expression(scan.filter_expr, scope)}"
    )


def _project(scan: Node, scope: Scope) -> str:
    computed = _computed(scan.expr_list, scope)
    inner = query(scan.input_scan, scope)
    return f"SELECT {_columns(scan, scope, computed)} FROM ({inner})"


def _computed(columns: Iterable[Node], scope: Scope) -> dict[int, str]:
    computed: dict[int, str] = {}
    for column in columns:
        if column.kind != "ComputedColumn":
            raise unsupported(_in_words(column.kind))
        computed[column.column.column_id] = expression(column.expr, scope)
    return computed


def _columns(scan: Node, scope: Scope, computed: dict[int, str] | None = None) -> str:
    """Returns a scan's SELECT list: computed columns, and columns that are passed through."""
    computed, parts, seen = computed or {}, [], set()
    for column in scan.column_list:
        if column.column_id not in seen:
            seen.add(column.column_id)
            name = scope.column(column.column_id)
            sql = computed.get(column.column_id)
            parts.append(name if sql is None else f"{sql} AS {name}")
    return ", ".join(parts) or "1 AS one"


def _join(scan: Node, scope: Scope) -> str:
    if scan.is_lateral:
        raise unsupported("LATERAL joins")
    left_sql, right_sql = query(scan.left_scan, scope), query(scan.right_scan, scope)
    kind = _JOINS[scan.enum("join_type")]
    if scan.join_expr is None:
        joined = f"({left_sql}) CROSS JOIN ({right_sql})"
    else:
        joined = f"({left_sql}) {kind} ({right_sql}) ON {expression(scan.join_expr, scope)}"
    return f"SELECT {_columns(scan, scope)} FROM {joined}"


def _array(scan: Node, scope: Scope) -> str:
    """Translates UNNEST, on its own or joined with its array's source.

    A NULL array has no elements.
    """
    if len(scan.array_expr_list) != 1 or scan.array_zip_mode is not None:
        raise unsupported("UNNEST of several arrays")
    array = expression(scan.array_expr_list[0], scope)
    element = scope.column(scan.element_column_list[0].column_id)
    unnested = [f"unnest({array}) AS {element}"]
    offset = scan.array_offset_column
    if offset is not None or scan.is_outer:
        offset_id = None if offset is None else offset.column.column_id
        name = "place" if offset_id is None else scope.column(offset_id)
        unnested.append(f"unnest(range(len({array}))) AS {name}")
    if scan.is_outer or scan.join_expr is not None:
        return _join_array(scan, scope, array, offset)
    own = {element, *(part.rsplit(" AS ", 1)[1] for part in unnested)}
    passed = [
        name
        for name in dict.fromkeys(scope.column(column.column_id) for column in scan.column_list)
        if name not in own
    ]
    inner = "SELECT 1 AS one" if scan.input_scan is None else query(scan.input_scan, scope)
    made = f"SELECT {', '.join([*passed, *unnested])} FROM ({inner})"
    return f"SELECT {_columns(scan, scope)} FROM ({made})"


def _join_array(scan: Node, scope: Scope, array: str, offset: Node | None) -> str:
    """Translates `LEFT JOIN UNNEST`, or UNNEST with a condition."""
    element = scope.column(scan.element_column_list[0].column_id)
    unnested = [f"unnest({array}) AS {element}"]
    if offset is not None:
        unnested.append(f"unnest(range(len({array}))) AS {scope.column(offset.column.column_id)}")
    kind = "LEFT JOIN" if scan.is_outer else "JOIN"
    condition = "true" if scan.join_expr is None else expression(scan.join_expr, scope)
    inner = query(scan.input_scan, scope)
    return (
        f"SELECT {_columns(scan, scope)} FROM ({inner})"
        f" {kind} LATERAL (SELECT {', '.join(unnested)}) ON {condition}"
    )


def _aggregate(scan: Node, scope: Scope) -> str:
    if scan.grouping_set_list or scan.rollup_column_list or scan.grouping_call_list:
        return _grouping_sets(scan, scope)
    keys = _computed(scan.group_by_list, scope)
    values = {
        aggregated.column.column_id: aggregate(aggregated.expr, scope)
        for aggregated in scan.aggregate_list
    }
    inner = query(scan.input_scan, scope)
    # The keys come first, so that GROUP BY can refer to them by position.
    listed = [f"{sql} AS {scope.column(key)}" for key, sql in {**keys, **values}.items()]
    grouped = f"SELECT {', '.join(listed) or '1 AS one'} FROM ({inner})"
    if keys:
        grouped += f" GROUP BY {', '.join(str(place) for place in range(1, len(keys) + 1))}"
    elif not values:
        grouped += " LIMIT 1"  # An aggregation without keys or results still returns one row.
    return grouped


def _grouping_sets(scan: Node, scope: Scope) -> str:
    """Translates ROLLUP, CUBE, and GROUPING SETS, which the analyzer has expanded into sets."""
    keys = _computed(scan.group_by_list, scope)
    places = {key: f"k{place}" for place, key in enumerate(keys, 1)}
    sets = []
    for grouping_set in scan.grouping_set_list:
        if grouping_set.kind != "GroupingSet":
            raise unsupported("ROLLUP and CUBE inside GROUPING SETS")
        ids = [ref.column.column_id for ref in grouping_set.group_by_column_list]
        sets.append(f"({', '.join(places[key] for key in ids)})")
    if not sets:
        raise unsupported("ROLLUP")
    made = ", ".join(f"{sql} AS {places[key]}" for key, sql in keys.items())
    values = {
        aggregated.column.column_id: aggregate(aggregated.expr, scope)
        for aggregated in scan.aggregate_list
    }
    for call in scan.grouping_call_list:
        key = call.group_by_column.column.column_id
        values[call.output_column.column_id] = f"grouping({places[key]})"
    listed = [f"{places[key]} AS {scope.column(key)}" for key in keys]
    listed += [f"{sql} AS {scope.column(key)}" for key, sql in values.items()]
    inner = f"SELECT *, {made} FROM ({query(scan.input_scan, scope)})"
    return f"SELECT {', '.join(listed)} FROM ({inner}) GROUP BY GROUPING SETS ({', '.join(sets)})"


def _analytic(scan: Node, scope: Scope) -> str:
    computed = window_functions(scan, scope)
    inner = query(scan.input_scan, scope)
    return f"SELECT {_columns(scan, scope, computed)} FROM ({inner})"


def _order_by(scan: Node, scope: Scope) -> str:
    inner = query(scan.input_scan, scope)
    keys = order_by(scan.order_by_item_list, scope)
    return f"SELECT {_columns(scan, scope)} FROM ({inner}) ORDER BY {keys}"


def _limit(scan: Node, scope: Scope) -> str:
    inner = query(scan.input_scan, scope)
    if scan.input_scan.kind != "OrderByScan":
        inner = f"SELECT * FROM ({inner})"
    if scan.limit is not None:
        inner += f" LIMIT {_count(scan.limit, scope)}"
    if scan.offset is not None:
        inner += f" OFFSET {_count(scan.offset, scope)}"
    return f"SELECT {_columns(scan, scope)} FROM ({inner})"


def _count(node: Node, scope: Scope) -> str:
    count = expression(node, scope)
    if node.kind == "Parameter":
        # In DuckDB, NULL means no limit.
        message = "LIMIT and OFFSET must not be null or negative"
        return f"(CASE WHEN {count} >= 0 THEN {count} ELSE error('{message}') END)"
    return count


def _set_operation(scan: Node, scope: Scope) -> str:
    kind = scan.enum("op_type")
    if kind not in _SET_OPERATIONS:
        raise unsupported(kind.replace("_", " "))
    sides = [_rename_columns(item, scan, scope) for item in scan.input_item_list]
    return f" {_SET_OPERATIONS[kind]} ".join(sides)


def _rename_columns(item: Node, scan: Node, scope: Scope) -> str:
    """Returns one side of a set operation, with its columns renamed."""
    names = [
        f"{scope.column(inner.column_id)} AS {scope.column(outer.column_id)}"
        for inner, outer in zip(item.output_column_list, scan.column_list, strict=True)
    ]
    return f"(SELECT {', '.join(names) or '1 AS one'} FROM ({query(item.scan, scope)}))"


def _with(scan: Node, scope: Scope) -> str:
    entries = []
    for entry in scan.with_entry_list:
        if entry.with_subquery.kind == "RecursiveScan":
            scope.recursive_names.append(entry.with_query_name)
        inner = query(entry.with_subquery, scope)
        ids = [column.column_id for column in entry.with_subquery.column_list]
        scope.named_queries[entry.with_query_name] = ids
        entries.append(f"{_query_name(entry.with_query_name, scope)} AS ({inner})")
    word = "WITH RECURSIVE" if scan.recursive else "WITH"
    return f"{word} {', '.join(entries)} {query(scan.query, scope)}"


def _recursive(scan: Node, scope: Scope) -> str:
    """Translates a recursive WITH query.

    Its `level` column counts iterations so that they can be limited.
    """
    if scan.enum("op_type") != "UNION_ALL" or scan.recursion_depth_modifier is not None:
        raise unsupported("WITH RECURSIVE by UNION DISTINCT, or with WITH DEPTH")
    name = scope.recursive_names[-1]
    ids = [column.column_id for column in scan.column_list]
    scope.named_queries[name] = ids
    terms = (scan.non_recursive_term, scan.recursive_term)
    first, again = (_rename_columns(item, scan, scope) for item in terms)
    scope.recursive_names.pop()
    level = f"(SELECT any_value({_LEVEL}) FROM {_query_name(name, scope)}) + 1"
    message = f"A recursive CTE has reached the maximum number of iterations: {_MOST_ITERATIONS}"
    # Checked in a condition, because an unused column would not be computed.
    is_in_time = (
        f"CASE WHEN {level} > {_MOST_ITERATIONS} THEN bq.fail('{message}') = 0 ELSE true END"
    )
    return (
        f"SELECT *, 0 AS {_LEVEL} FROM {first}"
        f" UNION ALL SELECT *, {level} FROM {again} WHERE {is_in_time}"
    )


def _recursive_ref(scan: Node, scope: Scope) -> str:
    """Translates a recursive reference, which returns the rows of the previous iteration."""
    name = scope.recursive_names[-1]
    return _select_named(name, scan, scope)


def _with_ref(scan: Node, scope: Scope) -> str:
    return _select_named(scan.with_query_name, scan, scope)


def _select_named(name: str, scan: Node, scope: Scope) -> str:
    """Returns a WITH query's columns, named as they are in the scan that reads the query."""
    names = [
        f"{scope.column(inner)} AS {scope.column(outer.column_id)}"
        for inner, outer in zip(scope.named_queries[name], scan.column_list, strict=True)
    ]
    return f"SELECT {', '.join(names) or '1 AS one'} FROM {_query_name(name, scope)}"


def _query_name(name: str, scope: Scope) -> str:
    return quoted(f"{scope.prefix}{name}")


def _in_words(kind: str) -> str:
    """Returns the name by which users know a node: `PivotScan` is PIVOT."""
    return kind.removesuffix("Scan").removesuffix("Stmt").upper()


_SCANS: dict[str, Callable[[Any, Scope], str]] = {
    "SingleRowScan": _single_row,
    "TableScan": _table,
    "FilterScan": _filter,
    "ProjectScan": _project,
    "JoinScan": _join,
    "ArrayScan": _array,
    "AggregateScan": _aggregate,
    "AnalyticScan": _analytic,
    "OrderByScan": _order_by,
    "LimitOffsetScan": _limit,
    "SetOperationScan": _set_operation,
    "WithScan": _with,
    "WithRefScan": _with_ref,
    "RecursiveScan": _recursive,
    "RecursiveRefScan": _recursive_ref,
}
