"""What the names in a resolved tree stand for in DuckDB's SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.calls import unsupported


@dataclass(frozen=True)
class TableSource:
    """What a TableScan reads: DuckDB's SQL after FROM, and the SQL of each column by its name."""

    sql: str
    columns: Mapping[str, str]


@dataclass
class Scope:
    """Columns, parameters and tables of one statement.

    Args:
        prefix: begins the names of its columns, so that a view's don't meet those around it.
        sources: the tables by the keys that the analyzer had for them.
        parameters: DuckDB's SQL of each parameter, by its name in lower case or its position
            from 1.
    """

    prefix: str
    sources: Mapping[str, TableSource]
    parameters: Mapping[str | int, str]
    translate_subquery: Callable[[Node, Scope], str]
    named_queries: dict[str, list[int]] = field(default_factory=dict)
    """The column ids of each WITH query, in order."""
    recursive_names: list[str] = field(default_factory=list)
    """The WITH queries that are being translated and refer to themselves, the innermost last."""
    literal_marks: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """What is written for literals that are filled in later, by their ranges in the statement."""
    targets: dict[int, str] = field(default_factory=dict)
    """The SQL of columns that are not output by a query below, such as an UPDATE's."""

    def column(self, column_id: int) -> str:
        """The name of a column. Ids are unique in a statement."""
        return self.targets.get(column_id) or f"{self.prefix}{column_id}"

    def parameter(self, node: Node) -> str:
        """The value of a Parameter node."""
        found = self.parameters.get(node.name.lower() if node.name else node.position)
        if found is None:
            raise unsupported("Parameters without a type")
        return found

    def subquery(self, node: Node) -> str:
        """The SQL of a SubqueryExpr."""
        return self.translate_subquery(node, self)

    def source(self, table: Any) -> TableSource:
        """What a table of a TableScan is read from."""
        return self.sources[table.name]
