"""Field types for Dataset and Table resources, and the parts that jobs share with them.

Source: https://cloud.google.com/bigquery/docs/reference/rest/v2/tables#Table.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bigquery_emulator.tables.fields import NOT_SET, Fields, Int64, Milliseconds


class DatasetReference(Fields):
    """The name of a dataset."""

    dataset_id: str
    project_id: str | msgspec.UnsetType = NOT_SET


class TableReference(Fields):
    """The full name of a table."""

    table_id: str
    dataset_id: str
    project_id: str


class TableFieldSchema(Fields):
    """One field of a schema."""

    name: str | msgspec.UnsetType = NOT_SET
    type: str | msgspec.UnsetType = NOT_SET
    mode: str | msgspec.UnsetType = NOT_SET
    description: str | msgspec.UnsetType = NOT_SET
    fields: list[TableFieldSchema] | msgspec.UnsetType = NOT_SET
    max_length: Int64 | msgspec.UnsetType = NOT_SET
    precision: Int64 | msgspec.UnsetType = NOT_SET
    scale: Int64 | msgspec.UnsetType = NOT_SET
    rounding_mode: str | msgspec.UnsetType = NOT_SET
    collation: str | msgspec.UnsetType = NOT_SET
    default_value_expression: str | msgspec.UnsetType = NOT_SET
    range_element_type: dict[str, Any] | msgspec.UnsetType = NOT_SET


class TableSchema(Fields):
    """The fields of a table."""

    fields: list[TableFieldSchema] | msgspec.UnsetType = NOT_SET


class SchemaFields(Fields):
    """The schema within a Table resource."""

    schema: TableSchema | msgspec.UnsetType = NOT_SET


class TimePartitioning(Fields):
    """A table's partitioning by time."""

    type: str | msgspec.UnsetType = NOT_SET
    field: str | msgspec.UnsetType = NOT_SET
    expiration_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    require_partition_filter: bool | msgspec.UnsetType = NOT_SET


class _Range(Fields):
    start: Int64 | msgspec.UnsetType = NOT_SET
    end: Int64 | msgspec.UnsetType = NOT_SET
    interval: Int64 | msgspec.UnsetType = NOT_SET


class RangePartitioning(Fields):
    """A table's partitioning by integer range."""

    field: str
    range: _Range | msgspec.UnsetType = NOT_SET


class Clustering(Fields):
    """A table's clustering columns."""

    fields: list[str] | msgspec.UnsetType = NOT_SET


class _View(Fields):
    query: str | msgspec.UnsetType = NOT_SET
    use_legacy_sql: bool | msgspec.UnsetType = NOT_SET


class _Resource(Fields):
    friendly_name: str | msgspec.UnsetType = NOT_SET
    description: str | msgspec.UnsetType = NOT_SET
    labels: dict[str, str] | msgspec.UnsetType = NOT_SET


class DatasetFields(_Resource):
    """A Dataset resource's stored fields."""

    location: str | msgspec.UnsetType = NOT_SET
    access: list[dict[str, Any]] | msgspec.UnsetType = NOT_SET
    default_table_expiration_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    default_partition_expiration_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    max_time_travel_hours: Milliseconds | msgspec.UnsetType = NOT_SET
    storage_billing_model: str | msgspec.UnsetType = NOT_SET
    is_case_insensitive: bool | msgspec.UnsetType = NOT_SET


class TableFields(_Resource):
    """A Table resource's stored fields."""

    expiration_time: Milliseconds | msgspec.UnsetType = NOT_SET
    time_partitioning: TimePartitioning | msgspec.UnsetType = NOT_SET
    range_partitioning: RangePartitioning | msgspec.UnsetType = NOT_SET
    clustering: Clustering | msgspec.UnsetType = NOT_SET
    require_partition_filter: bool | msgspec.UnsetType = NOT_SET
    view: _View | msgspec.UnsetType = NOT_SET


class ViewFields(Fields):
    """The view within a Table resource."""

    view: _View | msgspec.UnsetType = NOT_SET


class _TableName(Fields):
    table_id: str


class NewDataset(Fields):
    """The name of a new dataset."""

    dataset_reference: DatasetReference


class NewTable(Fields):
    """The name of a new table. The table's dataset is in the path."""

    table_reference: _TableName
