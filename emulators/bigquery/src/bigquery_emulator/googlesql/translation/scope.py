"""Translates names in a resolved tree to DuckDB's SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported


@dataclass(frozen=True)
class TableSource:
    """The source of a TableScan: DuckDB's SQL after FROM, and the SQL for each column by name."""

    sql: str
    columns: Mapping[str, str]


@dataclass
class Scope:
    """Columns, parameters and tables of a statement.

    Args:
        prefix: prefix of its column names, so that a view's don't collide with surrounding ones.
        sources: tables by the analyzer's keys.
        parameters: DuckDB's SQL for each parameter, by lower-case name or by position from 1.
    """

    prefix: str
    sources: Mapping[str, TableSource]
    parameters: Mapping[str | int, str]
    translate_subquery: Callable[[Node, Scope], str]
    named_queries: dict[str, list[int]] = field(default_factory=dict)
    """Column ids of each WITH query, in order."""
    recursive_names: list[str] = field(default_factory=list)
    """Recursive WITH queries being translated, innermost last."""
    literal_marks: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Placeholders for literals that are filled in later, by their ranges in the statement."""
    targets: dict[int, str] = field(default_factory=dict)
    """SQL for columns that no query below outputs, such as an UPDATE's."""

    def column(self, column_id: int) -> str:
        """Returns a column's name. Ids are unique within a statement."""
        return self.targets.get(column_id) or f"{self.prefix}{column_id}"

    def parameter(self, node: Node) -> str:
        """Returns the value of a Parameter node."""
        parameter = self.parameters.get(node.name.lower() if node.name else node.position)
        if parameter is None:
            raise unsupported("Parameters without a type")
        return parameter

    def subquery(self, node: Node) -> str:
        """Returns the SQL of a SubqueryExpr."""
        return self.translate_subquery(node, self)

    def source(self, table: Any) -> TableSource:
        """Returns the source of a TableScan's table."""
        return self.sources[table.name]
