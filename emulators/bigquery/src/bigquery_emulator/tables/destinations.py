"""Writes rows from a query, load, or copy to a destination table, following its dispositions.

Runs in the server's writer thread.
"""

from dataclasses import dataclass, replace

from bigquery_emulator.errors import DuplicateError, InvalidError, NotFoundError
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.limits import NO_LIMITS
from bigquery_emulator.tables.partition_ids import (
    partition_condition,
    partition_start,
    partition_unit,
    undecorated,
)
from bigquery_emulator.tables.physical import fill
from bigquery_emulator.tables.resources import TableKey, TableResource
from bigquery_emulator.tables.schema import Field, Json, Schema


@dataclass(frozen=True)
class TableDestination:
    """The destination for rows.

    `settings` contains the table's partitioning, clustering, and so on, in case it has to be
    created. `partition_id` names a single partition to write, or is None to write the whole table.
    """

    key: TableKey
    creates: bool
    write: str
    adds_fields: bool
    settings: Json
    relaxes_fields: bool = False
    partition_id: str | None = None


def parse_destination(config: Json, default_write: str) -> TableDestination:
    """Parses the destination in a job's configuration.

    Args:
        config: the configuration of a query, load, or copy.
        default_write: WRITE_APPEND for a load, WRITE_EMPTY for other jobs.

    Raises:
        InvalidError: there is no such disposition.
    """
    reference = config["destinationTable"]
    write = config.get("writeDisposition") or default_write
    if write not in ("WRITE_EMPTY", "WRITE_APPEND", "WRITE_TRUNCATE"):
        raise InvalidError(f"Invalid value for writeDisposition: {write}")
    names = ("timePartitioning", "rangePartitioning", "clustering")
    key, partition_id = undecorated(
        TableKey(reference["projectId"], reference["datasetId"], reference["tableId"])
    )
    updates = config.get("schemaUpdateOptions") or ()
    unknown = set(updates) - {"ALLOW_FIELD_ADDITION", "ALLOW_FIELD_RELAXATION"}
    if unknown:
        raise InvalidError(f"Invalid value for schemaUpdateOptions: {sorted(unknown)[0]}")
    if updates and write == "WRITE_EMPTY":
        raise InvalidError(
            "schemaUpdateOptions requires WRITE_APPEND, or WRITE_TRUNCATE of a partition"
        )
    return TableDestination(
        key,
        config.get("createDisposition", "CREATE_IF_NEEDED") != "CREATE_NEVER",
        write,
        "ALLOW_FIELD_ADDITION" in updates,
        {name: config[name] for name in names if config.get(name)},
        "ALLOW_FIELD_RELAXATION" in updates,
        partition_id,
    )


def put_rows(
    store: Store, catalog: TableCatalog, destination: TableDestination, schema: Schema, source: str
) -> TableResource:
    """Writes a DuckDB table's rows to the destination: either all of them or none.

    Args:
        source: the DuckDB table that contains the rows.

    Raises:
        DuplicateError: the destination must be empty but is not.
        InvalidError: the fields don't match the table.
        NotFoundError: the table does not exist and must not be created.
    """
    table = catalog.tables.get(destination.key)
    if table is None:
        return _created(store, catalog, destination, schema, source)
    if table.view_query is not None:
        raise InvalidError(
            f"{table.key} is not allowed for this operation because it is currently a VIEW."
        )
    if destination.partition_id is not None:
        return _put_partition(store, catalog, table, destination, schema, source)
    if destination.write == "WRITE_TRUNCATE" or not table.schema:
        return _replaced(catalog, table, destination, schema, source)
    if destination.write == "WRITE_EMPTY" and _count(store, table.physical):
        raise DuplicateError(f"Already Exists: Table {table.key}")
    table = _fit_table(catalog, table, destination, schema)
    with store.transaction() as cursor:
        fill(cursor, table, schema, source)
    return table


def _created(
    store: Store,
    catalog: TableCatalog,
    destination: TableDestination,
    schema: Schema,
    source: str,
) -> TableResource:
    if not destination.creates:
        raise NotFoundError(f"Not found: Table {destination.key}")
    if destination.partition_id is None:
        return catalog.create_table(destination.key, schema, destination.settings, source)
    # As in the service, a table created by way of a decorator is partitioned by ingestion time.
    default = {"timePartitioning": {"type": partition_unit(destination.partition_id)}}
    table = catalog.create_table(destination.key, schema, default | destination.settings)
    try:
        return _put_partition(store, catalog, table, destination, schema, source)
    except BaseException:
        catalog.delete_table(table.key)
        raise


def _put_partition(
    store: Store,
    catalog: TableCatalog,
    table: TableResource,
    destination: TableDestination,
    schema: Schema,
    source: str,
) -> TableResource:
    partition_id = destination.partition_id or ""
    within = partition_condition(table, partition_id)
    if table.has_partition_time:
        moment = f"CAST({partition_start(table, partition_id)} AS TIMESTAMP WITH TIME ZONE)"
    else:
        moment = None
        if _count(store, source, f"NOT coalesce({within}, false)"):
            raise InvalidError(
                "Some rows belong to different partitions rather than destination partition"
                f" {table.key}${partition_id}"
            )
    if destination.write == "WRITE_EMPTY" and _count(store, table.physical, within):
        raise DuplicateError(f"Already Exists: Table {table.key}${partition_id}")
    table = _fit_table(catalog, table, destination, schema)
    with store.transaction() as cursor:
        if destination.write == "WRITE_TRUNCATE":
            cursor.execute(f"DELETE FROM {table.physical} WHERE {within}")
        fill(cursor, table, schema, source, moment)
    return table


def _count(store: Store, source: str, condition: str = "true") -> int:
    with store.reading() as cursor:
        (rows,) = cursor.execute(f"SELECT count(*) FROM {source} WHERE {condition}").fetchone()
    return int(rows)


def _replaced(
    catalog: TableCatalog,
    table: TableResource,
    destination: TableDestination,
    schema: Schema,
    source: str,
) -> TableResource:
    settings = {**table.settings, **destination.settings}
    modes = {field.name.lower(): field for field in table.schema}
    # A query result has no descriptions and no REQUIRED fields; if the table already has the field,
    # it keeps both.
    fields = tuple(_kept(field, modes.get(field.name.lower())) for field in schema)
    return catalog.create_table(table.key, fields, settings, source, replaces=True)


def _kept(field: Field, old: Field | None) -> Field:
    if old is None or old.type != field.type:
        return field
    mode = "REQUIRED" if old.mode == "REQUIRED" and field.mode == "NULLABLE" else field.mode
    return replace(
        field,
        mode=mode,
        description=field.description or old.description,
        limits=old.limits if field.limits == NO_LIMITS else field.limits,
    )


def _fit_table(
    catalog: TableCatalog, table: TableResource, destination: TableDestination, schema: Schema
) -> TableResource:
    known = {field.name.lower(): field for field in table.schema}
    added = [field for field in schema if field.name.lower() not in known]
    for field in schema:
        old = known.get(field.name.lower())
        if old is not None and (old.type, old.mode == "REPEATED") != (
            field.type,
            field.mode == "REPEATED",
        ):
            raise InvalidError(
                f"Provided Schema does not match Table {table.key}. Field {field.name} has changed"
                f" type from {old.type} to {field.type}"
            )
    names = {field.name.lower() for field in schema}
    missing = [
        field.name
        for field in table.schema
        if field.mode == "REQUIRED" and field.name.lower() not in names
    ]
    relaxed = {name.lower() for name in missing} if destination.relaxes_fields else set()
    if missing and not relaxed:
        raise InvalidError(
            f"Provided Schema does not match Table {table.key}. Cannot insert without"
            f" {', '.join(missing)}"
        )
    if destination.relaxes_fields:
        relaxed |= {
            field.name.lower()
            for field in schema
            if field.mode == "NULLABLE" and field.name.lower() in known
        }
    fields = tuple(
        replace(field, mode="NULLABLE")
        if field.mode == "REQUIRED" and field.name.lower() in relaxed
        else field
        for field in table.schema
    )
    if not added and fields == table.schema:
        return table
    if added and not destination.adds_fields:
        raise InvalidError(
            f"Provided Schema does not match Table {table.key}. Cannot add fields (field:"
            f" {added[0].name})"
        )
    wider = [field.resource() for field in (*fields, *added)]
    return catalog.update_table(table.key, {"schema": {"fields": wider}}, None, is_patch=True)
