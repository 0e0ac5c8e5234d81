"""Stores datasets and tables in the database along with the rows.

The catalog calls this module in its own transactions.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb

from bigquery_emulator.errors import ServiceError
from bigquery_emulator.store import Cursor
from bigquery_emulator.tables.fields import read_fields
from bigquery_emulator.tables.resource_fields import DatasetFields, SchemaFields, TableFields
from bigquery_emulator.tables.resources import (
    DatasetKey,
    DatasetResource,
    TableKey,
    TableResource,
)
from bigquery_emulator.tables.schema import Schema, parse_schema

log = logging.getLogger(__name__)

_SETUP = """
CREATE TABLE IF NOT EXISTS data.main.datasets (
  project VARCHAR, dataset_id VARCHAR, settings VARCHAR, created_ms BIGINT, modified_ms BIGINT,
  PRIMARY KEY (project, dataset_id)
);
CREATE TABLE IF NOT EXISTS data.main.tables (
  number BIGINT PRIMARY KEY, project VARCHAR, dataset_id VARCHAR, table_id VARCHAR, fields VARCHAR,
  settings VARCHAR, created_ms BIGINT, modified_ms BIGINT
);
CREATE SEQUENCE IF NOT EXISTS data.main.table_numbers;
"""


def load(
    cursor: Cursor,
) -> tuple[dict[DatasetKey, DatasetResource], dict[TableKey, TableResource]]:
    """Returns the catalog that an earlier run left in the database.

    If the database is new, it is set up first.
    """
    cursor.execute(_SETUP)
    datasets, tables = {}, {}
    for project, name, settings, created_ms, modified_ms in cursor.execute(
        "SELECT * FROM data.main.datasets"
    ).fetchall():
        key = DatasetKey(project, name)
        with _left_out(key):
            read = read_fields(json.loads(settings), DatasetFields)
            datasets[key] = DatasetResource(key, read, created_ms, modified_ms)
    for number, *name, fields, settings, created_ms, modified_ms in cursor.execute(
        "SELECT * FROM data.main.tables"
    ).fetchall():
        table_key = TableKey(*name)
        with _left_out(table_key):
            if table_key.dataset not in datasets:
                raise ValueError("its dataset is missing")
            table = TableResource(
                table_key,
                number,
                _schema(json.loads(fields)),
                read_fields(json.loads(settings), TableFields),
                created_ms,
                modified_ms,
            )
            if table.view_query is None:
                cursor.execute(f"SELECT 1 FROM {table.physical} LIMIT 0")
            tables[table_key] = table
    return datasets, tables


def _schema(fields: Any) -> Schema:
    read = read_fields({"schema": {"fields": fields}}, SchemaFields)
    return parse_schema(read["schema"].get("fields", ()))


@contextmanager
def _left_out(key: DatasetKey | TableKey) -> Iterator[None]:
    """Logs which record can't be read and continues. The record stays in the file."""
    try:
        yield
    except (ServiceError, ValueError, TypeError, KeyError, AttributeError, duckdb.Error) as error:
        reason = str(error).split("\n")[0]
        log.warning("%s can't be read and is left out: %s", key, reason)


def keep_dataset(cursor: Cursor, dataset: DatasetResource) -> None:
    """Writes a new or changed dataset."""
    key = dataset.key
    cursor.execute(
        "INSERT OR REPLACE INTO data.main.datasets VALUES (?, ?, ?, ?, ?)",
        [
            *(key.project, key.dataset_id, json.dumps(dataset.settings)),
            *(dataset.created_ms, dataset.modified_ms),
        ],
    )


def drop_dataset(cursor: Cursor, key: DatasetKey) -> None:
    """Deletes a dataset that has no tables."""
    cursor.execute(
        "DELETE FROM data.main.datasets WHERE project = ? AND dataset_id = ?",
        [key.project, key.dataset_id],
    )


def keep_table(cursor: Cursor, table: TableResource) -> None:
    """Writes a new or changed table, without its rows."""
    key = table.key
    fields = json.dumps([field.resource() for field in table.schema])
    cursor.execute(
        "INSERT OR REPLACE INTO data.main.tables VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            *(table.number, key.project, key.dataset_id, key.table_id, fields),
            *(json.dumps(table.settings), table.created_ms, table.modified_ms),
        ],
    )


def drop_table(cursor: Cursor, table: TableResource) -> None:
    """Removes a table and its rows."""
    cursor.execute("DELETE FROM data.main.tables WHERE number = ?", [table.number])
    if table.view_query is None:
        cursor.execute(f"DROP TABLE {table.physical}")
