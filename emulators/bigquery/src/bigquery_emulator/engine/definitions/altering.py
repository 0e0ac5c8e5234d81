"""ALTER TABLE: the result of applying its actions in order.

The result is written in one transaction, so either all of the actions are applied or none are.
Source:
https://docs.cloud.google.com/bigquery/docs/reference/standard-sql/data-definition-language#alter_table_add_column_statement
"""

from dataclasses import dataclass, field, replace

import sqlglot
from sqlglot import exp

from bigquery_emulator.engine.definitions.columns import column, column_options, typed
from bigquery_emulator.engine.definitions.options import Evaluate, table_options
from bigquery_emulator.engine.definitions.text import option_texts, words
from bigquery_emulator.errors import DuplicateError, InvalidQueryError
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.tables.resources import TableResource
from bigquery_emulator.tables.schema import Field, Json, Schema, parse_schema, quoted
from bigquery_emulator.tables.settings import merged

# Types to which a column's values can be converted without loss, as allowed by ALTER COLUMN SET
# DATA TYPE.
_WIDER = {"INTEGER": ("NUMERIC", "FLOAT"), "NUMERIC": ("FLOAT",)}


@dataclass
class Shape:
    """A table's future shape.

    `sources` maps each field that is kept to DuckDB SQL over the old columns. `is_only_wider` means
    that no new table is needed: columns were only added or made optional.
    """

    schema: Schema
    settings: Json
    sources: dict[str, str] = field(default_factory=dict)
    is_only_wider: bool = True


def altered(table: TableResource, actions: list[str], evaluate: Evaluate) -> Shape:
    """Returns the table after applying an ALTER TABLE statement's actions.

    Args:
        table: the table or view.

    Raises:
        DuplicateError: a column already exists.
        InvalidQueryError: a column does not exist, or BigQuery rejects the change.
        UnsupportedError: this server does not support the action.
    """
    sources = {field.name: quoted(field.name) for field in table.schema}
    shape = Shape(table.schema, table.settings, sources)
    for text in actions:
        _apply(shape, text, evaluate)
    return shape


def _apply(shape: Shape, text: str, evaluate: Evaluate) -> None:
    start = words(text)
    if start[:2] == ["SET", "OPTIONS"]:
        changes = table_options(option_texts(text), evaluate)
        shape.settings = merged(shape.settings, changes)
    elif start[:2] == ["ADD", "COLUMN"]:
        _add(shape, _parsed(text, exp.ColumnDef))
    elif start[:2] == ["DROP", "COLUMN"]:
        _drop(shape, _parsed(text, exp.Drop))
    elif start[:2] == ["RENAME", "COLUMN"]:
        _rename(shape, _parsed(text, exp.RenameColumn))
    elif start[:2] == ["ALTER", "COLUMN"]:
        _alter_column(shape, text, start)
    else:
        raise unsupported(f"ALTER TABLE {' '.join(start[:2])}")


def _parsed(text: str, kind: type[exp.Expr]) -> exp.Expr:
    try:
        tree = sqlglot.parse_one(f"ALTER TABLE t {text}", dialect="bigquery")
    except sqlglot.errors.SqlglotError as error:
        raise InvalidQueryError(f"Syntax error in: {text}") from error
    actions = tree.args.get("actions") or [None]
    if not isinstance(actions[0], kind):
        raise unsupported(f"ALTER TABLE {text}")
    return actions[0]


def _add(shape: Shape, node: exp.Expr) -> None:
    assert isinstance(node, exp.ColumnDef)
    if _position(shape, node.name, is_needed=False) is not None:
        if node.args.get("exists"):
            return
        raise DuplicateError(f"Column already exists: {node.name}")
    (added,) = parse_schema([column(node)])
    if added.mode == "REQUIRED":
        raise InvalidQueryError(f"Cannot add required columns to an existing table: {added.name}")
    shape.schema = (*shape.schema, added)


def _drop(shape: Shape, node: exp.Expr) -> None:
    (name,) = (part.name for part in node.args["tables"])
    position = _position(shape, name, not node.args.get("exists"))
    if position is None:
        return
    dropped = shape.schema[position]
    _check_free(shape, dropped)
    rest = (*shape.schema[:position], *shape.schema[position + 1 :])
    if not rest:
        raise InvalidQueryError("Cannot drop the only column of a table")
    shape.schema = rest
    shape.sources.pop(dropped.name, None)
    shape.is_only_wider = False


def _rename(shape: Shape, node: exp.Expr) -> None:
    position = _position(shape, node.this.name, not node.args.get("exists"))
    if position is None:
        return
    new = node.args["to"].name
    old = shape.schema[position]
    position_of_new = _position(shape, new, is_needed=False)
    if position_of_new is not None and position_of_new != position:
        raise DuplicateError(f"Column already exists: {new}")
    _check_free(shape, old)
    (named,) = parse_schema([{**old.resource(), "name": new}])
    _put(shape, position, named)
    if old.name in shape.sources:
        shape.sources[new] = shape.sources.pop(old.name)
    shape.is_only_wider = False


def _alter_column(shape: Shape, text: str, start: list[str]) -> None:
    is_optional = start[2:4] == ["IF", "EXISTS"]
    rest = start[4:] if is_optional else start[2:]
    position = _position(shape, rest[0], not is_optional) if rest else None
    if position is None:
        return
    old, action = shape.schema[position], rest[1:]
    if action[:2] == ["SET", "OPTIONS"]:
        # A column's options are parsed in the same way as a table's.
        at = text.upper().rindex("OPTIONS", 0, text.index("(") + 1)
        (changes,) = _parsed(f"SET {text[at:]}", exp.AlterSet).expressions
        _put(shape, position, replace(old, **column_options(changes)))
    elif action == ["DROP", "NOT", "NULL"]:
        if old.mode != "REQUIRED":
            raise InvalidQueryError(f"Column {old.name} has no NOT NULL constraint to drop")
        _put(shape, position, replace(old, mode="NULLABLE"))
    elif action[:3] == ["SET", "DATA", "TYPE"]:
        node = _parsed(f"ALTER COLUMN c {text[text.upper().index('SET') :]}", exp.AlterColumn)
        _put(shape, position, _change_type(old, node.args["dtype"]))
        shape.is_only_wider = False
    else:
        raise unsupported(f"ALTER COLUMN {' '.join(action[:2])}")


def _change_type(old: Field, kind: exp.DataType) -> Field:
    wanted = {**old.resource(), **typed(old.name, kind)}
    for name in ("maxLength", "precision", "scale"):
        wanted[name] = typed(old.name, kind).get(name)
    if wanted["mode"] == "REPEATED" and old.mode != "REPEATED":
        raise _cannot(old, kind)
    (new,) = parse_schema([wanted])
    is_same = new.type == old.type and new.type != "RECORD"
    if not (is_same or new.type in _WIDER.get(old.type, ())):
        raise _cannot(old, kind)
    if is_same and not new.limits.holds(old.limits):
        raise _cannot(old, kind)
    return new


def _cannot(old: Field, kind: exp.DataType) -> InvalidQueryError:
    return InvalidQueryError(
        f"ALTER TABLE ALTER COLUMN SET DATA TYPE requires that the existing column type"
        f" ({old.type}{old.limits.sql}) is assignable to the new type ({kind.sql('bigquery')})"
    )


def _position(shape: Shape, name: str, is_needed: bool) -> int | None:
    for position, candidate in enumerate(shape.schema):
        if candidate.name.lower() == name.lower():
            return position
    if is_needed:
        raise InvalidQueryError(f"Column not found: {name}")
    return None


def _put(shape: Shape, position: int, new: Field) -> None:
    shape.schema = (*shape.schema[:position], new, *shape.schema[position + 1 :])


def _check_free(shape: Shape, old: Field) -> None:
    """Rejects removing a column that is used to partition or cluster the table."""
    for name in ("timePartitioning", "rangePartitioning"):
        if str(shape.settings.get(name, {}).get("field", "")).lower() == old.name.lower():
            raise InvalidQueryError(f"Cannot change the partitioning column {old.name}")
    clustering = shape.settings.get("clustering", {}).get("fields", [])
    if old.name.lower() in (name.lower() for name in clustering):
        raise InvalidQueryError(f"Cannot change the clustering column {old.name}")
