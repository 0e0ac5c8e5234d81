"""Puts the rows of a query, a load or a copy into their destination table, as the dispositions say.

Runs in the server's writer.
"""

from dataclasses import dataclass, replace

from infra.emulators.bigquery.errors import DuplicateError, InvalidError, NotFoundError
from infra.emulators.bigquery.store import Store
from infra.emulators.bigquery.tables.catalog import TableCatalog
from infra.emulators.bigquery.tables.resources import TableKey, TableResource
from infra.emulators.bigquery.tables.schema import Field, Json, Schema, quoted


@dataclass(frozen=True)
class TableDestination:
    """Where rows go and how.

    `settings` are the table's partitioning, clustering and the like, should it be made.
    """

    key: TableKey
    creates: bool
    write: str
    adds_fields: bool
    settings: Json


def parse_destination(config: Json, default_write: str) -> TableDestination:
    """Reads the destination of a job's configuration.

    Args:
        config: the configuration of the query, load or copy.
        default_write: WRITE_APPEND for a load, WRITE_EMPTY for the others.

    Raises:
        InvalidError: for a disposition that there isn't.
    """
    reference = config["destinationTable"]
    write = config.get("writeDisposition") or default_write
    if write not in ("WRITE_EMPTY", "WRITE_APPEND", "WRITE_TRUNCATE"):
        raise InvalidError(f"Invalid value for writeDisposition: {write}")
    names = ("timePartitioning", "rangePartitioning", "clustering")
    return TableDestination(
        TableKey(reference["projectId"], reference["datasetId"], reference["tableId"]),
        config.get("createDisposition", "CREATE_IF_NEEDED") != "CREATE_NEVER",
        write,
        "ALLOW_FIELD_ADDITION" in (config.get("schemaUpdateOptions") or ()),
        {name: config[name] for name in names if config.get(name)},
    )


def put_rows(
    store: Store, catalog: TableCatalog, destination: TableDestination, schema: Schema, source: str
) -> TableResource:
    """Writes the rows of a DuckDB table into the destination, all or none.

    Args:
        store: the open database.
        catalog: the catalog.
        destination: where and how.
        schema: the fields of the rows.
        source: the DuckDB table that holds them.

    Raises:
        DuplicateError: where the destination must be empty and isn't.
        InvalidError: where the fields don't fit the table's.
        NotFoundError: where the table does not exist and must not be made.
    """
    table = catalog.tables.get(destination.key)
    if table is None:
        if not destination.creates:
            raise NotFoundError(f"Not found: Table {destination.key}")
        filled_by = f"SELECT {_names(schema)} FROM {source}"
        return catalog.create_table(destination.key, schema, destination.settings, filled_by)
    if table.view_query is not None:
        raise InvalidError(
            f"{table.key} is not allowed for this operation because it is currently a VIEW."
        )
    if destination.write == "WRITE_TRUNCATE":
        return _replaced(catalog, table, destination, schema, source)
    with store.cursor() as cursor:
        (rows,) = cursor.execute(f"SELECT count(*) FROM {table.physical}").fetchone()
    if destination.write == "WRITE_EMPTY" and rows:
        raise DuplicateError(f"Already Exists: Table {table.key}")
    table = _fitted(catalog, table, destination, schema)
    with store.transaction() as cursor:
        cursor.execute(
            f"INSERT INTO {table.physical} ({_names(schema)}) SELECT {_names(schema)} FROM {source}"
        )
    return table


def _replaced(
    catalog: TableCatalog,
    table: TableResource,
    destination: TableDestination,
    schema: Schema,
    source: str,
) -> TableResource:
    settings = {**table.settings, **destination.settings}
    modes = {field.name.lower(): field for field in table.schema}
    # A query knows no descriptions and no REQUIRED; where the table has the field, they stay.
    kept = tuple(_kept(field, modes.get(field.name.lower())) for field in schema)
    catalog.delete_table(table.key)
    return catalog.create_table(table.key, kept, settings, f"SELECT {_names(schema)} FROM {source}")


def _kept(field: Field, old: Field | None) -> Field:
    if old is None or old.type != field.type:
        return field
    mode = "REQUIRED" if old.mode == "REQUIRED" and field.mode == "NULLABLE" else field.mode
    return replace(field, mode=mode, description=field.description or old.description)


def _fitted(
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
    given = {field.name.lower() for field in schema}
    missing = [
        field.name
        for field in table.schema
        if field.mode == "REQUIRED" and field.name.lower() not in given
    ]
    if missing:
        raise InvalidError(
            f"Provided Schema does not match Table {table.key}. Cannot insert without"
            f" {', '.join(missing)}"
        )
    if not added:
        return table
    if not destination.adds_fields:
        raise InvalidError(
            f"Provided Schema does not match Table {table.key}. Cannot add fields (field:"
            f" {added[0].name})"
        )
    wider = [field.resource() for field in (*table.schema, *added)]
    return catalog.update_table(table.key, {"schema": {"fields": wider}}, None, is_patch=True)


def _names(schema: Schema) -> str:
    return ", ".join(quoted(field.name) for field in schema)
