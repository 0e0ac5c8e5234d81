"""Table sizes: the rows of PARTITIONS, TABLE_STORAGE, and `__TABLES__`, computed on demand."""

from bigquery_emulator.engine.information.described import named
from bigquery_emulator.engine.query import table_size
from bigquery_emulator.store import Cursor
from bigquery_emulator.tables.listing import Row, fields
from bigquery_emulator.tables.partition_ids import partition_id_sql
from bigquery_emulator.tables.resources import TableResource
from bigquery_emulator.tables.rows import size_sql

PARTITIONS = fields(
    "table_catalog table_schema table_name partition_id total_rows:INTEGER"
    " total_logical_bytes:INTEGER last_modified_time:TIMESTAMP storage_tier"
)
TABLE_STORAGE = fields(
    "project_id table_catalog table_schema table_name creation_time:TIMESTAMP total_rows:INTEGER"
    " total_partitions:INTEGER total_logical_bytes:INTEGER active_logical_bytes:INTEGER"
    " long_term_logical_bytes:INTEGER deleted:BOOLEAN table_type"
)
LEGACY_TABLES = fields(
    "project_id dataset_id table_id creation_time:INTEGER last_modified_time:INTEGER"
    " row_count:INTEGER size_bytes:INTEGER type:INTEGER"
)
_LEGACY_TABLE, _LEGACY_VIEW = 1, 2


def partition_rows(cursor: Cursor, table: TableResource) -> list[Row]:
    """Returns the PARTITIONS rows for a table. Empty for a view."""
    if table.view_query is not None:
        return []
    return [
        (*named(table), partition_id, rows, size_bytes, table.modified_ms, "ACTIVE")
        for partition_id, rows, size_bytes in _partitions(cursor, table)
    ]


def storage_rows(cursor: Cursor, table: TableResource) -> list[Row]:
    """Returns the TABLE_STORAGE row for a table. Empty for a view."""
    if table.view_query is not None:
        return []
    parts = _partitions(cursor, table)
    rows, size_bytes = sum(part[1] for part in parts), sum(part[2] for part in parts)
    partitions = 0 if table.partitioning is None else len(parts)
    sizes = (rows, partitions, size_bytes, size_bytes, 0)
    return [
        (table.key.project, *named(table), table.created_ms, *sizes, False, "BASE TABLE"),
    ]


def legacy_rows(cursor: Cursor, table: TableResource) -> list[Row]:
    """Returns the `__TABLES__` row for a table or view. Times are in milliseconds since 1970."""
    kind = _LEGACY_TABLE if table.view_query is None else _LEGACY_VIEW
    times = (table.created_ms, table.modified_ms)
    return [(*named(table), *times, *table_size(cursor, table), kind)]


def _partitions(cursor: Cursor, table: TableResource) -> list[tuple[str | None, int, int]]:
    if table.partitioning is None:
        return [(None, *table_size(cursor, table))]
    parts: list[tuple[str | None, int, int]] = cursor.execute(
        f"SELECT {partition_id_sql(table.partitioning)}, count(*),"
        f" CAST(coalesce(sum({size_sql(table.schema)}), 0) AS BIGINT)"
        f" FROM {table.physical} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    return parts
