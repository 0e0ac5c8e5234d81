"""Dataset and table options: the rows of SCHEMATA_OPTIONS and TABLE_OPTIONS.

Values are written as in GoogleSQL's OPTIONS.
"""

import json
from datetime import UTC, datetime, timedelta

from bigquery_emulator.engine.information.described import named
from bigquery_emulator.tables.fields import LAST_MS
from bigquery_emulator.tables.listing import Row, fields
from bigquery_emulator.tables.resources import DatasetResource, TableResource
from bigquery_emulator.tables.schema import Json

SCHEMATA_OPTIONS = fields("catalog_name schema_name option_name option_type option_value")
TABLE_OPTIONS = fields("table_catalog table_schema table_name option_name option_type option_value")
_DAY_MS = 86_400_000


def dataset_rows(dataset: DatasetResource) -> list[Row]:
    """Returns the SCHEMATA_OPTIONS rows for a dataset."""
    options = _shared(dataset.settings)
    for name, key in (
        ("default_table_expiration_days", "defaultTableExpirationMs"),
        ("default_partition_expiration_days", "defaultPartitionExpirationMs"),
    ):
        if key in dataset.settings:
            options.append((name, "FLOAT64", _days(dataset.settings[key])))
    return [(dataset.key.project, dataset.key.dataset_id, *option) for option in options]


def table_rows(table: TableResource) -> list[Row]:
    """Returns the TABLE_OPTIONS rows for a table or view."""
    settings = table.settings
    options = _shared(settings)
    if "expirationTime" in settings:
        expires_ms = min(int(settings["expirationTime"]), LAST_MS)
        moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=expires_ms)
        text = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        options.append(("expiration_timestamp", "TIMESTAMP", f'TIMESTAMP "{text}"'))
    if settings.get("requirePartitionFilter"):
        options.append(("require_partition_filter", "BOOL", "true"))
    if table.partitioning is not None and table.partitioning.expiration_ms is not None:
        days = _days(table.partitioning.expiration_ms)
        options.append(("partition_expiration_days", "FLOAT64", days))
    return [(*named(table), *option) for option in options]


def _shared(settings: Json) -> list[tuple[str, str, str]]:
    options = [
        (name, "STRING", json.dumps(settings[key], ensure_ascii=False))
        for name, key in (("description", "description"), ("friendly_name", "friendlyName"))
        if key in settings
    ]
    if settings.get("labels"):
        pairs = [
            f"STRUCT({json.dumps(key)}, {json.dumps(value)})"
            for key, value in sorted(settings["labels"].items())
        ]
        options.append(("labels", "ARRAY<STRUCT<STRING, STRING>>", f"[{', '.join(pairs)}]"))
    return options


def _days(milliseconds: str | int) -> str:
    return repr(int(milliseconds) / _DAY_MS)
