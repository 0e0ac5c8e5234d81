"""Translates a resolved tree's names to DuckDB SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported


@dataclass(frozen=True)
class TableSource:
    """A TableScan's source: the DuckDB SQL after FROM, and the SQL for each column by name."""

    sql: str
    columns: Mapping[str, str]


@dataclass
class Scope:
    """A statement's columns, parameters, and tables.

    Args:
        prefix: the prefix for its column names, so that a view's columns don't collide with those
            around it.
        sources: the tables, keyed as in the analyzer.
        parameters: the DuckDB SQL for each parameter, keyed by lowercase name or by position from
            1.
    """

    prefix: str
    sources: Mapping[str, TableSource]
    parameters: Mapping[str | int, str]
    translate_subquery: Callable[[Node, Scope], str]
    named_queries: dict[str, list[int]] = field(default_factory=dict)
    """Each WITH query's column IDs, in order."""
    recursive_names: list[str] = field(default_factory=list)
    """Recursive WITH queries that are being translated, innermost last."""
    literal_marks: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Placeholders for literals to be filled in later, keyed by their ranges in the statement."""
    targets: dict[int, str] = field(default_factory=dict)
    """SQL for columns that are not output by any inner query, such as an UPDATE's."""

    def column(self, column_id: int) -> str:
        """Returns a column's name. IDs are unique within a statement."""
        return self.targets.get(column_id) or f"{self.prefix}{column_id}"

    def parameter(self, node: Node) -> str:
        parameter = self.parameters.get(node.name.lower() if node.name else node.position)
        if parameter is None:
            raise unsupported("Parameters without a type")
        return parameter

    def subquery(self, node: Node) -> str:
        return self.translate_subquery(node, self)

    def source(self, table: Any) -> TableSource:
        """Returns the source of a TableScan's table."""
        return self.sources[table.name]
