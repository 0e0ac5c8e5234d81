"""Describes datasets, tables, views, and columns: the rows of SCHEMATA, TABLES, COLUMNS, VIEWS."""

from collections.abc import Iterator

from bigquery_emulator.tables.listing import Row, fields
from bigquery_emulator.tables.resources import DatasetResource, TableResource
from bigquery_emulator.tables.schema import Field

SCHEMATA = fields(
    "catalog_name schema_name schema_owner creation_time:TIMESTAMP last_modified_time:TIMESTAMP"
    " location default_collation_name"
)
TABLES = fields(
    "table_catalog table_schema table_name table_type is_insertable_into is_typed"
    " creation_time:TIMESTAMP default_collation_name"
)
VIEWS = fields(
    "table_catalog table_schema table_name view_definition check_option use_standard_sql"
)
MATERIALIZED_VIEWS = fields(
    "table_catalog table_schema table_name last_refresh_time:TIMESTAMP refresh_watermark:TIMESTAMP"
)
COLUMNS = fields(
    "table_catalog table_schema table_name column_name ordinal_position:INTEGER is_nullable"
    " data_type is_generated generation_expression is_stored is_hidden is_updatable"
    " is_system_defined is_partitioning_column clustering_ordinal_position:INTEGER collation_name"
    " column_default rounding_mode"
)
COLUMN_FIELD_PATHS = fields(
    "table_catalog table_schema table_name column_name field_path data_type description"
    " collation_name rounding_mode"
)
# The service's notation for unset values.
_NONE = "NULL"
_SQL_NAMES = {"INTEGER": "INT64", "FLOAT": "FLOAT64", "BOOLEAN": "BOOL"}


def dataset_rows(dataset: DatasetResource) -> list[Row]:
    """Returns the SCHEMATA row for a dataset."""
    key, location = dataset.key, dataset.settings.get("location", "US")
    times = (dataset.created_ms, dataset.modified_ms)
    return [(key.project, key.dataset_id, None, *times, location, _NONE)]


def table_rows(table: TableResource) -> list[Row]:
    """Returns the TABLES row for a table or view."""
    kind, is_insertable = ("VIEW", "NO") if table.view_query is not None else ("BASE TABLE", "YES")
    return [(*named(table), kind, is_insertable, "NO", table.created_ms, _NONE)]


def view_rows(table: TableResource) -> list[Row]:
    """Returns the VIEWS row for a view. Empty for a table."""
    if table.view_query is None:
        return []
    return [(*named(table), table.view_query, None, "YES")]


def column_rows(table: TableResource) -> list[Row]:
    """Returns the COLUMNS rows for a table or view."""
    clustering = [name.lower() for name in table.settings.get("clustering", {}).get("fields", [])]
    partitioned = table.partitioning.column.lower() if table.partitioning else None
    rows: list[Row] = []
    for ordinal, field in enumerate(table.schema, 1):
        name = field.name.lower()
        rows.append(
            (
                *(*named(table), field.name, ordinal),
                *("NO" if field.mode == "REQUIRED" else "YES", sql_type(field)),
                *("NEVER", None, None, "NO", None, "NO"),
                "YES" if name == partitioned else "NO",
                clustering.index(name) + 1 if name in clustering else None,
                *(_NONE, _NONE, None),
            )
        )
    return rows


def field_path_rows(table: TableResource) -> list[Row]:
    """Returns the COLUMN_FIELD_PATHS rows for a table or view, including nested fields."""
    return [
        (*named(table), column.name, path, sql_type(field), field.description, _NONE, None)
        for column in table.schema
        for path, field in _paths(column)
    ]


def sql_type(field: Field) -> str:
    """Returns a field's type as written in GoogleSQL."""
    name = _SQL_NAMES.get(field.type, field.type) + field.limits.sql
    if field.type == "RECORD":
        name = f"STRUCT<{', '.join(f'{inner.name} {sql_type(inner)}' for inner in field.fields)}>"
    return f"ARRAY<{name}>" if field.mode == "REPEATED" else name


def named(table: TableResource) -> tuple[str, str, str]:
    """Returns the columns table_catalog, table_schema, and table_name."""
    return table.key.project, table.key.dataset_id, table.key.table_id


def _paths(field: Field, before: str = "") -> Iterator[tuple[str, Field]]:
    path = before + field.name
    yield path, field
    for inner in field.fields:
        yield from _paths(inner, f"{path}.")
