"""The INFORMATION_SCHEMA views, and their rows for the qualifier that precedes the name.

The translator calls this when a statement names a view. Source:
https://docs.cloud.google.com/bigquery/docs/information-schema-intro
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigquery_emulator.engine.information import described, options, sizes
from bigquery_emulator.engine.information.jobs import JOBS, job_row
from bigquery_emulator.engine.jobs import Jobs
from bigquery_emulator.errors import InvalidQueryError, UnsupportedError
from bigquery_emulator.store import Cursor, Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.listing import Listing, Row
from bigquery_emulator.tables.resources import DatasetKey, DatasetResource, TableResource
from bigquery_emulator.tables.schema import Schema

_REGION = "region-"
_OF_DATASETS: dict[str, tuple[Schema, Callable[[DatasetResource], list[Row]]]] = {
    "SCHEMATA": (described.SCHEMATA, described.dataset_rows),
    "SCHEMATA_OPTIONS": (options.SCHEMATA_OPTIONS, options.dataset_rows),
}
_OF_TABLES: dict[str, tuple[Schema, Callable[[TableResource], list[Row]]]] = {
    "TABLES": (described.TABLES, described.table_rows),
    "COLUMNS": (described.COLUMNS, described.column_rows),
    "COLUMN_FIELD_PATHS": (described.COLUMN_FIELD_PATHS, described.field_path_rows),
    "VIEWS": (described.VIEWS, described.view_rows),
    "TABLE_OPTIONS": (options.TABLE_OPTIONS, options.table_rows),
    # Always empty, but needed because dbt joins these views.
    "MATERIALIZED_VIEWS": (described.MATERIALIZED_VIEWS, lambda table: []),
}
_OF_ROWS: dict[str, tuple[Schema, Callable[[Cursor, TableResource], list[Row]]]] = {
    "PARTITIONS": (sizes.PARTITIONS, sizes.partition_rows),
    "TABLE_STORAGE": (sizes.TABLE_STORAGE, sizes.storage_rows),
    "TABLE_STORAGE_BY_PROJECT": (sizes.TABLE_STORAGE, sizes.storage_rows),
    "__TABLES__": (sizes.LEGACY_TABLES, sizes.legacy_rows),
}
_JOB_VIEWS = ("JOBS", "JOBS_BY_PROJECT", "JOBS_BY_USER")


@dataclass(frozen=True)
class InformationViews:
    """A server's INFORMATION_SCHEMA views.

    Args:
        catalog: the server's datasets and tables.
        jobs: the jobs the server remembers.
    """

    store: Store
    catalog: TableCatalog
    jobs: Jobs

    def listing(self, view: str, before: Sequence[str], project: str) -> Listing:
        """Returns a view's rows.

        Args:
            view: name after INFORMATION_SCHEMA, or `__TABLES__`.
            before: the parts of the name that precede the view: project, then region or dataset.

        Raises:
            InvalidQueryError: the view requires a dataset or a region, and none is given.
            NotFoundError: the dataset does not exist.
            UnsupportedError: this server does not support the view.
        """
        name = view.upper()
        if name in _OF_DATASETS or name in _JOB_VIEWS:
            # These names may be qualified by a project, a region, or both.
            projects = [part for part in before if not part.lower().startswith(_REGION)]
            return self._of_project(name, projects[0] if projects else project)
        *owner, place = before or ("",)
        owning = owner[0] if owner else project
        if name in _OF_TABLES:
            schema, rows_of = _OF_TABLES[name]
            tables = self._tables(owning, place)
            return Listing(schema, [row for table in tables for row in rows_of(table)])
        if name in _OF_ROWS:
            columns, counted = _OF_ROWS[name]
            tables = self._tables(owning, place)
            with self.store.reading() as cursor:
                return Listing(columns, [row for table in tables for row in counted(cursor, table)])
        raise UnsupportedError(
            f"INFORMATION_SCHEMA.{name}: not supported by the embedded BigQuery", "query"
        )

    def _of_project(self, name: str, project: str) -> Listing:
        if name in _JOB_VIEWS:
            return Listing(JOBS, [job_row(job) for job in self.jobs.of_project(project)])
        schema, rows_of = _OF_DATASETS[name]
        datasets = [
            dataset
            for dataset in list(self.catalog.datasets.values())
            if dataset.key.project == project
        ]
        datasets.sort(key=lambda dataset: dataset.key.dataset_id)
        return Listing(schema, [row for dataset in datasets for row in rows_of(dataset)])

    def _tables(self, project: str, place: str) -> list[TableResource]:
        if not place:
            raise InvalidQueryError("INFORMATION_SCHEMA must be qualified with a dataset")
        if not place.lower().startswith(_REGION):
            return self.catalog.tables_of(DatasetKey(project, place))
        tables = [
            table for table in list(self.catalog.tables.values()) if table.key.project == project
        ]
        return sorted(tables, key=lambda table: (table.key.dataset_id, table.key.table_id))
