"""Data about a dataset, table, or view, and how the API represents it.

The catalog stores these records. They are immutable; a change creates a new one.
"""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from bigquery_emulator.tables.schema import Json, Schema, quoted

PARTITION_TIME = "_PARTITIONTIME"
# No BigQuery field can have this name. Unlike BigQuery, DuckDB does not allow tables without
# columns.
_NO_COLUMNS = "no columns"


@dataclass(frozen=True)
class DatasetKey:
    """A dataset's full name."""

    project: str
    dataset_id: str

    def __str__(self) -> str:
        return f"{self.project}:{self.dataset_id}"

    def resource(self) -> Json:
        return {"projectId": self.project, "datasetId": self.dataset_id}


@dataclass(frozen=True)
class TableKey:
    """The full name of a table or view."""

    project: str
    dataset_id: str
    table_id: str

    def __str__(self) -> str:
        return f"{self.project}:{self.dataset_id}.{self.table_id}"

    @property
    def dataset(self) -> DatasetKey:
        return DatasetKey(self.project, self.dataset_id)

    def resource(self) -> Json:
        return {"projectId": self.project, "datasetId": self.dataset_id, "tableId": self.table_id}


@dataclass(frozen=True)
class DatasetResource:
    """A dataset. `settings` contains the fields of its resource that the user set."""

    key: DatasetKey
    settings: Json
    created_ms: int
    modified_ms: int

    @property
    def etag(self) -> str:
        """Changes with every change to the dataset."""
        return _etag(str(self.key), self.settings, self.modified_ms)

    def resource(self) -> Json:
        return {
            "kind": "bigquery#dataset",
            "id": str(self.key),
            "etag": self.etag,
            "datasetReference": self.key.resource(),
            "creationTime": str(self.created_ms),
            "lastModifiedTime": str(self.modified_ms),
            "type": "DEFAULT",
            **{"location": "US", "access": [], **self.settings},
        }


@dataclass(frozen=True)
class Partitioning:
    """A table's partitioning. `field` is None for ingestion time.

    `start`, `end`, and `interval` are set for range partitioning, whose unit is RANGE.
    """

    field: str | None
    unit: str
    expiration_ms: int | None
    is_filter_required: bool
    start: int = 0
    end: int = 0
    interval: int | None = None

    @property
    def column(self) -> str:
        """The column that queries filter on to select partitions."""
        return self.field or PARTITION_TIME


@dataclass(frozen=True)
class TableResource:
    """A table or a view.

    `settings` contains the fields of its resource that the user set, without the schema.
    """

    key: TableKey
    number: int
    schema: Schema
    settings: Json = field(default_factory=dict)
    created_ms: int = 0
    modified_ms: int = 0

    @property
    def physical(self) -> str:
        """The table's name in DuckDB, without characters that only BigQuery allows."""
        return f"data.main.t{self.number}"

    @property
    def view_query(self) -> str | None:
        """The view's GoogleSQL. None for a table."""
        view = self.settings.get("view")
        return None if view is None else str(view["query"])

    @property
    def partitioning(self) -> Partitioning | None:
        """None if the table is not partitioned."""
        time = self.settings.get("timePartitioning")
        required = bool(self.settings.get("requirePartitionFilter"))
        if time is not None:
            expiration = time.get("expirationMs")
            return Partitioning(
                time.get("field"),
                time["type"],
                None if expiration is None else int(expiration),
                required,
            )
        ranges = self.settings.get("rangePartitioning")
        if ranges is None:
            return None
        value_range = ranges.get("range") or {}
        start, end = (int(value_range.get(name) or 0) for name in ("start", "end"))
        interval = int(value_range.get("interval") or 0) or None
        return Partitioning(ranges["field"], "RANGE", None, required, start, end, interval)

    @property
    def has_partition_time(self) -> bool:
        """True if rows store their ingestion time in a separate column."""
        return self.partitioning is not None and self.partitioning.field is None

    @property
    def etag(self) -> str:
        """Changes whenever the table's settings or schema change."""
        return _etag(
            str(self.key), [self.settings, [f.resource() for f in self.schema]], self.modified_ms
        )

    def columns_sql(self) -> str:
        """Returns the DuckDB table's column definitions."""
        columns = []
        for column in self.schema:
            suffix = {"REQUIRED": " NOT NULL", "REPEATED": " DEFAULT []"}.get(column.mode, "")
            checks = "".join(f" CHECK ({check})" for check in column.checks())
            columns.append(f"{quoted(column.name)} {column.duckdb_type}{suffix}{checks}")
        if self.partitioning is not None and self.has_partition_time:
            unit = self.partitioning.unit.lower()
            now = f"DEFAULT date_trunc('{unit}', current_timestamp)"
            columns.append(f"{quoted(PARTITION_TIME)} TIMESTAMP WITH TIME ZONE {now}")
        return ", ".join(columns or [f"{quoted(_NO_COLUMNS)} BOOLEAN"])

    def short_resource(self) -> Json:
        names = (
            "friendlyName",
            "labels",
            "timePartitioning",
            "rangePartitioning",
            "clustering",
            "expirationTime",
        )
        resource: Json = {
            "kind": "bigquery#table",
            "id": str(self.key),
            "tableReference": self.key.resource(),
            "type": "TABLE" if self.view_query is None else "VIEW",
            "creationTime": str(self.created_ms),
            **{name: self.settings[name] for name in names if name in self.settings},
        }
        if self.view_query is not None:
            resource["view"] = {"useLegacySql": False}
        return resource

    def resource(self, rows: int, size_bytes: int, location: str) -> Json:
        """Returns the API's Table resource."""
        return {
            **self.short_resource(),
            "etag": self.etag,
            "lastModifiedTime": str(self.modified_ms),
            "location": location,
            "numRows": str(rows),
            "numBytes": str(size_bytes),
            "numLongTermBytes": "0",
            "schema": {"fields": [field.resource() for field in self.schema]},
            **self.settings,
        }


def _etag(name: str, settings: Any, modified_ms: int) -> str:
    text = json.dumps([name, settings, modified_ms], sort_keys=True)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()[:16]).decode()
