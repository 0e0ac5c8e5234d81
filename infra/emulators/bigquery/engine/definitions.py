"""GoogleSQL's data definition: CREATE, DROP, TRUNCATE and ALTER, put into the catalog.

A job runs it in the server's writer. What a statement does not say is as tables.insert has it.
"""

from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from infra.emulators.bigquery.engine.query import Result
from infra.emulators.bigquery.errors import DuplicateError, InvalidQueryError, NotFoundError
from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.references import Names, table_key
from infra.emulators.bigquery.store import Store
from infra.emulators.bigquery.tables.catalog import TableCatalog
from infra.emulators.bigquery.tables.resources import DatasetKey, TableKey
from infra.emulators.bigquery.tables.schema import Json, Schema, parse_schema, quoted

_TABLE_OPTIONS = {
    "description": "description",
    "friendly_name": "friendlyName",
    "require_partition_filter": "requirePartitionFilter",
    "labels": "labels",
}
_TRUNCATIONS = (exp.DateTrunc, exp.TimestampTrunc, exp.DatetimeTrunc)
_DAY_MS = 86_400_000


@dataclass(frozen=True)
class Defined:
    """What a data definition did: the API's ddlOperationPerformed, and the table it was about."""

    operation: str
    table: TableKey | None = None


class Definitions:
    """Runs data definitions.

    Args:
        store: the open database.
        catalog: the catalog.
        names: where the statement's names are looked up.
    """

    def __init__(self, store: Store, catalog: TableCatalog, names: Names) -> None:
        self._store = store
        self._catalog = catalog
        self._names = names

    def run(self, tree: exp.Expr, result: Result | None, view_schema: Schema | None) -> Defined:
        """Runs one statement.

        Args:
            tree: the parsed statement.
            result: the rows of CREATE TABLE AS.
            view_schema: the fields of CREATE VIEW.

        Raises:
            DuplicateError, NotFoundError: as the statement's IF [NOT] EXISTS allows.
            UnsupportedError: for a statement that this server does not know.
        """
        kind = str(tree.args.get("kind") or "TABLE").upper()
        if isinstance(tree, exp.Create) and kind == "SCHEMA":
            return self._create_schema(tree)
        if isinstance(tree, exp.Create) and kind in ("TABLE", "VIEW"):
            return self._create_table(tree, result, view_schema)
        if isinstance(tree, exp.Drop) and kind == "SCHEMA":
            return self._drop_schema(tree)
        if isinstance(tree, exp.Drop) and kind in ("TABLE", "VIEW"):
            return self._drop_table(tree)
        if isinstance(tree, exp.TruncateTable):
            return self._truncate(tree)
        if isinstance(tree, exp.Alter) and kind == "TABLE":
            return self._alter(tree)
        raise unsupported(f"{type(tree).__name__.upper()} {kind}")

    def _create_schema(self, tree: exp.Create) -> Defined:
        key = self._dataset_key(tree.this)
        if key in self._catalog.datasets and tree.args.get("exists"):
            return Defined("SKIP")
        self._catalog.create_dataset(key, {})
        return Defined("CREATE")

    def _create_table(
        self, tree: exp.Create, result: Result | None, view_schema: Schema | None
    ) -> Defined:
        node = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
        settings = _settings(tree)
        key = table_key(node, self._names)
        exists = key in self._catalog.tables
        if exists and tree.args.get("exists"):
            return Defined("SKIP", key)
        if exists and not tree.args.get("replace"):
            raise DuplicateError(f"Already Exists: Table {key}")
        schema = _columns(tree.this) if isinstance(tree.this, exp.Schema) else None
        filled_by = None
        if view_schema is not None:
            settings["view"] = {"query": tree.expression.sql("bigquery"), "useLegacySql": False}
            schema = view_schema
        elif result is not None:
            schema = schema or result.schema
            filled_by = (
                f"SELECT {', '.join(quoted(f.name) for f in result.schema)} FROM {result.physical}"
            )
        if schema is None:
            raise InvalidQueryError("CREATE TABLE needs columns or a query")
        if exists:
            self._catalog.delete_table(key)
        self._catalog.create_table(key, schema, settings, filled_by)
        return Defined("REPLACE" if exists else "CREATE", key)

    def _drop_schema(self, tree: exp.Drop) -> Defined:
        key = self._dataset_key(tree.args["tables"][0])
        if key not in self._catalog.datasets and tree.args.get("exists"):
            return Defined("SKIP")
        self._catalog.dataset(key)
        self._catalog.delete_dataset(key, with_contents=bool(tree.args.get("cascade")))
        return Defined("DROP")

    def _drop_table(self, tree: exp.Drop) -> Defined:
        (node,) = tree.args["tables"]
        key = table_key(node, self._names)
        if key not in self._catalog.tables and tree.args.get("exists"):
            return Defined("SKIP", key)
        is_view = self._catalog.table(key).view_query is not None
        if is_view != (str(tree.args["kind"]).upper() == "VIEW"):
            raise InvalidQueryError(f"{key} is not of the kind that the statement drops")
        self._catalog.delete_table(key)
        return Defined("DROP", key)

    def _truncate(self, tree: exp.TruncateTable) -> Defined:
        (node,) = tree.expressions
        table = self._catalog.table(table_key(node, self._names))
        if table.view_query is not None:
            raise InvalidQueryError(f"{table.key} is a view")
        with self._store.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table.physical}")
        return Defined("REPLACE", table.key)

    def _alter(self, tree: exp.Alter) -> Defined:
        key = table_key(tree.this, self._names)
        if key not in self._catalog.tables and tree.args.get("exists"):
            return Defined("SKIP", key)
        table = self._catalog.table(key)
        fields = [field.resource() for field in table.schema]
        known = {field.name.lower() for field in table.schema}
        for action in tree.args["actions"]:
            if not isinstance(action, exp.ColumnDef):
                raise unsupported("ALTER TABLE other than ADD COLUMN")
            if action.name.lower() in known:
                if action.args.get("exists"):
                    continue
                raise DuplicateError(f"Column already exists: {action.name}")
            fields.append(_column(action))
        self._catalog.update_table(key, {"schema": {"fields": fields}}, None, is_patch=True)
        return Defined("ALTER", key)

    def _dataset_key(self, node: exp.Expr) -> DatasetKey:
        if not isinstance(node, exp.Table) or not node.db:
            raise NotFoundError("Not found: a dataset's name")
        return DatasetKey(node.catalog or self._names.project, node.db)


def _columns(node: exp.Schema) -> Schema:
    wrong = [part for part in node.expressions if not isinstance(part, exp.ColumnDef)]
    if wrong:
        raise unsupported(f"{wrong[0].sql('bigquery')} in CREATE TABLE")
    return parse_schema([_column(part) for part in node.expressions])


def _column(node: exp.ColumnDef) -> Json:
    found = _typed(node.name, node.args["kind"])
    for constraint in node.args.get("constraints") or ():
        if isinstance(constraint.kind, exp.NotNullColumnConstraint):
            found["mode"] = "REQUIRED"
        elif isinstance(constraint.kind, exp.Properties):
            found |= {
                key: value
                for key, value in _options(constraint.kind).items()
                if key == "description"
            }
        else:
            raise unsupported(f"{constraint.sql('bigquery')} in a column")
    return found


def _typed(name: str, kind: exp.DataType) -> Json:
    if kind.this == exp.DType.ARRAY:
        return {**_typed(name, kind.expressions[0]), "mode": "REPEATED"}
    if kind.this == exp.DType.STRUCT:
        return {
            "name": name,
            "type": "RECORD",
            "fields": [_column(part) for part in kind.expressions],
        }
    return {"name": name, "type": kind.sql("bigquery")}


def _settings(tree: exp.Create) -> Json:
    found: Json = {}
    properties = tree.args.get("properties")
    for item in properties.expressions if properties is not None else ():
        if isinstance(item, exp.PartitionedByProperty):
            found["timePartitioning"] = {
                **found.get("timePartitioning", {}),
                **_partitioning(item.this),
            }
        elif isinstance(item, exp.ClusterProperty | exp.Cluster):
            found["clustering"] = {"fields": [column.name for column in item.expressions]}
        elif type(item) is exp.Property:
            _put_option(found, item.name.lower(), item.args["value"])
        else:
            raise unsupported(f"{item.sql('bigquery')} in CREATE")
    return found


def _partitioning(node: exp.Expr) -> Json:
    inner = node.expressions[0] if isinstance(node, exp.Schema | exp.Tuple) else node
    if isinstance(inner, _TRUNCATIONS):
        return {"type": inner.args["unit"].name.upper(), "field": inner.this.name}
    if isinstance(inner, exp.Date | exp.TsOrDsToDate):
        inner = inner.this
    if not isinstance(inner, exp.Column):
        raise unsupported(f"PARTITION BY {node.sql('bigquery')}")
    if inner.name.upper() in ("_PARTITIONDATE", "_PARTITIONTIME"):
        return {"type": "DAY"}
    return {"type": "DAY", "field": inner.name}


def _put_option(found: Json, name: str, value: exp.Expr) -> None:
    if name == "partition_expiration_days":
        expiration_ms = str(int(float(value.name) * _DAY_MS))
        found["timePartitioning"] = {
            **found.get("timePartitioning", {}),
            "expirationMs": expiration_ms,
        }
    elif name in _TABLE_OPTIONS:
        found[_TABLE_OPTIONS[name]] = _option_value(name, value)
    else:
        raise unsupported(f"OPTIONS({name})")


def _options(properties: exp.Properties) -> Json:
    return {
        item.name.lower(): _option_value(item.name, item.args["value"])
        for item in properties.expressions
    }


def _option_value(name: str, value: exp.Expr) -> Any:
    if isinstance(value, exp.Boolean):
        return value.this
    if isinstance(value, exp.Array):
        pairs = [item.expressions for item in value.expressions if isinstance(item, exp.Tuple)]
        return {key.name: label.name for key, label in pairs}
    if isinstance(value, exp.Literal):
        return value.name
    raise unsupported(f"OPTIONS({name})")
