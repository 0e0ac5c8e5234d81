"""How data sets and tables are kept in the database, beside the rows.

The catalog calls it, in its own transactions.
"""

import json

from infra.emulators.bigquery.store import Cursor
from infra.emulators.bigquery.tables.resources import (
    DatasetKey,
    DatasetResource,
    TableKey,
    TableResource,
)
from infra.emulators.bigquery.tables.schema import parse_schema

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
    """Returns what an earlier run left in the database, which is set up if it is new."""
    cursor.execute(_SETUP)
    datasets, tables = {}, {}
    for project, name, settings, created_ms, modified_ms in cursor.execute(
        "SELECT * FROM data.main.datasets"
    ).fetchall():
        key = DatasetKey(project, name)
        datasets[key] = DatasetResource(key, json.loads(settings), created_ms, modified_ms)
    for number, *name, fields, settings, created_ms, modified_ms in cursor.execute(
        "SELECT * FROM data.main.tables"
    ).fetchall():
        table_key, schema = TableKey(*name), parse_schema(json.loads(fields))
        tables[table_key] = TableResource(
            table_key, number, schema, json.loads(settings), created_ms, modified_ms
        )
    return datasets, tables


def keep_dataset(cursor: Cursor, dataset: DatasetResource) -> None:
    """Writes a new or changed data set."""
    key = dataset.key
    cursor.execute(
        "INSERT OR REPLACE INTO data.main.datasets VALUES (?, ?, ?, ?, ?)",
        [
            *(key.project, key.dataset_id, json.dumps(dataset.settings)),
            *(dataset.created_ms, dataset.modified_ms),
        ],
    )


def drop_dataset(cursor: Cursor, key: DatasetKey) -> None:
    """Removes a data set, which has no tables."""
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
    """Removes a table with its rows."""
    cursor.execute("DELETE FROM data.main.tables WHERE number = ?", [table.number])
    if table.view_query is None:
        cursor.execute(f"DROP TABLE {table.physical}")
