"""Dataset and table settings: which fields are stored, and how they are validated."""

from typing import Any

from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.tables.fields import LAST_MS, read_fields
from bigquery_emulator.tables.resource_fields import (
    DatasetFields,
    SchemaFields,
    TableFields,
    ViewFields,
)
from bigquery_emulator.tables.resources import DatasetResource, TableResource
from bigquery_emulator.tables.schema import Json, Schema, parse_schema

_OTHER_TABLES = (
    "externalDataConfiguration",
    "materializedView",
    "snapshotDefinition",
    "cloneDefinition",
)
_PARTITION_UNITS = ("HOUR", "DAY", "MONTH", "YEAR")
_PARTITION_TYPES = ("DATE", "TIMESTAMP", "DATETIME")


def merged(old: Json, patch: Json) -> Json:
    """Returns `old` updated with the fields in `patch`.

    Null removes a field, and objects are merged.

    This is how PATCH works in Google's APIs (JSON merge patch, RFC 7396).
    """
    result: dict[str, Any] = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def given_schema(body: Json) -> Schema | None:
    """Returns the schema in a Table resource. None if it is missing.

    Raises:
        InvalidError: a field has the wrong type or an invalid value.
        UnsupportedError: this server does not support a type or an option.
    """
    if body.get("schema") is None:
        return None
    checked = read_fields({"schema": body["schema"]}, SchemaFields)
    return parse_schema(checked["schema"].get("fields", ()))


def given_view_query(body: Json) -> str | None:
    """Returns the view query in a Table resource. None if it is missing.

    Raises:
        InvalidError: a field has the wrong type.
    """
    checked = read_fields({"view": body.get("view")}, ViewFields)
    return checked.get("view", {}).get("query") or None


def dataset_settings(body: Json) -> Json:
    """Returns a Dataset resource's stored fields.

    Raises:
        InvalidError: a field has the wrong type.
        UnsupportedError: names must be case-insensitive.
    """
    settings = read_fields(body, DatasetFields)
    if settings.get("isCaseInsensitive"):
        raise UnsupportedError("isCaseInsensitive: not supported by the embedded BigQuery")
    return settings


def table_settings(schema: Schema, body: Json, dataset: DatasetResource, created_ms: int) -> Json:
    """Returns a Table resource's stored fields.

    Args:
        dataset: the dataset that contains the table. The dataset's defaults apply.
        created_ms: when the table was created, for the default expiration.

    Raises:
        InvalidError: a field has the wrong type, or a column is unsuitable for partitioning or
            clustering.
        UnsupportedError: it is an external table, a snapshot, or another kind of table that this
            server does not support.
    """
    for name in _OTHER_TABLES:
        if body.get(name):
            raise UnsupportedError(f"{name}: not supported by the embedded BigQuery")
    settings = read_fields(body, TableFields)
    if "view" in settings:
        return _view_settings(settings)
    default_ms = dataset.settings.get("defaultTableExpirationMs")
    if default_ms is not None and "expirationTime" not in settings:
        settings["expirationTime"] = str(min(created_ms + int(default_ms), LAST_MS))
    if "timePartitioning" in settings:
        settings["timePartitioning"] = _time_partitioning(
            schema, settings["timePartitioning"], dataset
        )
        # Older clients put the filter flag in the partitioning settings.
        if settings["timePartitioning"].pop("requirePartitionFilter", False):
            settings["requirePartitionFilter"] = True
    if "rangePartitioning" in settings:
        _check_field(
            schema, settings["rangePartitioning"].get("field"), ("INTEGER",), "range partitioning"
        )
    if "clustering" in settings:
        _check_clustering(schema, settings["clustering"])
    return settings


def check_same_kind(old: TableResource, settings: Json) -> None:
    """Rejects settings that would turn a table into a view, or change when rows were ingested.

    Raises:
        InvalidError: the settings are rejected.
    """
    if (old.view_query is not None) != ("view" in settings):
        raise InvalidError(f"Invalid value for view: {old.key} can't change between table and view")
    partitioning = settings.get("timePartitioning")
    has_time = partitioning is not None and not partitioning.get("field")
    if has_time != old.has_partition_time:
        raise InvalidError(
            "Invalid value for timePartitioning: a table's partitioning can't be changed to "
            "or from ingestion time"
        )


def _view_settings(found: Json) -> Json:
    view = found["view"]
    if not view.get("query"):
        raise InvalidError("Required parameter is missing: view.query")
    if view.get("useLegacySql", True):
        raise UnsupportedError(
            "Legacy SQL: not supported by the embedded BigQuery; set useLegacySql to false"
        )
    found["view"] = {"query": view.get("query", ""), "useLegacySql": False}
    return found


def _time_partitioning(schema: Schema, partitioning: Json, dataset: DatasetResource) -> Json:
    settings = {**partitioning, "type": str(partitioning.get("type") or "DAY").upper()}
    if settings["type"] not in _PARTITION_UNITS:
        raise InvalidError(f"Invalid value for timePartitioning.type: {settings['type']}")
    default_ms = dataset.settings.get("defaultPartitionExpirationMs")
    if default_ms is not None and settings.get("expirationMs") is None:
        settings["expirationMs"] = str(default_ms)
    if settings.get("expirationMs") in (None, "0"):
        # Zero means no expiration, just as an empty field does.
        settings.pop("expirationMs", None)
    if settings.get("field"):
        _check_field(schema, settings["field"], _PARTITION_TYPES, "time partitioning")
    return settings


def _check_field(schema: Schema, name: Any, kinds: tuple[str, ...], purpose: str) -> None:
    for field in schema:
        if field.name.lower() == str(name).lower():
            if field.type not in kinds or field.mode == "REPEATED":
                raise InvalidError(
                    f"The field specified for {purpose} can only be of type {', '.join(kinds)}."
                    f" The type found is: {field.type}."
                )
            return
    raise InvalidError("The field specified for partitioning cannot be found in the schema.")


def _check_clustering(schema: Schema, clustering: Json) -> None:
    names = [str(name).lower() for name in clustering.get("fields", ())]
    if not 1 <= len(names) <= 4:
        raise InvalidError("Clustering requires one to four fields.")
    plain = {
        field.name.lower()
        for field in schema
        if field.mode != "REPEATED" and field.type != "RECORD"
    }
    for name in names:
        if name not in plain:
            raise InvalidError(
                f"The field specified for clustering cannot be found in the schema: {name}."
            )
