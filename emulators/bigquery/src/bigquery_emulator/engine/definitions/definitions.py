"""Runs data definitions on the catalog: CREATE, DROP, TRUNCATE, and ALTER.

A job runs a definition in the server's writer thread. Settings that a statement does not specify
have the same defaults as for tables.insert.
"""

from dataclasses import dataclass, replace

from sqlglot import exp

from bigquery_emulator.engine.definitions.altering import altered
from bigquery_emulator.engine.definitions.columns import (
    column_options,
    columns,
    partitioning,
)
from bigquery_emulator.engine.definitions.options import (
    Evaluate,
    dataset_options,
    table_options,
)
from bigquery_emulator.engine.definitions.text import (
    AlterText,
    alter_text,
    option_texts,
    query_text,
    words,
)
from bigquery_emulator.engine.query import Result
from bigquery_emulator.errors import DuplicateError, InvalidQueryError, NotFoundError
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.definition import definition_kind
from bigquery_emulator.googlesql.names import Names
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey, TableResource
from bigquery_emulator.tables.schema import Json, Schema, quoted
from bigquery_emulator.tables.settings import merged

_COERCIONS = (("INTEGER", "NUMERIC"), ("INTEGER", "FLOAT"), ("NUMERIC", "FLOAT"))


@dataclass(frozen=True)
class Defined:
    """A data definition's result: ddlOperationPerformed, and the affected resource."""

    operation: str
    table: TableKey | None = None
    dataset: DatasetKey | None = None


class Definitions:
    """Runs data definitions."""

    def __init__(
        self, store: Store, catalog: TableCatalog, names: Names, evaluate: Evaluate
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._names = names
        self._evaluate = evaluate

    def run(
        self, tree: exp.Expr, sql: str, result: Result | None, view_schema: Schema | None
    ) -> Defined:
        """Runs a statement.

        Args:
            result: the rows of CREATE TABLE AS.

        Raises:
            DuplicateError, NotFoundError: unless the statement's IF [NOT] EXISTS allows it.
            UnsupportedError: this server does not support the statement.
        """
        kind = definition_kind(tree)
        if kind == "CREATE_SCHEMA":
            return self._create_schema(tree, sql)
        if kind in ("CREATE_TABLE", "CREATE_TABLE_AS_SELECT", "CREATE_VIEW"):
            return self._create_table(tree, sql, result, view_schema)
        if kind == "DROP_SCHEMA":
            return self._drop_schema(tree)
        if kind in ("DROP_TABLE", "DROP_VIEW"):
            return self._drop_table(tree)
        if kind == "TRUNCATE_TABLE":
            return self._truncate(tree)
        if kind in ("ALTER_TABLE", "ALTER_VIEW", "ALTER_SCHEMA"):
            return self._alter(kind, sql)
        raise unsupported(kind.replace("_", " "))

    def _create_schema(self, tree: exp.Expr, sql: str) -> Defined:
        key = self._dataset_key(tree.this)
        if key in self._catalog.datasets and tree.args.get("exists"):
            return Defined("SKIP", dataset=key)
        options = dataset_options(option_texts(sql), self._evaluate)
        self._catalog.create_dataset(key, options)
        return Defined("CREATE", dataset=key)

    def _create_table(
        self, tree: exp.Expr, sql: str, result: Result | None, view_schema: Schema | None
    ) -> Defined:
        node = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
        settings = self._settings(tree, sql)
        key = _table_key(node, self._names)
        exists = key in self._catalog.tables
        if exists and tree.args.get("exists"):
            return Defined("SKIP", key)
        if exists and not tree.args.get("replace"):
            raise DuplicateError(f"Already Exists: Table {key}")
        schema, filled_by = None, None
        if view_schema is not None:
            settings["view"] = {"query": query_text(sql), "useLegacySql": False}
            schema = _view_columns(tree, view_schema)
        elif isinstance(tree.this, exp.Schema):
            schema = columns(tree.this)
        if result is not None:
            schema = schema or result.schema
            filled_by = _rename_columns(result, schema)
        model = self._model(tree)
        if model is not None:
            schema, settings, filled_by = _like(tree, model, settings)
        if schema is None:
            raise InvalidQueryError("CREATE TABLE requires columns or a query")
        self._catalog.create_table(key, schema, settings, filled_by, replaces=exists)
        return Defined("REPLACE" if exists else "CREATE", key)

    def _settings(self, tree: exp.Expr, sql: str) -> Json:
        settings: Json = {}
        properties = tree.args.get("properties")
        for item in properties.expressions if properties is not None else ():
            if isinstance(item, exp.PartitionedByProperty):
                settings |= partitioning(item.this)
            elif isinstance(item, exp.ClusterProperty | exp.Cluster):
                settings["clustering"] = {"fields": [column.name for column in item.expressions]}
            elif type(item) is not exp.Property and not isinstance(item, exp.LikeProperty):
                raise unsupported(f"{item.sql('bigquery')} in CREATE")
        options = table_options(option_texts(sql), self._evaluate)
        if "timePartitioning" in options and "timePartitioning" not in settings:
            raise InvalidQueryError("partition_expiration_days requires PARTITION BY a time")
        return merged(settings, options)

    def _model(self, tree: exp.Expr) -> TableResource | None:
        """Returns the table named in CREATE TABLE LIKE or COPY."""
        clone = tree.args.get("clone")
        if clone is not None and not clone.args.get("copy"):
            raise unsupported("CREATE TABLE CLONE")
        properties = tree.args.get("properties")
        likes = [] if properties is None else list(properties.find_all(exp.LikeProperty))
        node = clone.this if clone is not None else likes[0].this if likes else None
        if node is None:
            return None
        model = self._catalog.table(_table_key(node, self._names))
        if model.view_query is not None:
            raise InvalidQueryError(f"{model.key} is a view")
        return model

    def _drop_schema(self, tree: exp.Expr) -> Defined:
        key = self._dataset_key(tree.args["tables"][0])
        if key not in self._catalog.datasets and tree.args.get("exists"):
            return Defined("SKIP", dataset=key)
        self._catalog.dataset(key)
        self._catalog.delete_dataset(key, with_contents=bool(tree.args.get("cascade")))
        return Defined("DROP", dataset=key)

    def _drop_table(self, tree: exp.Expr) -> Defined:
        (node,) = tree.args["tables"]
        key = _table_key(node, self._names)
        if key not in self._catalog.tables and tree.args.get("exists"):
            return Defined("SKIP", key)
        is_view = self._catalog.table(key).view_query is not None
        if is_view != (str(tree.args["kind"]).upper() == "VIEW"):
            raise InvalidQueryError(f"{key} is not the kind of object that the statement drops")
        self._catalog.delete_table(key)
        return Defined("DROP", key)

    def _truncate(self, tree: exp.Expr) -> Defined:
        (node,) = tree.expressions
        table = self._catalog.table(_table_key(node, self._names))
        if table.view_query is not None:
            raise InvalidQueryError(f"{table.key} is a view")
        with self._store.transaction() as cursor:
            cursor.execute(f"DELETE FROM {table.physical}")
        return Defined("REPLACE", table.key)

    def _alter(self, kind: str, sql: str) -> Defined:
        cut = alter_text(sql)
        texts = cut.actions
        node = exp.to_table(cut.name, dialect="bigquery")
        if kind == "ALTER_SCHEMA":
            return self._alter_schema(node, cut)
        key = _table_key(node, self._names)
        if key not in self._catalog.tables and cut.is_optional:
            return Defined("SKIP", key)
        table = self._catalog.table(key)
        if (table.view_query is not None) != (kind == "ALTER_VIEW"):
            raise InvalidQueryError(f"{key} is not the kind of object that the statement alters")
        if words(texts[0])[:2] == ["RENAME", "TO"]:
            return self._rename(table, texts)
        shape = altered(table, texts, self._evaluate)
        if shape.is_only_wider:
            fields = [field.resource() for field in shape.schema]
            schema = {"schema": {"fields": fields}} if table.view_query is None else {}
            self._catalog.update_table(key, {**shape.settings, **schema}, None, is_patch=False)
        else:
            self._catalog.reshape_table(key, shape.schema, shape.settings, shape.sources)
        return Defined("ALTER", key)

    def _rename(self, table: TableResource, texts: list[str]) -> Defined:
        if len(texts) > 1 or table.view_query is not None:
            raise InvalidQueryError("RENAME TO must be the only action, and only works on tables")
        name = texts[0].split()[2:]
        new = exp.to_table(" ".join(name), dialect="bigquery")
        if new.db:
            raise InvalidQueryError("RENAME TO takes a table name without a dataset")
        key = TableKey(table.key.project, table.key.dataset_id, new.name)
        self._catalog.rename_table(table.key, key)
        return Defined("ALTER", table.key)

    def _alter_schema(self, node: exp.Table, cut: AlterText) -> Defined:
        # A dataset's name is parsed in the same way as a table's.
        key = DatasetKey(node.db or self._names.project, node.name)
        if key not in self._catalog.datasets and cut.is_optional:
            return Defined("SKIP", dataset=key)
        changes: Json = {}
        for text in cut.actions:
            if words(text)[:2] != ["SET", "OPTIONS"]:
                raise unsupported(f"ALTER SCHEMA {text}")
            changes |= dataset_options(option_texts(text), self._evaluate)
        self._catalog.update_dataset(key, changes, None, is_patch=True)
        return Defined("ALTER", dataset=key)

    def _dataset_key(self, node: exp.Expr) -> DatasetKey:
        if not isinstance(node, exp.Table) or not node.db:
            raise NotFoundError("Not found: dataset name")
        return DatasetKey(node.catalog or self._names.project, node.db)


def _table_key(node: exp.Expr, names: Names) -> TableKey:
    parts = (node.args.get("catalog"), node.args.get("db"), node.this)
    return names.table_key(tuple(part.name for part in parts if part is not None))


def _rename_columns(result: Result, schema: Schema) -> str:
    if len(result.schema) != len(schema):
        raise InvalidQueryError(
            f"The number of columns in the column definition list ({len(schema)}) does not match"
            f" the number of columns produced by the query ({len(result.schema)})"
        )
    columns = []
    for source, target in zip(result.schema, schema, strict=True):
        if source.type != target.type and (source.type, target.type) not in _COERCIONS:
            raise InvalidQueryError(
                f"Column {target.name} of type {target.type} can't be created from type "
                f"{source.type}"
            )
        columns.append(f"{quoted(source.name)} AS {quoted(target.name)}")
    return f"(SELECT {', '.join(columns)} FROM {result.physical})"


def _view_columns(tree: exp.Expr, found: Schema) -> Schema:
    """Returns a view's fields, with the descriptions from its column list."""
    if not isinstance(tree.this, exp.Schema):
        return found
    parts = tree.this.expressions
    if [part.name.lower() for part in parts] != [field.name.lower() for field in found]:
        raise unsupported("CREATE VIEW with column names that differ from its query's")
    named = []
    for part, field in zip(parts, found, strict=True):
        changes: Json = {}
        for constraint in part.args.get("constraints") or ():
            if not isinstance(constraint.kind, exp.Properties):
                raise unsupported(f"{constraint.sql('bigquery')} in a view")
            changes |= column_options(constraint.kind)
        named.append(replace(field, **changes))
    return tuple(named)


def _like(tree: exp.Expr, model: TableResource, settings: Json) -> tuple[Schema, Json, str | None]:
    is_copy = tree.args.get("clone") is not None
    if is_copy and model.has_partition_time:
        raise unsupported("CREATE TABLE COPY of a table partitioned by ingestion time")
    inherited = {
        name: value
        for name, value in model.settings.items()
        # A copy does not inherit the expiration.
        if name != "expirationTime"
    }
    return model.schema, merged(inherited, settings), model.physical if is_copy else None
