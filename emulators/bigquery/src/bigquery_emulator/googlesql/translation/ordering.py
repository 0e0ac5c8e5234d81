"""ORDER BY: how GoogleSQL orders NULL and NaN."""

from collections.abc import Sequence

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.expressions import expression
from bigquery_emulator.googlesql.translation.scope import Scope


def order_by(items: Sequence[Node], scope: Scope, *, is_one_key: bool = False) -> str:
    """Returns the keys after ORDER BY.

    NULL sorts before all values, and NaN sorts between NULL and the numbers. DuckDB sorts NaN after
    the numbers.

    Args:
        is_one_key: True if only one key is allowed, as with a RANGE frame that has an offset.
    """
    keys: list[str] = []
    for item in items:
        if item.collation_name is not None:
            raise unsupported("COLLATE")
        key = expression(item.column_ref, scope)
        is_first = item.enum("null_order") == "NULLS_FIRST" or (
            item.enum("null_order") == "ORDER_UNSPECIFIED" and not item.is_descending
        )
        nulls = f"NULLS {'FIRST' if is_first else 'LAST'}"
        direction = "DESC" if item.is_descending else "ASC"
        kind = item.column_ref.type.type_kind
        if kind in (types.TYPE_DOUBLE, types.TYPE_FLOAT) and not is_one_key:
            # Two keys: whether the value is NaN, then the value.
            nan = "ASC" if item.is_descending else "DESC"
            keys.append(f"isnan({key}) {nan} {nulls}")
        keys.append(f"{key} {direction} {nulls}")
    return ", ".join(keys)
