"""The catalog of data sets, tables and views, stored in the database and cached in memory.

Between the API or a query's DDL and the store. Methods that change something run in the server's
writer.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace

from infra.emulators.bigquery.errors import (
    ConditionError,
    DuplicateError,
    InUseError,
    InvalidError,
    NotFoundError,
)
from infra.emulators.bigquery.store import Cursor, Store
from infra.emulators.bigquery.tables.resources import (
    DatasetKey,
    DatasetResource,
    TableKey,
    TableResource,
)
from infra.emulators.bigquery.tables.schema import (
    Json,
    Schema,
    alterations,
    parse_schema,
    quoted,
    widened,
)
from infra.emulators.bigquery.tables.settings import dataset_settings, merged, table_settings

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


class TableCatalog:
    """All data sets and tables.

    Args:
        store: the open database.
        now_ms: the clock, in unix milliseconds.
    """

    def __init__(
        self, store: Store, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self.datasets: dict[DatasetKey, DatasetResource] = {}
        self.tables: dict[TableKey, TableResource] = {}

    def load(self) -> None:
        """Reads what an earlier run left in the database."""
        with self._store.cursor() as cursor:
            cursor.execute(_SETUP)
            for project, name, settings, created_ms, modified_ms in cursor.execute(
                "SELECT * FROM data.main.datasets"
            ).fetchall():
                dataset_key = DatasetKey(project, name)
                self.datasets[dataset_key] = DatasetResource(
                    dataset_key, json.loads(settings), created_ms, modified_ms
                )
            for number, *name, fields, settings, created_ms, modified_ms in cursor.execute(
                "SELECT * FROM data.main.tables"
            ).fetchall():
                key = TableKey(*name)
                schema = parse_schema(json.loads(fields))
                self.tables[key] = TableResource(
                    key, number, schema, json.loads(settings), created_ms, modified_ms
                )

    def dataset(self, key: DatasetKey) -> DatasetResource:
        """Returns a data set.

        Raises:
            NotFoundError: where there is none of that name.
        """
        found = self.datasets.get(key)
        if found is None:
            raise NotFoundError(f"Not found: Dataset {key}")
        return found

    def table(self, key: TableKey) -> TableResource:
        """Returns a table or view.

        Raises:
            NotFoundError: where there is none of that name, or no such data set.
        """
        found = self.tables.get(key)
        if found is None:
            self.dataset(key.dataset)
            raise NotFoundError(f"Not found: Table {key}")
        return found

    def tables_of(self, key: DatasetKey) -> list[TableResource]:
        """Returns the tables and views of a data set, by name."""
        self.dataset(key)
        found = [table for name, table in list(self.tables.items()) if name.dataset == key]
        return sorted(found, key=lambda table: table.key.table_id)

    def create_dataset(self, key: DatasetKey, body: Json) -> DatasetResource:
        """Makes a data set.

        Args:
            key: its name.
            body: the Dataset resource of the request.

        Raises:
            DuplicateError: where it exists.
            InvalidError: for a name that BigQuery refuses.
        """
        if not re.fullmatch(r"\w{1,1024}", key.dataset_id, re.ASCII):
            raise InvalidError(f'Invalid dataset ID "{key.dataset_id}".')
        if key in self.datasets:
            raise DuplicateError(f"Already Exists: Dataset {key}")
        now_ms = self._now_ms()
        return self._keep_dataset(DatasetResource(key, dataset_settings(body), now_ms, now_ms))

    def update_dataset(
        self, key: DatasetKey, body: Json, etag: str | None, is_patch: bool
    ) -> DatasetResource:
        """Changes a data set's settings.

        Args:
            key: its name.
            body: the new settings.
            etag: what the caller read. None changes any version.
            is_patch: whether settings that `body` leaves out stay.

        Raises:
            ConditionError: where the data set has changed since.
        """
        old = self.dataset(key)
        _expect(old.etag, etag)
        settings = dataset_settings(merged(old.settings, body) if is_patch else body)
        return self._keep_dataset(
            replace(old, settings=settings, modified_ms=self._later(old.modified_ms))
        )

    def delete_dataset(self, key: DatasetKey, with_contents: bool) -> None:
        """Removes a data set.

        Raises:
            InUseError: where it holds tables and `with_contents` is false.
        """
        tables = self.tables_of(key)
        if tables and not with_contents:
            raise InUseError(f"Dataset {key} is still in use")
        for table in tables:
            self.delete_table(table.key)
        with self._store.cursor() as cursor:
            cursor.execute(
                "DELETE FROM data.main.datasets WHERE project = ? AND dataset_id = ?",
                [key.project, key.dataset_id],
            )
        del self.datasets[key]

    def create_table(
        self, key: TableKey, schema: Schema, body: Json, filled_by: str | None = None
    ) -> TableResource:
        """Makes a table or a view.

        Args:
            key: its name.
            schema: its fields, for a view those of its query.
            body: the Table resource of the request.
            filled_by: DuckDB's SELECT whose rows the table starts with.

        Raises:
            DuplicateError: where it exists.
            InvalidError: for a name or partitioning that BigQuery refuses.
        """
        dataset = self.dataset(key.dataset)
        if not re.fullmatch(r"[\w -]{1,1024}", key.table_id):
            raise InvalidError(f'Invalid table ID "{key.table_id}".')
        if key in self.tables:
            raise DuplicateError(f"Already Exists: Table {key}")
        now_ms = self._now_ms()
        settings = table_settings(schema, body, dataset, now_ms)
        with self._store.transaction() as cursor:
            (number,) = cursor.execute("SELECT nextval('data.main.table_numbers')").fetchone()
            table = TableResource(key, number, schema, settings, now_ms, now_ms)
            if table.view_query is None:
                cursor.execute(f"CREATE TABLE {table.physical} ({table.columns_sql()})")
            if filled_by is not None:
                cursor.execute(f"INSERT INTO {table.physical} ({_names(schema)}) {filled_by}")
            self._keep_table(cursor, table)
        self.tables[key] = table
        return table

    def update_table(
        self,
        key: TableKey,
        body: Json,
        etag: str | None,
        is_patch: bool,
        view_schema: Schema | None = None,
    ) -> TableResource:
        """Changes a table's settings or widens its schema.

        Args:
            key: its name.
            body: the new settings, and maybe a schema.
            etag: what the caller read. None changes any version.
            is_patch: whether settings that `body` leaves out stay.
            view_schema: the fields of a view's new query.

        Raises:
            ConditionError: where the table has changed since.
            InvalidError: where the schema would lose or change a field.
        """
        old = self.table(key)
        _expect(old.etag, etag)
        wanted = view_schema or (
            parse_schema(body["schema"]["fields"]) if body.get("schema") else old.schema
        )
        changed = widened(old.schema, wanted) if old.view_query is None else []
        settings = merged(old.settings, body) if is_patch else body
        settings = table_settings(wanted, settings, self.dataset(key.dataset), old.created_ms)
        table = replace(
            old, schema=wanted, settings=settings, modified_ms=self._later(old.modified_ms)
        )
        with self._store.transaction() as cursor:
            known = {field.name.lower() for field in old.schema}
            for field in changed:
                for statement in alterations(table.physical, field, field.name.lower() in known):
                    cursor.execute(statement)
            self._keep_table(cursor, table)
        self.tables[key] = table
        return table

    def delete_table(self, key: TableKey) -> None:
        """Removes a table or view and its rows."""
        table = self.table(key)
        with self._store.transaction() as cursor:
            cursor.execute("DELETE FROM data.main.tables WHERE number = ?", [table.number])
            if table.view_query is None:
                cursor.execute(f"DROP TABLE {table.physical}")
        del self.tables[key]

    def _keep_dataset(self, dataset: DatasetResource) -> DatasetResource:
        with self._store.cursor() as cursor:
            cursor.execute(
                "INSERT OR REPLACE INTO data.main.datasets VALUES (?, ?, ?, ?, ?)",
                [
                    dataset.key.project,
                    dataset.key.dataset_id,
                    json.dumps(dataset.settings),
                    dataset.created_ms,
                    dataset.modified_ms,
                ],
            )
        self.datasets[dataset.key] = dataset
        return dataset

    def _keep_table(self, cursor: Cursor, table: TableResource) -> None:
        key = table.key
        fields = json.dumps([field.resource() for field in table.schema])
        cursor.execute(
            "INSERT OR REPLACE INTO data.main.tables VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                *(
                    table.number,
                    key.project,
                    key.dataset_id,
                    key.table_id,
                    fields,
                    json.dumps(table.settings),
                ),
                *(table.created_ms, table.modified_ms),
            ],
        )

    def _later(self, than_ms: int) -> int:
        # Two changes within one millisecond still have two etags.
        return max(self._now_ms(), than_ms + 1)


def _names(schema: Schema) -> str:
    return ", ".join(quoted(field.name) for field in schema)


def _expect(found: str, wanted: str | None) -> None:
    if wanted is not None and wanted != found:
        raise ConditionError("Precondition check failed.")
