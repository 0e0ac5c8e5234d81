"""Checks that queries filter on partitions if a table requires that (`requirePartitionFilter`).

A filter is sufficient if BigQuery could use it to skip partitions: it compares the partitioning
column with a constant in the WHERE or ON clause next to the table. The filter may also be in an
outer query if nothing in between needs the other rows: no LIMIT, and no window or grouping whose
keys do not include the column. Source:
https://docs.cloud.google.com/bigquery/docs/querying-partitioned-tables
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.tables.resources import TableResource

_COMPARISONS = frozenset(
    {"$equal", "$less", "$less_or_equal", "$greater", "$greater_or_equal", "$between", "$in"}
)
_MONOTONE = frozenset(
    {"date", "timestamp", "datetime", "date_trunc", "timestamp_trunc", "datetime_trunc"}
)
"""A filter on the result of one of these functions is treated as a filter on its column, as with
DATE(at) AS day in a view.
"""
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReadTable:
    """The table or view that a name in a statement refers to; a view has its parse tree."""

    table: TableResource | None
    view: View | None = None


@dataclass(frozen=True)
class View:
    """A view's resolved tree and the tables that its names refer to."""

    tree: Node
    reads: Mapping[str, ReadTable]


def check_partition_filters(tree: Node, reads: Mapping[str, ReadTable]) -> None:
    """Rejects a statement that reads an entire table if the table requires a partition filter.

    Args:
        reads: the tables, keyed as in the analyzer.

    Raises:
        InvalidQueryError: the filter is missing; the message names the table and its partitioning
            column.
    """
    checks = _Checks(reads)
    if tree.kind in ("UpdateStmt", "DeleteStmt"):
        filtered = _find_pruning([tree.where_expr])
        checks.check(tree.table_scan, filtered)
        if tree.kind == "UpdateStmt" and tree.from_scan is not None:
            checks.check(tree.from_scan, filtered)
    elif tree.kind == "MergeStmt":
        filtered = _find_pruning([tree.merge_expr])
        checks.check(tree.table_scan, filtered)
        checks.check(tree.from_scan, filtered)
    elif tree.has("query") and tree.query is not None:
        checks.check(tree.query, _NOTHING)
    scans = {"table_scan", "from_scan", "query"}
    for name in ("where_expr", "update_item_list", "merge_expr", "when_clause_list", "row_list"):
        if name not in scans and tree.has(name):
            part = getattr(tree, name)
            checks.check_expressions(part if isinstance(part, list) else [part])


class _Checks:
    def __init__(self, reads: Mapping[str, ReadTable]) -> None:
        self._reads = reads
        self._named: dict[str, Node] = {}

    def check(self, scan: Node, filtered: frozenset[int]) -> None:
        """Checks a scan. Columns in `filtered` are filtered by the surrounding query."""
        if scan.kind == "TableScan":
            self._check_table(scan, filtered)
        elif scan.kind == "FilterScan":
            self.check(scan.input_scan, filtered | _find_pruning([scan.filter_expr]))
            self.check_expressions([scan.filter_expr])
        elif scan.kind == "JoinScan":
            inner = filtered | _find_pruning([scan.join_expr])
            self.check(scan.left_scan, inner)
            self.check(scan.right_scan, inner)
            self.check_expressions([scan.join_expr])
        elif scan.kind == "SetOperationScan":
            self._check_set_operation(scan, filtered)
        elif scan.kind == "WithScan":
            self._named |= {
                entry.with_query_name: entry.with_subquery for entry in scan.with_entry_list
            }
            self.check(scan.query, filtered)
        elif scan.kind == "WithRefScan":
            body = self._named[scan.with_query_name]
            self.check(body, _moved(filtered, scan.column_list, body.column_list))
        else:
            self._check_other(scan, filtered)

    def _check_other(self, scan: Node, filtered: frozenset[int]) -> None:
        for child in scan.children():
            if not child.kind.endswith("Scan"):
                self.check_expressions([child])
            elif scan.kind == "ProjectScan":
                self.check(child, _behind(filtered, scan.expr_list))
            elif scan.kind == "AggregateScan":
                keys = {group_key.column.column_id for group_key in scan.group_by_list}
                self.check(child, _behind(filtered & keys, scan.group_by_list))
            elif scan.kind == "AnalyticScan":
                self.check(child, filtered & _keys_of_windows(scan))
            elif scan.kind in ("OrderByScan", "ArrayScan"):
                self.check(child, filtered)
            else:
                self.check(child, _NOTHING)

    def check_expressions(self, nodes: Iterable[Node | None]) -> None:
        """Checks queries inside expressions. The surrounding query does not filter their tables."""
        for node in nodes:
            if node is None:
                continue
            if node.kind.endswith("Scan"):
                self.check(node, _NOTHING)
            else:
                self.check_expressions(node.children())

    def _check_set_operation(self, scan: Node, filtered: frozenset[int]) -> None:
        for item in scan.input_item_list:
            inner = _moved(filtered, scan.column_list, item.output_column_list)
            self.check(item.scan, inner)

    def _check_table(self, scan: Node, filtered: frozenset[int]) -> None:
        read = self._reads[scan.table.name]
        names = {column.name.lower() for column in scan.column_list if column.column_id in filtered}
        if read.view is not None:
            outputs = read.view.tree.output_column_list
            inner = {output.column.column_id for output in outputs if output.name.lower() in names}
            _Checks(read.view.reads).check(read.view.tree.query, frozenset(inner))
        if read.table is None or read.table.partitioning is None:
            return
        column = read.table.partitioning.column
        if not read.table.partitioning.is_filter_required:
            return
        wanted = {column.lower()}
        if read.table.has_partition_time:
            wanted |= {"_partitiontime", "_partitiondate"}
        if not names & wanted:
            raise InvalidQueryError(
                f"Cannot query over table '{str(read.table.key).replace(':', '.')}' without a"
                f" filter over column(s) '{column}' that can be used for partition elimination"
            )


def _moved(filtered: frozenset[int], outer: Iterable[Any], inner: Iterable[Any]) -> frozenset[int]:
    """Returns the columns at the same positions in an inner list."""
    pairs = zip(outer, inner, strict=True)
    return frozenset(
        inner_column.column_id for own, inner_column in pairs if own.column_id in filtered
    )


def _behind(filtered: frozenset[int], computed: Iterable[Node]) -> frozenset[int]:
    """Returns the columns behind filtered outputs, if unchanged or only truncated to a unit."""
    columns = set(filtered)
    for output in computed:
        if output.column.column_id in filtered:
            columns.discard(output.column.column_id)
            column = _column_behind(output.expr)
            if column is not None:
                columns.add(column)
    return frozenset(columns)


def _column_behind(expr: Node) -> int | None:
    if expr.kind == "ColumnRef":
        return int(expr.column.column_id)
    if expr.kind == "Cast":
        return _column_behind(expr.expr)
    if expr.kind == "FunctionCall" and _name(expr) in _MONOTONE:
        return _column_behind(expr.argument_list[0])
    return None


def _keys_of_windows(scan: Node) -> frozenset[int]:
    """Returns the columns by which all of a scan's windows are partitioned."""
    keys: set[int] | None = None
    for group in scan.function_group_list:
        refs = [] if group.partition_by is None else group.partition_by.partition_by_list
        own = {ref.column.column_id for ref in refs}
        keys = own if keys is None else keys & own
    return frozenset(keys or ())


def _find_pruning(conditions: Iterable[Node | None]) -> frozenset[int]:
    """Returns the columns for which these conditions, joined by AND, allow skipping partitions."""
    return frozenset().union(
        *(_find_pruning_columns(condition) for condition in conditions if condition is not None)
    )


def _find_pruning_columns(condition: Node) -> frozenset[int]:
    if condition.kind != "FunctionCall":
        return _NOTHING
    name, arguments = _name(condition), condition.argument_list
    if name == "$and":
        return _find_pruning(arguments)
    if name == "$or":
        alternatives = [_find_pruning_columns(argument) for argument in arguments]
        return alternatives[0].intersection(*alternatives[1:])
    if name not in _COMPARISONS:
        return _NOTHING
    first, others = arguments[0], arguments[1:]
    found_first = _find_compared_columns(first, others)
    if found_first or len(others) != 1:
        return found_first
    return _find_compared_columns(others[0], [first])


def _find_compared_columns(side: Node, others: Iterable[Node]) -> frozenset[int]:
    moving = {"ColumnRef", "SubqueryExpr"}
    if any(node.kind in moving for other in others for node in other.walk()):
        return _NOTHING
    below = side.walk()
    if any(node.kind == "SubqueryExpr" for node in below):
        return _NOTHING
    columns = {node.column.column_id for node in below if node.kind == "ColumnRef"}
    return frozenset(columns) if len(columns) == 1 else _NOTHING


def _name(call: Node) -> str:
    return str(call.function.name).removeprefix("ZetaSQL:")
