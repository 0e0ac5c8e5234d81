"""Converts GoogleSQL text to a DuckDB statement: names, analysis, checks, translation.

This is the package's entry point, called by query jobs and views. Data definitions are passed on to
`definitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlglot import exp

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.analyzer import Analyzer, ParameterTypes
from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.definition import definition_kind, parse_definition
from bigquery_emulator.googlesql.kept import KeptStatements, LookedUp
from bigquery_emulator.googlesql.names import (
    NamedSource,
    Names,
    TranslatedView,
    likely_sources,
    look_up,
)
from bigquery_emulator.googlesql.parameters import Parameters, read_parameters
from bigquery_emulator.googlesql.partitions import ReadTable, View, check_partition_filters
from bigquery_emulator.googlesql.templates import (
    StatementTemplate,
    StatementText,
    free_literals,
)
from bigquery_emulator.googlesql.text import SplitNames, is_definition
from bigquery_emulator.googlesql.translation.scans import subquery
from bigquery_emulator.googlesql.translation.scope import Scope
from bigquery_emulator.googlesql.translation.statements import (
    Written,
    write_manipulation,
    write_query,
)
from bigquery_emulator.tables.listing import Listing
from bigquery_emulator.tables.resources import DatasetKey, TableKey, TableResource
from bigquery_emulator.tables.schema import Json, Schema

_DEEPEST_VIEW = 16


@dataclass(frozen=True)
class Statement:
    """A statement ready for DuckDB.

    `kind` is the API's statementType. `checks` are queries that must run first, and that fail if
    the statement must fail. `columns` are the lowercase names of the columns read, by table number.
    `schema` has the fields of a query's result. `definition` is the parsed tree of a data
    definition, which has no `sql`. `target` is the table that INSERT, UPDATE, DELETE, or MERGE
    changes. `gives_all` is true if a query returns all rows of a table.
    """

    kind: str
    sql: str
    values: dict[str, Any]
    tables: tuple[TableResource, ...]
    columns: Mapping[int, frozenset[str]]
    schema: Schema = ()
    checks: tuple[str, ...] = ()
    definition: exp.Expr | None = None
    target: TableKey | None = None
    gives_all: bool = False


@dataclass
class _Reads:
    """The tables and columns that a statement reads, including those it reads through views."""

    tables: dict[int, TableResource] = field(default_factory=dict)
    columns: dict[int, frozenset[str]] = field(default_factory=dict)

    def add(self, table: TableResource, columns: frozenset[str]) -> None:
        self.tables[table.number] = table
        self.columns[table.number] = self.columns.get(table.number, frozenset()) | columns


@dataclass(frozen=True)
class Translator:
    """Translates statements for a catalog.

    Args:
        find: returns a table, given its full name, or raises NotFoundError.
        listing: returns an INFORMATION_SCHEMA view's rows, given the view's name, the parts of the
            name that precede it, and the job's project.
    """

    find: Callable[[TableKey], TableResource]
    listing: Callable[[str, Sequence[str], str], Listing]
    analyzer: Analyzer = field(default_factory=Analyzer)
    _kept: KeptStatements[Statement] = field(default_factory=lambda: KeptStatements())
    _templates: KeptStatements[tuple[StatementTemplate, Statement]] = field(
        default_factory=lambda: KeptStatements()
    )

    def translate(
        self,
        sql: str,
        project: str,
        default_dataset: DatasetKey | None,
        parameters: Sequence[Json] = (),
        is_view: bool = False,
    ) -> Statement:
        """Returns the DuckDB statement for a GoogleSQL statement.

        Args:
            project: project for names that don't specify one.
            default_dataset: dataset for names that don't specify one.
            is_view: True for a view's query, whose result may be filtered later.

        Raises:
            InvalidQueryError: BigQuery rejects the statement too.
            NotFoundError: a table does not exist.
            UnsupportedError: this server does not support the statement.
        """
        if is_definition(sql):
            tree = parse_definition(sql)
            return Statement(definition_kind(tree), "", {}, (), {}, definition=tree)
        bound = read_parameters(parameters)
        around = (project, default_dataset, is_view, bound.form())
        statement = self._kept.get((sql, *around))
        if statement is None:
            text = StatementText(sql)
            statement = self._fill_template(text, around)
        if statement is None:
            looked_up = LookedUp(self.find)
            names = Names(project, default_dataset, looked_up, self.listing)
            statement, template = self._translate(sql, names, bound, is_view)
            looked_up.is_lasting = not names.listed
            self._kept.put((sql, *around), looked_up, statement)
            if text.literals:
                self._templates.put((text.key, *around), looked_up, (template, statement))
        return replace(statement, values=bound.values)

    def _fill_template(self, text: StatementText, around: tuple[Hashable, ...]) -> Statement | None:
        """Translates a statement that differs from an earlier one only in its literals."""
        earlier = self._templates.get((text.key, *around)) if text.literals else None
        if earlier is None:
            return None
        template, statement = earlier
        sql = template.filled(text)
        return None if sql is None else replace(statement, sql=sql[0], checks=sql[1:])

    def _translate(
        self, sql: str, names: Names, bound: Parameters, is_view: bool
    ) -> tuple[Statement, StatementTemplate]:
        reads = _Reads()
        tree, sources, scope, read = self._analyze(sql, names, bound, reads, 0)
        if not is_view:
            check_partition_filters(tree, {key: source.read for key, source in sources.items()})
        text = StatementText(read)
        free = free_literals(tree, text)
        scope.literal_marks = free.marks
        written = _written(tree, scope, sources)
        template = StatementTemplate(text, free, (written.sql, *written.checks))
        filled, *checks = template.with_own()
        changed = None if written.kind == "SELECT" else _find_changed_table(tree, sources).key
        statement = Statement(
            written.kind,
            filled,
            {},
            tuple(reads.tables.values()),
            reads.columns,
            written.schema,
            tuple(checks),
            target=changed,
            gives_all=written.kind == "SELECT" and _gives_all(tree),
        )
        return statement, template

    def names(self, project: str, default_dataset: DatasetKey | None) -> Names:
        """Returns the context for resolving a statement's names."""
        return Names(project, default_dataset, self.find, self.listing)

    def _analyze(
        self, sql: str, names: Names, parameters: Parameters, reads: _Reads, depth: int
    ) -> tuple[Node, dict[str, NamedSource], Scope, str]:
        if depth > _DEEPEST_VIEW:
            raise InvalidQueryError(
                f"Resources exceeded: views are nested more than {_DEEPEST_VIEW} levels deep"
            )

        def translate_view(table: TableResource) -> TranslatedView:
            return self._view(table, names, reads, depth + 1)

        tree, sources, read_sql = self._read(sql, names, parameters, translate_view)
        for scan in (node for node in tree.walk() if node.kind == "TableScan"):
            table = sources[scan.table.name].read.table
            if table is not None:
                read = frozenset(column.name.lower() for column in scan.column_list)
                reads.add(table, read)
        scope = Scope(
            "c" if depth == 0 else f"v{depth}c",
            {key: source.source for key, source in sources.items()},
            parameters.sql,
            subquery,
        )
        return tree, sources, scope, read_sql

    def _read(
        self,
        sql: str,
        names: Names,
        parameters: Parameters,
        translate_view: Callable[[TableResource], TranslatedView],
    ) -> tuple[Node, dict[str, NamedSource], str]:
        """Returns a statement's tree, the tables it may read (keyed by name), and its text."""
        likely = likely_sources(sql, names)
        if likely is not None:
            # Getting the names from the analyzer costs half as much as analyzing the statement.
            with suppress(InvalidQueryError):
                tree, read_sql = self._tree(sql, *likely, parameters)
                return tree, likely[0], read_sql
        paths = self.analyzer.table_paths(sql)
        sources = {}
        for path in dict.fromkeys(tuple(names.parts(path)) for path in paths):
            key = ".".join(path)
            sources[key] = look_up(path, key, names, translate_view)
        whole = [path[0] for path in paths if len(path) == 1]
        tree, read_sql = self._tree(sql, sources, whole, parameters)
        return tree, sources, read_sql

    def _tree(
        self,
        sql: str,
        sources: Mapping[str, NamedSource],
        whole: Sequence[str],
        parameters: Parameters,
    ) -> tuple[Node, str]:
        split = SplitNames(sql, whole)
        try:
            tables = [source.named for source in sources.values()]
            return self.analyzer.analyze(split.sql, tables, parameters.types), split.sql
        except InvalidQueryError as error:
            raise InvalidQueryError(split.as_given(error.message)) from error

    def _view(
        self, table: TableResource, around: Names, reads: _Reads, depth: int
    ) -> TranslatedView:
        names = replace(around, project=table.key.project, default_dataset=None)
        nothing = Parameters(ParameterTypes())
        tree, sources, scope, _ = self._analyze(str(table.view_query), names, nothing, reads, depth)
        written = _written(tree, scope, sources)
        if written.kind != "SELECT":
            raise InvalidQueryError("A view's query must be a SELECT")
        inner: dict[str, ReadTable] = {key: source.read for key, source in sources.items()}
        return TranslatedView(written.sql, written.schema, View(tree, inner))


def _written(tree: Node, scope: Scope, sources: Mapping[str, NamedSource]) -> Written:
    if tree.kind == "QueryStmt":
        return write_query(tree, scope)
    return write_manipulation(tree, scope, _find_changed_table(tree, sources).physical)


def _gives_all(tree: Node) -> bool:
    scan = tree.query
    while scan.kind in ("ProjectScan", "OrderByScan"):
        scan = scan.input_scan
    return bool(scan.kind == "TableScan")


def _find_changed_table(tree: Node, sources: Mapping[str, NamedSource]) -> TableResource:
    name = tree.table_scan.table.name
    table = sources[name].read.table
    if table is None:
        raise InvalidQueryError(f"{name} is not allowed for this operation because it is a view")
    return table
