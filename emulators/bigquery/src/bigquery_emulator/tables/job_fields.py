"""Field types for jobs, queries, and insertAll.

Source: https://cloud.google.com/bigquery/docs/reference/rest/v2/Job and the pages on jobs.query and
tabledata.insertAll.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from bigquery_emulator.tables.fields import NOT_SET, Fields, Milliseconds, Natural
from bigquery_emulator.tables.resource_fields import (
    Clustering,
    DatasetReference,
    RangePartitioning,
    TableReference,
    TableSchema,
    TimePartitioning,
)

_JobId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,1024}$")]
_RequestId = Annotated[str, msgspec.Meta(max_length=1_024)]
_Create = Literal["CREATE_IF_NEEDED", "CREATE_NEVER"]
_Write = Literal["WRITE_EMPTY", "WRITE_APPEND", "WRITE_TRUNCATE", "WRITE_TRUNCATE_DATA"]
_SchemaUpdate = Literal["ALLOW_FIELD_ADDITION", "ALLOW_FIELD_RELAXATION"]
_ParameterMode = Literal["NAMED", "POSITIONAL", ""]
_Priority = Literal["INTERACTIVE", "BATCH"]


class _StructType(Fields):
    type: _ParameterType
    name: str | msgspec.UnsetType = NOT_SET


class _ParameterType(Fields):
    type: str
    array_type: _ParameterType | msgspec.UnsetType = NOT_SET
    struct_types: list[_StructType] | msgspec.UnsetType = NOT_SET


class _ParameterValue(Fields):
    # Any JSON scalar. It is checked against the parameter's own type later.
    value: str | bool | int | float | msgspec.UnsetType = NOT_SET
    array_values: list[_ParameterValue] | msgspec.UnsetType = NOT_SET
    struct_values: dict[str, _ParameterValue] | msgspec.UnsetType = NOT_SET


class _QueryParameter(Fields):
    name: str | msgspec.UnsetType = NOT_SET
    parameter_type: _ParameterType | msgspec.UnsetType = NOT_SET
    parameter_value: _ParameterValue | msgspec.UnsetType = NOT_SET


class _Query(Fields, kw_only=True):
    query: str
    default_dataset: DatasetReference | msgspec.UnsetType = NOT_SET
    use_legacy_sql: bool | msgspec.UnsetType = NOT_SET
    query_parameters: list[_QueryParameter] | msgspec.UnsetType = NOT_SET
    parameter_mode: _ParameterMode | msgspec.UnsetType = NOT_SET
    maximum_bytes_billed: Natural | msgspec.UnsetType = NOT_SET
    use_query_cache: bool | msgspec.UnsetType = NOT_SET
    destination_encryption_configuration: dict[str, Any] | msgspec.UnsetType = NOT_SET
    connection_properties: list[dict[str, Any]] | msgspec.UnsetType = NOT_SET
    create_session: bool | msgspec.UnsetType = NOT_SET


class _Writing(Fields, kw_only=True):
    create_disposition: _Create | msgspec.UnsetType = NOT_SET
    write_disposition: _Write | msgspec.UnsetType = NOT_SET
    schema_update_options: list[_SchemaUpdate] | msgspec.UnsetType = NOT_SET
    time_partitioning: TimePartitioning | msgspec.UnsetType = NOT_SET
    range_partitioning: RangePartitioning | msgspec.UnsetType = NOT_SET
    clustering: Clustering | msgspec.UnsetType = NOT_SET


class _QueryJob(_Query, kw_only=True):
    # A struct can have only one base, so these repeat the fields of _Writing.
    create_disposition: _Create | msgspec.UnsetType = NOT_SET
    write_disposition: _Write | msgspec.UnsetType = NOT_SET
    schema_update_options: list[_SchemaUpdate] | msgspec.UnsetType = NOT_SET
    time_partitioning: TimePartitioning | msgspec.UnsetType = NOT_SET
    range_partitioning: RangePartitioning | msgspec.UnsetType = NOT_SET
    clustering: Clustering | msgspec.UnsetType = NOT_SET
    destination_table: TableReference | msgspec.UnsetType = NOT_SET
    priority: _Priority | msgspec.UnsetType = NOT_SET
    allow_large_results: bool | msgspec.UnsetType = NOT_SET
    flatten_results: bool | msgspec.UnsetType = NOT_SET


class _ParquetOptions(Fields):
    enable_list_inference: bool | msgspec.UnsetType = NOT_SET
    enum_as_string: bool | msgspec.UnsetType = NOT_SET


_Delimiter = Annotated[str, msgspec.Meta(pattern=r"^([^\r\n]|tab|\\t)?$")]
"""A single character, or a tab written by name. The default is a comma."""


class _Load(_Writing, kw_only=True):
    destination_table: TableReference
    source_uris: list[str] | msgspec.UnsetType = NOT_SET
    source_format: str | msgspec.UnsetType = NOT_SET
    schema: TableSchema | msgspec.UnsetType = NOT_SET
    autodetect: bool | msgspec.UnsetType = NOT_SET
    encoding: str | msgspec.UnsetType = NOT_SET
    field_delimiter: _Delimiter | msgspec.UnsetType = NOT_SET
    quote: Annotated[str, msgspec.Meta(max_length=1)] | msgspec.UnsetType = NOT_SET
    null_marker: str | msgspec.UnsetType = NOT_SET
    skip_leading_rows: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | msgspec.UnsetType = (
        NOT_SET
    )
    max_bad_records: Natural | msgspec.UnsetType = NOT_SET
    allow_jagged_rows: bool | msgspec.UnsetType = NOT_SET
    allow_quoted_newlines: bool | msgspec.UnsetType = NOT_SET
    ignore_unknown_values: bool | msgspec.UnsetType = NOT_SET
    parquet_options: _ParquetOptions | msgspec.UnsetType = NOT_SET


class _Copy(_Writing, kw_only=True):
    destination_table: TableReference
    source_table: TableReference | msgspec.UnsetType = NOT_SET
    source_tables: list[TableReference] | msgspec.UnsetType = NOT_SET
    operation_type: str | msgspec.UnsetType = NOT_SET


class _JobReference(Fields):
    job_id: _JobId | msgspec.UnsetType = NOT_SET
    project_id: str | msgspec.UnsetType = NOT_SET
    location: str | msgspec.UnsetType = NOT_SET


class _Configuration(Fields):
    query: _QueryJob | msgspec.UnsetType = NOT_SET
    load: _Load | msgspec.UnsetType = NOT_SET
    copy: _Copy | msgspec.UnsetType = NOT_SET
    extract: dict[str, Any] | msgspec.UnsetType = NOT_SET
    dry_run: bool | msgspec.UnsetType = NOT_SET
    job_timeout_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    labels: dict[str, str] | msgspec.UnsetType = NOT_SET


class JobFields(Fields):
    """A Job resource's stored fields."""

    configuration: _Configuration | msgspec.UnsetType = NOT_SET
    job_reference: _JobReference | msgspec.UnsetType = NOT_SET


class _FormatOptions(Fields):
    use_int64_timestamp: bool | msgspec.UnsetType = msgspec.field(
        default=NOT_SET, name="useInt64Timestamp"
    )


class QueryRequest(_Query, kw_only=True):
    """The body of jobs.query."""

    dry_run: bool | msgspec.UnsetType = NOT_SET
    labels: dict[str, str] | msgspec.UnsetType = NOT_SET
    job_timeout_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    location: str | msgspec.UnsetType = NOT_SET
    request_id: _RequestId | msgspec.UnsetType = NOT_SET
    timeout_ms: Milliseconds | msgspec.UnsetType = NOT_SET
    max_results: Natural | msgspec.UnsetType = NOT_SET
    format_options: _FormatOptions | msgspec.UnsetType = NOT_SET


class InsertAllRequest(Fields):
    """The body of insertAll without its rows, which are parsed using the table's schema."""

    skip_invalid_rows: bool | msgspec.UnsetType = NOT_SET
    ignore_unknown_values: bool | msgspec.UnsetType = NOT_SET
    template_suffix: str | msgspec.UnsetType = NOT_SET
