"""Resolves a statement's table names to their sources.

A table is read from its DuckDB table, a view from its translated query, and INFORMATION_SCHEMA from
a list of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bigquery_emulator.errors import InvalidQueryError, NotFoundError, UnsupportedError
from bigquery_emulator.googlesql.analysis.analyzer import NamedTable, Path
from bigquery_emulator.googlesql.analysis.types import DATE, TIMESTAMP, type_of_field
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.partitions import ReadTable, View
from bigquery_emulator.googlesql.text import name_parts, possible_names
from bigquery_emulator.googlesql.translation.scope import TableSource
from bigquery_emulator.tables.listing import Listing
from bigquery_emulator.tables.resources import (
    PARTITION_TIME,
    DatasetKey,
    TableKey,
    TableResource,
)
from bigquery_emulator.tables.schema import Schema, quoted

PARTITION_DATE = "_PARTITIONDATE"
_MOST_LIKELY_CHARACTERS = 20_000


@dataclass(frozen=True)
class Names:
    """The context in which names are resolved.

    `find` returns a table or raises NotFoundError. `listing` returns an INFORMATION_SCHEMA view's
    rows, given the view's name, the parts of the name that precede it, and the job's project.
    """

    project: str
    default_dataset: DatasetKey | None
    find: Callable[[TableKey], TableResource]
    listing: Callable[[str, Sequence[str], str], Listing]
    listed: list[str] = field(default_factory=list)
    """The INFORMATION_SCHEMA views that were read."""

    def parts(self, path: Path) -> list[str]:
        """Returns a name's parts, whether or not they share one pair of backticks."""
        return [part for segment in path for part in name_parts(segment)]

    def table_key(self, path: Path) -> TableKey:
        """Returns the full name of a table in a statement.

        Raises:
            InvalidQueryError: the name has no dataset, and the job has no default dataset.
            UnsupportedError: the name contains a wildcard or a partition decorator.
        """
        *before, table_id = self.parts(path)
        if "*" in table_id:
            raise unsupported("Wildcard tables")
        if "$" in table_id:
            raise unsupported("Partition decorators in SQL")
        if len(before) > 2:
            raise InvalidQueryError(f'Invalid table name: "{".".join(path)}"')
        if before:
            return TableKey(before[0] if len(before) == 2 else self.project, before[-1], table_id)
        if self.default_dataset is None:
            raise InvalidQueryError(
                f'Table "{table_id}" must be qualified with a dataset (e.g. dataset.table).'
            )
        return TableKey(self.default_dataset.project, self.default_dataset.dataset_id, table_id)

    def table_of(self, path: Path) -> TableResource | None:
        """Returns the table or view with this name, or None if there is none."""
        try:
            return self.find(self.table_key(path))
        except (InvalidQueryError, NotFoundError, UnsupportedError):
            return None


@dataclass(frozen=True)
class NamedSource:
    """A name in a statement, as used by the analyzer, by DuckDB, and by the partition check."""

    named: NamedTable
    source: TableSource
    read: ReadTable


@dataclass(frozen=True)
class TranslatedView:
    """A view's query: the DuckDB SQL, with BigQuery's column names, and its resolved tree."""

    sql: str
    schema: Schema
    view: View


def look_up(
    path: Path, key: str, names: Names, translate_view: Callable[[TableResource], TranslatedView]
) -> NamedSource:
    """Resolves a name in a statement.

    Args:
        names: the context for resolving the name.

    Raises:
        InvalidQueryError: the name has no dataset.
        NotFoundError: the table does not exist.
    """
    listed = _information_view(names.parts(path))
    if listed is not None:
        return _listed(path, key, listed, names)
    table = names.find(names.table_key(path))
    if table.view_query is None:
        if not table.schema:
            raise InvalidQueryError(f"Table {table.key} does not have a schema.")
        return _source(path, key, table.schema, table.physical, ReadTable(table))
    view = translate_view(table)
    return _source(path, key, view.schema, f"({view.sql})", ReadTable(None, view.view))


def likely_sources(sql: str, names: Names) -> tuple[dict[str, NamedSource], list[str]] | None:
    """Guesses which tables a statement may name, based on its words.

    Extra guesses are harmless, because the analyzer looks up only the names that the statement
    reads.

    Args:
        names: the context for resolving names.

    Returns:
        The tables by key, and the names that are in a single pair of backticks. None if the
            analyzer has to find the names because the statement is long, may read views, or has two
            names that differ only in case, which the analyzer treats as one.
    """
    if len(sql) > _MOST_LIKELY_CHARACTERS:
        return None
    paths = [(path, tuple(names.parts(path))) for path in possible_names(sql)]
    spellings = Counter(".".join(parts).lower() for parts in {parts for _, parts in paths})
    sources: dict[str, NamedSource] = {}
    whole: list[str] = []
    for path, parts in paths:
        if _information_view(list(parts)) is not None:
            return None
        table = names.table_of(parts)
        if table is None:
            continue
        key = ".".join(parts)
        if table.view_query is not None or not table.schema or spellings[key.lower()] > 1:
            return None
        sources[key] = _source(parts, key, table.schema, table.physical, ReadTable(table))
        whole += path if len(path) == 1 else ()
    return sources, whole


def _source(path: Path, key: str, schema: Schema, sql: str, read: ReadTable) -> NamedSource:
    columns = [(field.name, type_of_field(field)) for field in schema]
    own = {field.name: quoted(field.name) for field in schema}
    pseudo = []
    if read.table is not None and read.table.has_partition_time:
        pseudo = [(PARTITION_TIME, TIMESTAMP), (PARTITION_DATE, DATE)]
        own[PARTITION_TIME] = quoted(PARTITION_TIME)
        own[PARTITION_DATE] = f"CAST({quoted(PARTITION_TIME)} AS DATE)"
    return NamedSource(NamedTable(path, key, columns, pseudo), TableSource(sql, own), read)


def _information_view(parts: list[str]) -> str | None:
    is_view = len(parts) > 1 and parts[-2].upper() == "INFORMATION_SCHEMA"
    return parts[-1] if is_view or parts[-1].upper() == "__TABLES__" else None


def _listed(path: Path, key: str, view: str, names: Names) -> NamedSource:
    parts = names.parts(path)
    before = parts[:-1] if view.upper() == "__TABLES__" else parts[:-2]
    if not before and names.default_dataset is not None:
        before = [names.default_dataset.project, names.default_dataset.dataset_id]
    names.listed.append(view)
    listing = names.listing(view, before, names.project)
    return _source(path, key, listing.schema, listing.sql(), ReadTable(None))
