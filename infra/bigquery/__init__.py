"""The single definition of the BigQuery tables: their schemas, options, and views.

`rows` is the usage table. `worker_hours` records how workers spend their time, `worker_starts` how
long each start took, and `webhook_deliveries` the outcome of each delivery. `daily_usage` and
`anomalies` are computed from rows, one day at a time. `create` reads the files next to this one for
the local stack, and Terraform reads them for the cloud. Views name a table as
`${project}.${dataset}.rows`. The reports that read these tables are in `shared/reports`.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.cloud import bigquery

TABLE = "rows"
_FOLDER = Path(__file__).parent
_TABLE_FIELDS = [
    "schema",
    "description",
    "time_partitioning",
    "clustering_fields",
    "require_partition_filter",
]


def tables() -> list[str]:
    return sorted(path.name.partition(".")[0] for path in _FOLDER.glob("*.table.json"))


def schema(table: str = TABLE) -> list[dict[str, str]]:
    """Returns a table's fields as BigQuery schema JSON: name, type, mode, description."""
    schema: list[dict[str, str]] = json.loads((_FOLDER / f"{table}.schema.json").read_text())
    return schema


def table_options(table: str = TABLE) -> dict[str, Any]:
    """Returns the partitioning and clustering, in the format of BigQuery's Table resource."""
    table_: dict[str, Any] = json.loads((_FOLDER / f"{table}.table.json").read_text())
    return table_


def views(project: str, dataset: str) -> dict[str, str]:
    """Returns each view's GoogleSQL, keyed by name, for the tables of a project and dataset."""
    return {
        name: Template(sql).substitute(project=project, dataset=dataset, only="TRUE")
        for name, sql in _files("views").items()
    }


def view_columns(name: str) -> dict[str, str]:
    """Returns a view's column descriptions, in order, from the top of its file, if any."""
    files: dict[str, str] = {}
    for line in (_files("views") | _files("tenant_views"))[name].splitlines():
        if line.startswith("-- column "):
            column, _, about = line.removeprefix("-- column ").partition(": ")
            files[column] = about
    return files


def view_title(name: str) -> str:
    """Returns the first line of a view's file, which describes it."""
    return (_files("views") | _files("tenant_views"))[name].partition("\n")[0].removeprefix("-- ")


def _files(folder: str) -> dict[str, str]:
    paths = sorted((_FOLDER / folder).glob("*.sql"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def create(client: bigquery.Client, dataset: str) -> None:
    """Creates the dataset, the tables, and the views, or updates existing ones.

    Unknown columns are kept, because a later release may have added them before it was rolled back.

    Raises:
        google.api_core.exceptions.GoogleAPICallError: BigQuery is unreachable or rejected a
        request.
    """
    client.create_dataset(dataset, exists_ok=True)
    name = f"{client.project}.{dataset}"
    for table in tables():
        described = {"schema": {"fields": schema(table)}, **table_options(table)}
        _put(client, f"{name}.{table}", described, _TABLE_FIELDS)
    for view, query in views(client.project, dataset).items():
        described = {"view": {"query": query, "useLegacySql": False}}
        _put(client, f"{name}.{view}", described, ["view_query"])


def _put(client: bigquery.Client, name: str, resource: dict[str, Any], fields: list[str]) -> None:
    # Imported here so that reading the schema does not load Google's client.
    from google.api_core.exceptions import Conflict
    from google.cloud import bigquery

    reference = bigquery.TableReference.from_string(name).to_api_repr()
    table = bigquery.Table.from_api_repr({"tableReference": reference, **resource})
    try:
        client.create_table(table)
    except Conflict:
        if "schema" in fields:
            known = {field.name for field in table.schema}
            stored = client.get_table(table.reference).schema
            table.schema = [*table.schema, *(field for field in stored if field.name not in known)]
        client.update_table(table, fields)
