"""The catalog of datasets, tables, and views, stored in the database and cached in memory.

This layer sits between the API or a query's DDL and the store. Methods that change something run in
the server's writer thread. Rows are streamed concurrently, so while a table that has rows is being
changed, new rows are blocked.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from bigquery_emulator.errors import (
    ConditionError,
    DuplicateError,
    InUseError,
    InvalidError,
    NotFoundError,
)
from bigquery_emulator.store import Store
from bigquery_emulator.tables import physical, stored
from bigquery_emulator.tables.resources import (
    DatasetKey,
    DatasetResource,
    TableKey,
    TableResource,
)
from bigquery_emulator.tables.schema import (
    Json,
    Schema,
    widened,
)
from bigquery_emulator.tables.settings import (
    check_same_kind,
    dataset_settings,
    given_schema,
    merged,
    table_settings,
)
from bigquery_emulator.tables.shapes import Shapes


class TableCatalog:
    """All datasets and tables.

    Args:
        now_ms: a clock that returns Unix milliseconds.
    """

    def __init__(
        self, store: Store, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self.shapes = Shapes()
        self.datasets: dict[DatasetKey, DatasetResource] = {}
        self.tables: dict[TableKey, TableResource] = {}

    def load(self) -> None:
        """Loads the catalog that an earlier run left in the database."""
        with self._store.transaction() as cursor:
            self.datasets, self.tables = stored.load(cursor)

    def dataset(self, key: DatasetKey) -> DatasetResource:
        """Returns a dataset.

        Raises:
            NotFoundError: the dataset does not exist.
        """
        dataset = self.datasets.get(key)
        if dataset is None:
            raise NotFoundError(f"Not found: Dataset {key}")
        return dataset

    def table(self, key: TableKey) -> TableResource:
        """Returns a table or view.

        Raises:
            NotFoundError: the table or its dataset does not exist.
        """
        table = self.tables.get(key)
        if table is None:
            self.dataset(key.dataset)
            raise NotFoundError(f"Not found: Table {key}")
        return table

    def tables_of(self, key: DatasetKey) -> list[TableResource]:
        """Returns a dataset's tables and views, sorted by name."""
        self.dataset(key)
        tables = [table for name, table in list(self.tables.items()) if name.dataset == key]
        return sorted(tables, key=lambda table: table.key.table_id)

    def create_dataset(self, key: DatasetKey, body: Json) -> DatasetResource:
        """Creates a dataset.

        Args:
            body: Dataset resource from the request.

        Raises:
            DuplicateError: the dataset already exists.
            InvalidError: BigQuery rejects the name.
        """
        if not re.fullmatch(r"[a-z][a-z0-9.:-]{0,99}", key.project):
            raise InvalidError(f'Invalid project ID "{key.project}".')
        if not re.fullmatch(r"\w{1,1024}", key.dataset_id, re.ASCII):
            raise InvalidError(f'Invalid dataset ID "{key.dataset_id}".')
        if key in self.datasets:
            raise DuplicateError(f"Already Exists: Dataset {key}")
        now_ms = self._now_ms()
        return self._keep_dataset(DatasetResource(key, dataset_settings(body), now_ms, now_ms))

    def update_dataset(
        self, key: DatasetKey, body: Json, etag: str | None, is_patch: bool
    ) -> DatasetResource:
        """Changes a dataset's settings.

        Args:
            etag: the version that the caller read. None: change whatever version exists.
            is_patch: True to keep settings that `body` omits.

        Raises:
            ConditionError: the dataset has changed since the version that the caller read.
        """
        old = self.dataset(key)
        _expect(old.etag, etag)
        settings = dataset_settings(merged(old.settings, body) if is_patch else body)
        return self._keep_dataset(
            replace(old, settings=settings, modified_ms=self._later(old.modified_ms))
        )

    def delete_dataset(self, key: DatasetKey, with_contents: bool) -> None:
        """Deletes a dataset.

        Raises:
            InUseError: the dataset contains tables and `with_contents` is false.
        """
        tables = self.tables_of(key)
        if tables and not with_contents:
            raise InUseError(f"Dataset {key} is still in use")
        for table in tables:
            self.delete_table(table.key)
        with self._store.transaction() as cursor:
            stored.drop_dataset(cursor, key)
        del self.datasets[key]

    def create_table(
        self,
        key: TableKey,
        schema: Schema,
        body: Json,
        filled_by: str | None = None,
        replaces: bool = False,
    ) -> TableResource:
        """Creates a table or a view.

        Args:
            schema: the table's fields, or the query's fields for a view.
            body: Table resource from the request.
            filled_by: DuckDB table with the initial rows.
            replaces: True to remove any table with this name in the same transaction.

        Raises:
            DuplicateError: the table already exists.
            InvalidError: BigQuery rejects the name or partitioning.
        """
        dataset = self.dataset(key.dataset)
        _check_table_id(key)
        old = self.tables.get(key)
        if old is not None and not replaces:
            raise DuplicateError(f"Already Exists: Table {key}")
        now_ms = self._now_ms()
        settings = table_settings(schema, body, dataset, now_ms)
        with ExitStack() as held:
            with self._store.transaction() as cursor:
                (number,) = cursor.execute("SELECT nextval('data.main.table_numbers')").fetchone()
                table = TableResource(key, number, schema, settings, now_ms, now_ms)
                if table.view_query is None:
                    physical.create(cursor, table)
                if filled_by is not None:
                    physical.fill(cursor, table, schema, filled_by)
                if old is not None:
                    # Done last, because the old table accepts rows while the new one is being
                    # filled.
                    held.enter_context(self.shapes.changing(key))
                    stored.drop_table(cursor, old)
                stored.keep_table(cursor, table)
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
            body: the new settings, which may include a schema.
            etag: the version that the caller read. None: change it regardless of its version.
            is_patch: True to keep settings that are not in `body`.
            view_schema: the fields of a view's new query.

        Raises:
            ConditionError: the table has changed since the version that the caller read.
            InvalidError: the schema would drop or change a field.
        """
        old = self.table(key)
        _expect(old.etag, etag)
        wanted = view_schema or given_schema(body) or old.schema
        is_widened = old.view_query is None and bool(old.schema)
        changed = widened(old.schema, wanted) if is_widened else []
        settings = merged(old.settings, body) if is_patch else body
        settings = table_settings(wanted, settings, self.dataset(key.dataset), old.created_ms)
        check_same_kind(old, settings)
        table = replace(
            old, schema=wanted, settings=settings, modified_ms=self._later(old.modified_ms)
        )
        with self.shapes.changing(key):
            with self._store.transaction() as cursor:
                physical.alter(cursor, old, table, tuple(changed))
                stored.keep_table(cursor, table)
            self.tables[key] = table
        return table

    def reshape_table(
        self, key: TableKey, schema: Schema, settings: Json, sources: Mapping[str, str]
    ) -> TableResource:
        """Replaces a table's schema with an arbitrary one. Its rows are rewritten.

        Args:
            sources: DuckDB SQL over the old columns, keyed by field name.

        Raises:
            InvalidError: a row or setting does not match the new schema.
        """
        old = self.table(key)
        settings = table_settings(schema, settings, self.dataset(key.dataset), old.created_ms)
        later_ms = self._later(old.modified_ms)
        table = replace(old, schema=schema, settings=settings, modified_ms=later_ms)
        with self.shapes.changing(key):
            with self._store.transaction() as cursor:
                physical.rebuild(cursor, old, table, sources)
                stored.keep_table(cursor, table)
            self.tables[key] = table
        return table

    def rename_table(self, key: TableKey, new: TableKey) -> TableResource:
        """Renames a table within its dataset.

        Raises:
            DuplicateError: the name is taken.
            InvalidError: BigQuery rejects the name.
        """
        old = self.table(key)
        _check_table_id(new)
        if new in self.tables:
            raise DuplicateError(f"Already Exists: Table {new}")
        table = replace(old, key=new, modified_ms=self._later(old.modified_ms))
        with self.shapes.changing(key):
            with self._store.transaction() as cursor:
                stored.keep_table(cursor, table)
            del self.tables[key]
            self.tables[new] = table
        return table

    def delete_table(self, key: TableKey) -> None:
        """Deletes a table or view and its rows."""
        table = self.table(key)
        with self.shapes.changing(key):
            with self._store.transaction() as cursor:
                stored.drop_table(cursor, table)
            del self.tables[key]

    def _keep_dataset(self, dataset: DatasetResource) -> DatasetResource:
        with self._store.transaction() as cursor:
            stored.keep_dataset(cursor, dataset)
        self.datasets[dataset.key] = dataset
        return dataset

    def _later(self, than_ms: int) -> int:
        # Ensures that two changes within the same millisecond have different etags.
        return max(self._now_ms(), than_ms + 1)


def _check_table_id(key: TableKey) -> None:
    if not re.fullmatch(r"[\w -]{1,1024}", key.table_id):
        raise InvalidError(f'Invalid table ID "{key.table_id}".')


def _expect(found: str, wanted: str | None) -> None:
    if wanted is not None and wanted != found:
        raise ConditionError("Precondition check failed.")
