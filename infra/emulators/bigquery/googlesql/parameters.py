"""Query parameters: puts typed, bound values where a statement says `@name` or `?`."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import cast, unsupported
from infra.emulators.bigquery.tables.schema import Json, parse_schema, quoted
from infra.emulators.bigquery.tables.values import BadValueError, canonical_scalar


@dataclass
class Bindings:
    """The values that the DuckDB statement is run with, by placeholder."""

    values: dict[str, Any] = field(default_factory=dict)

    def bind(self, value: Any) -> exp.Expr:
        """Keeps a value and returns its placeholder."""
        name = f"p{len(self.values)}"
        self.values[name] = value
        return exp.Placeholder(this=name)


def put_parameters(tree: exp.Expr, parameters: Sequence[Json], bindings: Bindings) -> exp.Expr:
    """Replaces the parameters of a statement by typed placeholders.

    Args:
        tree: a parsed statement. It is changed in place.
        parameters: QueryParameter resources, all named or all positional.
        bindings: filled with the values.

    Raises:
        InvalidQueryError: for a parameter that is missing or whose value does not fit its type.
    """
    named = {str(item["name"]).lower(): item for item in parameters if item.get("name")}
    positional = iter([item for item in parameters if not item.get("name")])
    for node in list(tree.find_all(exp.Parameter, exp.SessionParameter)):
        if isinstance(node.this, exp.Parameter) or isinstance(node, exp.SessionParameter):
            raise unsupported("System variables")
        item = named.get(node.name.lower())
        if item is None:
            raise InvalidQueryError(f"Query parameter '{node.name}' not found")
        node.replace(_expression(item, bindings))
    for placeholder in _in_order(tree):
        item = next(positional, None)
        if item is None:
            raise InvalidQueryError(
                "Query parameter number is more than the number of positional parameters"
            )
        placeholder.replace(_expression(item, bindings))
    return tree


def _in_order(tree: exp.Expr) -> list[exp.Expr]:
    return [node for node in tree.dfs() if isinstance(node, exp.Placeholder) and node.this is None]


def _expression(item: Json, bindings: Bindings) -> exp.Expr:
    try:
        return _typed(item["parameterType"], item.get("parameterValue") or {}, bindings)
    except BadValueError as error:
        raise InvalidQueryError(f"Invalid value for query parameter: {error.message}") from error
    except KeyError as error:
        raise InvalidQueryError(f"Query parameter without {error}") from error


def _typed(kind: Json, value: Json, bindings: Bindings) -> exp.Expr:
    name = str(kind["type"]).upper()
    if name == "ARRAY":
        items = [
            _typed(kind["arrayType"], item, bindings) for item in value.get("arrayValues") or []
        ]
        return exp.Cast(this=exp.Array(expressions=items), to=_duckdb_type(kind))
    if name in ("STRUCT", "RECORD"):
        parts = value.get("structValues") or {}
        fields = [
            exp.PropertyEQ(
                this=exp.to_identifier(part["name"], quoted=True),
                expression=_typed(part["type"], parts.get(part["name"]) or {}, bindings),
            )
            for part in kind["structTypes"]
        ]
        return exp.Struct(expressions=fields)
    return _scalar(name, value.get("value"), bindings)


def _scalar(name: str, value: Any, bindings: Bindings) -> exp.Expr:
    (field_,) = parse_schema([{"name": "value", "type": name}])
    if value is not None and field_.type == "BYTES":
        canonical_scalar("BYTES", value)
        return cast(bindings.bind(base64.b64decode(value)), "BLOB")
    return cast(bindings.bind(canonical_scalar(field_.type, value)), field_.duckdb_type)


def _duckdb_type(kind: Json) -> exp.Expr:
    return exp.DataType.build(_type_text(kind), dialect="duckdb")


def _type_text(kind: Json) -> str:
    name = str(kind["type"]).upper()
    if name == "ARRAY":
        return f"{_type_text(kind['arrayType'])}[]"
    if name in ("STRUCT", "RECORD"):
        parts = [
            f"{quoted(part['name'])} {_type_text(part['type'])}" for part in kind["structTypes"]
        ]
        return f"STRUCT({', '.join(parts)})"
    (field_,) = parse_schema([{"name": "value", "type": name}])
    return field_.duckdb_type
