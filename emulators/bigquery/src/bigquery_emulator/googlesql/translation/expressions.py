"""Translates expressions: each node in a resolved tree becomes a DuckDB expression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.analysis.types import struct_field_names
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.casts import cast, limited
from bigquery_emulator.googlesql.translation.functions.registry import Call, is_name, tried
from bigquery_emulator.googlesql.translation.functions.scalar import function
from bigquery_emulator.googlesql.translation.literals import literal, text
from bigquery_emulator.googlesql.translation.scope import Scope
from bigquery_emulator.tables.schema import quoted

_MOVES = {"$add": "add", "$subtract": "sub"}
_MOMENTS = {types.TYPE_TIMESTAMP: "timestamp", types.TYPE_DATETIME: "datetime"}


def expression(node: Node, scope: Scope) -> str:
    """Returns the DuckDB SQL for an expression.

    Args:
        node: an expression in the resolved tree.
        scope: translates the node's columns and parameters.

    Raises:
        UnsupportedError: a node or function has no translation.
    """
    translate = _EXPRESSIONS.get(node.kind)
    if translate is None:
        raise unsupported(f"{node.kind} expressions")
    return translate(node, scope)


def call_of(node: Node, scope: Scope) -> Call:
    """Returns a node's function call, with its arguments as DuckDB SQL."""
    arguments = list(node.argument_list)
    if not arguments and node.generic_argument_list:
        arguments = [argument.expr for argument in node.generic_argument_list]
        if any(argument is None for argument in arguments):
            raise unsupported("Functions with a lambda or a table")
    name = node.function.name.rpartition(":")[2]
    if name in _MOVES and arguments[1].kind == "FunctionCall":
        name, arguments = _moved(name, arguments)
    if name.endswith("_bucket") and arguments[1].type.type_kind == types.TYPE_INTERVAL:
        arguments = [arguments[0], *_span(arguments[1]), *arguments[2:]]
    sql = [_argument(argument, scope) for argument in arguments]
    return Call(name, arguments, sql, node.type)


def _moved(name: str, arguments: list[Node]) -> tuple[str, list[Node]]:
    """Returns `at + INTERVAL 1 DAY` as TIMESTAMP_ADD; an INTERVAL by itself has no translation."""
    moment, span = arguments
    kind = _MOMENTS.get(moment.type.type_kind)
    if kind is None or span.function.name != "ZetaSQL:$interval":
        return name, arguments
    return f"{kind}_{_MOVES[name]}", [moment, *span.argument_list]


def _span(node: Node) -> list[Node]:
    """Returns an INTERVAL's number and date part. An INTERVAL by itself has no translation."""
    if node.kind != "FunctionCall" or node.function.name != "ZetaSQL:$interval":
        raise unsupported("An INTERVAL that is not a number and a date part")
    return list(node.argument_list)


def _argument(node: Node, scope: Scope) -> str:
    # Functions that use names such as DAY read them from the node.
    return "" if is_name(node) else expression(node, scope)


def _literal(node: Node, scope: Scope) -> str:
    if scope.literal_marks:
        place = node.parse_location_range
        mark = scope.literal_marks.get((place.start, place.end))
        if mark is not None:
            return mark
    return literal(node.value.value, node.type)


def _column(node: Node, scope: Scope) -> str:
    return scope.column(node.column.column_id)


def _parameter(node: Node, scope: Scope) -> str:
    return scope.parameter(node)


def _cast(node: Node, scope: Scope) -> str:
    if node.format is not None or node.time_zone is not None:
        raise unsupported("CAST with FORMAT or a time zone")
    value, source, target = expression(node.expr, scope), node.expr.type, node.type
    is_limited = node.type_modifiers.HasField("type_parameters")
    if node.return_null_on_error:
        if is_limited:
            raise unsupported("SAFE_CAST to a type with parameters")
        return tried([node.expr], [value], lambda sql: cast(sql[0], source, target))
    converted = cast(value, source, target)
    if is_limited:
        return limited(converted, target.type_kind, node.type_modifiers.type_parameters)
    return converted


def _make_struct(node: Node, scope: Scope) -> str:
    names = struct_field_names(node.type)
    fields = [
        f"{quoted(name)} := {expression(part, scope)}"
        for name, part in zip(names, node.field_list, strict=True)
    ]
    if not fields:
        raise unsupported("A STRUCT without fields")
    return f"struct_pack({', '.join(fields)})"


def _struct_field(node: Node, scope: Scope) -> str:
    return f"struct_extract_at({expression(node.expr, scope)}, {node.field_idx + 1})"


def _json_field(node: Node, scope: Scope) -> str:
    name = node.field_name.replace('"', '\\"')
    path = text(f'$."{name}"')
    return f"json_extract({expression(node.expr, scope)}, {path})"


def _function(node: Node, scope: Scope) -> str:
    call = call_of(node, scope)
    if node.enum("error_mode") != "SAFE_ERROR_MODE":
        return function(call)
    return tried(call.nodes, call.sql, lambda sql: function(replace(call, sql=sql)))


def _subquery(node: Node, scope: Scope) -> str:
    return scope.subquery(node)


_EXPRESSIONS: dict[str, Callable[[Node, Scope], str]] = {
    "Literal": _literal,
    "ColumnRef": _column,
    "Parameter": _parameter,
    "Cast": _cast,
    "MakeStruct": _make_struct,
    "GetStructField": _struct_field,
    "GetJsonField": _json_field,
    "FunctionCall": _function,
    "SubqueryExpr": _subquery,
}
