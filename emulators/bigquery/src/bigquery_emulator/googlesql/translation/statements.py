"""Statements: queries with BigQuery's column names, and INSERT, UPDATE, DELETE, and MERGE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.analysis.types import field_of
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.expressions import expression
from bigquery_emulator.googlesql.translation.scans import query
from bigquery_emulator.googlesql.translation.scope import Scope
from bigquery_emulator.tables.schema import Schema, quoted

_TWO_MATCHES = "UPDATE/MERGE must match at most one source row for each target row"
_TARGET = "target"


@dataclass(frozen=True)
class Written:
    """A statement as DuckDB SQL.

    `checks` are queries that must run first, in the same transaction, and that fail if the
    statement must fail. `schema` has the fields of a query's result.
    """

    kind: str
    sql: str
    schema: Schema = ()
    checks: tuple[str, ...] = ()


def write_query(tree: Node, scope: Scope) -> Written:
    """Translates a QueryStmt, or the query in a CREATE TABLE or CREATE VIEW.

    Raises:
        InvalidQueryError: two of the result's columns have the same name.
        UnsupportedError: part of the query has no translation.
    """
    names = _result_names([str(output.name) for output in tree.output_column_list])
    schema, parts = [], []
    for name, output in zip(names, tree.output_column_list, strict=True):
        schema.append(field_of(name, output.column.type))
        value = _checked(scope.column(output.column.column_id), output.column.type, name)
        parts.append(f"{value} AS {quoted(name)}")
    sql = f"SELECT {', '.join(parts)} FROM ({query(tree.query, scope)})"
    return Written("SELECT", sql, tuple(schema))


def _result_names(given: Sequence[str]) -> list[str]:
    """Names unnamed columns as BigQuery does: f0_, f1_, and so on.

    Raises:
        InvalidQueryError: a name occurs twice.
    """
    names, unnamed = [], 0
    for name in given:
        if not name or name.startswith("$"):
            name, unnamed = f"f{unnamed}_", unnamed + 1
        names.append(name)
    lower = [name.lower() for name in names]
    for name, low in zip(names, lower, strict=True):
        if lower.count(low) > 1:
            raise InvalidQueryError(
                "Duplicate column names in the result are not supported. Found duplicate(s):"
                f" {name}"
            )
    return names


def _checked(value: str, kind: TypeProto, name: str) -> str:
    """Checks a value for a result or table: NULL arrays become empty; arrays can't contain NULL."""
    has_null = _has_null_element(value, kind)
    if not has_null:
        return value
    message = f"Array cannot have a null element; error in writing field {name}"
    text = message.replace("'", "''")
    checked = f"coalesce({value}, [])" if kind.type_kind == types.TYPE_ARRAY else value
    return f"CASE WHEN {has_null} THEN error('{text}') ELSE {checked} END"


def _has_null_element(value: str, kind: TypeProto, depth: int = 0) -> str:
    """Returns a condition that is true if an array in a value contains NULL.

    Empty if the value has no arrays.
    """
    if kind.type_kind == types.TYPE_STRUCT:
        parts = [
            _has_null_element(f"struct_extract_at({value}, {place})", field.field_type, depth)
            for place, field in enumerate(kind.struct_type.field, 1)
        ]
        return " OR ".join(part for part in parts if part)
    if kind.type_kind != types.TYPE_ARRAY:
        return ""
    condition, element = f"list_count({value}) < len({value})", f"inner{depth}"
    inner = _has_null_element(element, kind.array_type.element_type, depth + 1)
    if inner:
        condition += f" OR len(list_filter({value}, lambda {element}: {inner})) > 0"
    return condition


def write_manipulation(tree: Node, scope: Scope, table: str) -> Written:
    """Translates an INSERT, UPDATE, DELETE, or MERGE statement.

    Args:
        table: the DuckDB name of the table to change.

    Raises:
        UnsupportedError: part of the statement has no translation.
    """
    if tree.has("returning") and tree.returning is not None:
        raise unsupported("THEN RETURN")
    if tree.has("assert_rows_modified") and tree.assert_rows_modified is not None:
        raise unsupported("ASSERT_ROWS_MODIFIED")
    if tree.has("array_offset_column") and tree.array_offset_column is not None:
        raise unsupported("DML of arrays")
    return _STATEMENTS[tree.kind](tree, scope, table)


def _insert(tree: Node, scope: Scope, table: str) -> Written:
    if tree.enum("insert_mode") != "OR_ERROR":
        raise unsupported("INSERT OR ...")
    columns = [quoted(column.name) for column in tree.insert_column_list]
    if tree.query is not None:
        values = [
            _checked(scope.column(own.column_id), own.type, column.name)
            for own, column in zip(
                tree.query_output_column_list, tree.insert_column_list, strict=True
            )
        ]
        rows = f"SELECT {', '.join(values)} FROM ({query(tree.query, scope)})"
    else:
        written = [f"({_row(row, tree.insert_column_list, scope)})" for row in tree.row_list]
        rows = f"VALUES {', '.join(written)}"
    return Written("INSERT", f"INSERT INTO {table} ({', '.join(columns)}) {rows}")


def _row(row: Node, columns: Sequence[Any], scope: Scope) -> str:
    pairs = zip(row.value_list, columns, strict=True)
    return ", ".join(_value(cell, column.name, scope) for cell, column in pairs)


def _value(node: Node, name: str, scope: Scope) -> str:
    if node.value.kind == "DMLDefault":
        return "DEFAULT"
    return _checked(expression(node.value, scope), node.value.type, name)


def _delete(tree: Node, scope: Scope, table: str) -> Written:
    _name_target(tree.table_scan, scope)
    condition = expression(tree.where_expr, scope)
    return Written("DELETE", f"DELETE FROM {table} AS {_TARGET} WHERE {condition}")


def _name_target(scan: Node, scope: Scope) -> None:
    """Makes the changed table's columns readable by their own names."""
    source = scope.source(scan.table)
    for column in scan.column_list:
        own = source.columns[column.name]
        scope.targets[column.column_id] = own.replace(quoted(column.name), _own(column.name))


def _own(name: str) -> str:
    return f"{_TARGET}.{quoted(name)}"


def _update(tree: Node, scope: Scope, table: str) -> Written:
    if tree.from_scan is not None:
        return _update_from(tree, scope, table)
    _name_target(tree.table_scan, scope)
    changes = ", ".join(
        f"{quoted(name)} = {value}" for name, value in _changes(tree.update_item_list, scope)
    )
    condition = expression(tree.where_expr, scope)
    return Written("UPDATE", f"UPDATE {table} AS {_TARGET} SET {changes} WHERE {condition}")


def _changes(items: Sequence[Node], scope: Scope) -> list[tuple[str, str]]:
    """Returns the names of the columns to set and their values."""
    changes = []
    for item in items:
        if item.target.kind != "ColumnRef" or item.set_value is None:
            raise unsupported("Changing a part of a column")
        name = item.target.column.name
        changes.append((name, _value(item.set_value, name, scope)))
    return changes


def _update_from(tree: Node, scope: Scope, table: str) -> Written:
    """Joins first, because two source rows for the same target row are an error."""
    target = tree.table_scan
    names = {column.column_id: scope.column(column.column_id) for column in target.column_list}
    own = ", ".join(
        f"{scope.source(target.table).columns[column.name]} AS {names[column.column_id]}"
        for column in target.column_list
    )
    changes = _changes(tree.update_item_list, scope)
    values = ", ".join(f"{value} AS v{place}" for place, (_, value) in enumerate(changes))
    joined = (
        f"SELECT row, count(*) OVER (PARTITION BY row) AS matches, {values} FROM"
        f" (SELECT rowid AS row{', ' + own if own else ''} FROM {table})"
        f" CROSS JOIN ({query(tree.from_scan, scope)})"
        f" WHERE {expression(tree.where_expr, scope)}"
    )
    sets = ", ".join(
        f"{quoted(name)} = CASE WHEN matches > 1 THEN error('{_TWO_MATCHES}') ELSE v{place} END"
        for place, (name, _) in enumerate(changes)
    )
    sql = f"UPDATE {table} AS {_TARGET} SET {sets} FROM ({joined}) WHERE {_TARGET}.rowid = row"
    return Written("UPDATE", sql)


def _merge(tree: Node, scope: Scope, table: str) -> Written:
    source = query(tree.from_scan, scope)
    check = _two_matches(tree, scope, table, source)
    _name_target(tree.table_scan, scope)
    clauses = [_merge_clause(clause, scope) for clause in tree.when_clause_list]
    sql = (
        f"MERGE INTO {table} AS {_TARGET} USING ({source}) AS source"
        f" ON {expression(tree.merge_expr, scope)} {' '.join(clauses)}"
    )
    return Written("MERGE", sql, checks=() if check is None else (check,))


def _two_matches(tree: Node, scope: Scope, table: str, source: str) -> str | None:
    """Returns a query that fails if a row would be changed twice."""
    clauses = [clause for clause in tree.when_clause_list if clause.enum("match_type") == "MATCHED"]
    if not clauses:
        return None
    columns = scope.source(tree.table_scan.table).columns
    own = "".join(
        f", {columns[column.name]} AS {scope.column(column.column_id)}"
        for column in tree.table_scan.column_list
    )
    conditions = [
        "true" if clause.match_expr is None else expression(clause.match_expr, scope)
        for clause in clauses
    ]
    return (
        f"SELECT error('{_TWO_MATCHES}') FROM (SELECT row FROM"
        f" (SELECT rowid AS row{own} FROM {table}) JOIN ({source})"
        f" ON {expression(tree.merge_expr, scope)} WHERE {' OR '.join(conditions)}"
        " GROUP BY row HAVING count(*) > 1)"
    )


def _merge_clause(clause: Node, scope: Scope) -> str:
    when = {
        "MATCHED": "WHEN MATCHED",
        "NOT_MATCHED_BY_SOURCE": "WHEN NOT MATCHED BY SOURCE",
        "NOT_MATCHED_BY_TARGET": "WHEN NOT MATCHED BY TARGET",
    }[clause.enum("match_type")]
    if clause.match_expr is not None:
        when += f" AND {expression(clause.match_expr, scope)}"
    action = clause.enum("action_type")
    if action == "DELETE":
        return f"{when} THEN DELETE"
    if action == "INSERT":
        names = ", ".join(quoted(column.name) for column in clause.insert_column_list)
        values = _row(clause.insert_row, clause.insert_column_list, scope)
        return f"{when} THEN INSERT ({names}) VALUES ({values})"
    changes = _changes(clause.update_item_list, scope)
    sets = ", ".join(f"{quoted(name)} = {value}" for name, value in changes)
    return f"{when} THEN UPDATE SET {sets}"


_STATEMENTS: dict[str, Callable[[Node, Scope, str], Written]] = {
    "InsertStmt": _insert,
    "UpdateStmt": _update,
    "DeleteStmt": _delete,
    "MergeStmt": _merge,
}
