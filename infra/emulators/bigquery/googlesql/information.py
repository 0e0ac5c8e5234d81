"""INFORMATION_SCHEMA.TABLES and .COLUMNS of a data set, as a query over a list of values."""

from collections.abc import Callable

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import call, cast, number, text, unsupported
from infra.emulators.bigquery.tables.resources import DatasetKey, TableResource
from infra.emulators.bigquery.tables.schema import Field

_TABLES = (
    "table_catalog",
    "table_schema",
    "table_name",
    "table_type",
    "is_insertable_into",
    "creation_time",
)
_COLUMNS = (
    *(
        "table_catalog",
        "table_schema",
        "table_name",
        "column_name",
        "ordinal_position",
        "is_nullable",
    ),
    *("data_type", "is_partitioning_column", "clustering_ordinal_position"),
)
_SQL_NAMES = {"INTEGER": "INT64", "FLOAT": "FLOAT64", "BOOLEAN": "BOOL"}


def information_schema(
    node: exp.Table, project: str, tables_of: Callable[[DatasetKey], list[TableResource]]
) -> exp.Expr:
    """Returns the query behind a name such as `d.INFORMATION_SCHEMA.TABLES`.

    Args:
        node: the name in the statement.
        project: the job's project.
        tables_of: lists the tables of a data set.

    Raises:
        InvalidQueryError: where no data set is named.
        UnsupportedError: for another view than TABLES and COLUMNS.
    """
    view = node.name.upper().split(".")[-1]
    if not node.db:
        raise InvalidQueryError("INFORMATION_SCHEMA must be qualified with a dataset")
    tables = tables_of(DatasetKey(node.catalog or project, node.db))
    if view == "TABLES":
        return _values(_TABLES, [_table_row(table) for table in tables])
    if view == "COLUMNS":
        return _values(_COLUMNS, [row for table in tables for row in _column_rows(table)])
    raise unsupported(f"INFORMATION_SCHEMA.{view}")


def sql_type(field: Field) -> str:
    """Returns a field's type as GoogleSQL writes it."""
    name = _SQL_NAMES.get(field.type, field.type) + field.limits.sql
    if field.type == "RECORD":
        name = f"STRUCT<{', '.join(f'{inner.name} {sql_type(inner)}' for inner in field.fields)}>"
    return f"ARRAY<{name}>" if field.mode == "REPEATED" else name


def _name(table: TableResource) -> list[exp.Expr]:
    return [text(part) for part in (table.key.project, table.key.dataset_id, table.key.table_id)]


def _table_row(table: TableResource) -> list[exp.Expr]:
    is_view = table.view_query is not None
    created = call("bq.from_micros", number(table.created_ms * 1_000))
    return [
        *_name(table),
        text("VIEW" if is_view else "BASE TABLE"),
        text("NO" if is_view else "YES"),
        created,
    ]


def _column_rows(table: TableResource) -> list[list[exp.Expr]]:
    clustering = table.settings.get("clustering", {}).get("fields", [])
    partitioned = table.partitioning.column if table.partitioning else None
    return [
        [
            *_name(table),
            text(field.name),
            number(ordinal),
            text("NO" if field.mode == "REQUIRED" else "YES"),
            text(sql_type(field)),
            text("YES" if field.name == partitioned else "NO"),
            number(clustering.index(field.name) + 1) if field.name in clustering else exp.null(),
        ]
        for ordinal, field in enumerate(table.schema, 1)
    ]


def _values(names: tuple[str, ...], rows: list[list[exp.Expr]]) -> exp.Expr:
    selects = [
        exp.select(*(exp.alias_(value, name) for name, value in zip(names, row, strict=True)))
        for row in rows
    ]
    if not selects:
        nothing = [exp.alias_(cast(exp.null(), "VARCHAR"), name) for name in names]
        return exp.select(*nothing).where(exp.false())
    query: exp.Expr = selects[0]
    for select in selects[1:]:
        query = exp.Union(this=query, expression=select, distinct=False)
    return query
