"""The types of the fields of Dataset and Table resources, and the reader that checks them.

Source: https://cloud.google.com/bigquery/docs/reference/rest/v2/tables#Table. Numbers may come as
text, as JSON has no 64-bit integers.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from infra.emulators.bigquery.errors import InvalidError
from infra.emulators.bigquery.tables.schema import Json

Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NOT_SET = msgspec.UNSET


class _Resource(msgspec.Struct, rename="camel", omit_defaults=True):
    friendly_name: str | msgspec.UnsetType = _NOT_SET
    description: str | msgspec.UnsetType = _NOT_SET
    labels: dict[str, str] | msgspec.UnsetType = _NOT_SET


class DatasetFields(_Resource):
    """What is kept of a Dataset resource."""

    location: str | msgspec.UnsetType = _NOT_SET
    access: list[dict[str, Any]] | msgspec.UnsetType = _NOT_SET
    default_table_expiration_ms: Milliseconds | msgspec.UnsetType = _NOT_SET
    default_partition_expiration_ms: Milliseconds | msgspec.UnsetType = _NOT_SET
    max_time_travel_hours: Milliseconds | msgspec.UnsetType = _NOT_SET
    storage_billing_model: str | msgspec.UnsetType = _NOT_SET
    is_case_insensitive: bool | msgspec.UnsetType = _NOT_SET


class _TimePartitioning(msgspec.Struct, rename="camel", omit_defaults=True):
    type: str | msgspec.UnsetType | None = _NOT_SET
    field: str | msgspec.UnsetType | None = _NOT_SET
    expiration_ms: Milliseconds | msgspec.UnsetType | None = _NOT_SET
    require_partition_filter: bool | msgspec.UnsetType | None = _NOT_SET


class _Range(msgspec.Struct, omit_defaults=True):
    start: int | msgspec.UnsetType = _NOT_SET
    end: int | msgspec.UnsetType = _NOT_SET
    interval: int | msgspec.UnsetType = _NOT_SET


class _RangePartitioning(msgspec.Struct, omit_defaults=True):
    field: str
    range: _Range | msgspec.UnsetType = _NOT_SET


class _Clustering(msgspec.Struct, omit_defaults=True):
    fields: list[str] = []


class _View(msgspec.Struct, rename="camel", omit_defaults=True):
    query: str = ""
    use_legacy_sql: bool = True


class TableFields(_Resource):
    """What is kept of a Table resource."""

    expiration_time: Milliseconds | msgspec.UnsetType = _NOT_SET
    time_partitioning: _TimePartitioning | msgspec.UnsetType = _NOT_SET
    range_partitioning: _RangePartitioning | msgspec.UnsetType = _NOT_SET
    clustering: _Clustering | msgspec.UnsetType = _NOT_SET
    require_partition_filter: bool | msgspec.UnsetType = _NOT_SET
    view: _View | msgspec.UnsetType = _NOT_SET


def read_fields(body: Json, fields: type[_Resource]) -> Json:
    """The fields of a resource that are kept, each of its type. Integers become text.

    Null stands for a field that is not set.

    Raises:
        InvalidError: a value is not of its field's type. The message names the field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        read = msgspec.convert(given, fields, strict=False)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise InvalidError(f"Invalid value for {where.rstrip('`')}: {reason}") from None
    found: Json = _with_text(msgspec.to_builtins(read))
    return found


def _with_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_text(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_text(each) for each in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value
