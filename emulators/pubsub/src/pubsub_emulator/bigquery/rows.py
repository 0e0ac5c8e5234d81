"""Converts a message to the row that a BigQuery subscription writes.

Sources: https://cloud.google.com/pubsub/docs/bigquery and
    https://cloud.google.com/pubsub/docs/subscription-properties#bigquery
"""

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pubsub_emulator.protos import BigQueryConfig, PubsubMessage

Row = dict[str, Any]
Column = Mapping[str, Any]
"""A field in a table's schema, in the format of `tables.get`."""
Columns = Mapping[str, Column]
"""Keyed by lowercase name, because BigQuery's names are not case-sensitive."""

MAX_NESTING = 500
"""BigQuery's limit. Somewhat deeper, Python can read JSON but can no longer write it."""
METADATA_COLUMNS = ("subscription_name", "message_id", "publish_time", "attributes")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RowRefused(Exception):
    """A message that does not match its table. The text contains the reason."""


def columns_of(schema: Mapping[str, Any]) -> Columns:
    """Return the columns of a schema or a RECORD."""
    return {str(field["name"]).lower(): field for field in schema.get("fields", ())}


def missing_columns(config: BigQueryConfig, columns: Columns) -> list[str]:
    """Return the columns that every row needs but the table lacks."""
    needed = () if config.use_table_schema else ("data",)
    metadata = METADATA_COLUMNS if config.write_metadata else ()
    return [name for name in (*needed, *metadata) if name not in columns]


def row_of(
    subscription_path: str, config: BigQueryConfig, columns: Columns, message: PubsubMessage
) -> Row:
    """Return a message's row in insertAll's JSON format.

    Raises:
        RowRefused: the message's data does not match the columns.
    """
    row = (
        _fields_of(message.data, columns)
        if config.use_table_schema
        else {"data": _data_of(message.data, columns["data"])}
    )
    if config.write_metadata:
        attributes = dict(message.attributes)
        if message.ordering_key:
            attributes["ordering_key"] = message.ordering_key
        row |= {
            "subscription_name": subscription_path,
            "message_id": message.message_id,
            "publish_time": message.publish_time.ToJsonString(),
            "attributes": json.dumps(attributes),
        }
    return row


def _fields_of(data: bytes, columns: Columns) -> Row:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowRefused(f"the message is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RowRefused("the message is not a JSON object")
    if _is_nested_deeper(fields, MAX_NESTING):
        raise RowRefused(f"the message is nested more than {MAX_NESTING} levels deep")
    return _as_inserted(fields, columns)


def _is_nested_deeper(fields: Row, levels: int) -> bool:
    level: list[Any] = [fields]
    for _ in range(levels):
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else value
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def _as_inserted(fields: Row, columns: Columns) -> Row:
    return {name: _value(value, columns.get(name.lower())) for name, value in fields.items()}


def _value(value: Any, column: Column | None) -> Any:
    """Convert a value for insertAll. Values that BigQuery should reject are left unchanged."""
    if column is None or value is None:
        return value
    if column.get("mode") == "REPEATED" and isinstance(value, list):
        single = {**column, "mode": "NULLABLE"}
        return [_value(element, single) for element in value]
    if column["type"] in ("RECORD", "STRUCT") and isinstance(value, dict):
        return _as_inserted(value, columns_of(column))
    if column["type"] == "JSON" and not isinstance(value, str):
        return json.dumps(value)
    if column["type"] == "TIMESTAMP" and isinstance(value, int | float):
        return _timestamp(value, str(column["name"]))
    return value


def _timestamp(value: float, name: str) -> str:
    """Return microseconds as text, because insertAll would interpret a number as seconds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RowRefused(
            f"{name}: a number for a TIMESTAMP must be a whole number of microseconds since "
            f"1970, got {value}"
        )
    try:
        return (_EPOCH + timedelta(microseconds=value)).isoformat()
    except OverflowError as error:
        raise RowRefused(f"{name}: {value} microseconds is out of range") from error


def _data_of(data: bytes, column: Column) -> str:
    if column["type"] == "BYTES":
        return base64.b64encode(data).decode()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RowRefused(f"data: must be valid UTF-8 for type {column['type']}") from error
