"""From GoogleSQL text to a DuckDB statement: parse, check, resolve names, bind, rewrite, write.

The entry of this package, called by query jobs and views. Data definition goes on to `definitions`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlglot
from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.parameters import Bindings, put_parameters
from infra.emulators.bigquery.googlesql.partitions import check_partition_filters
from infra.emulators.bigquery.googlesql.references import Names, Resolved, resolve
from infra.emulators.bigquery.googlesql.rewrite import rewrite
from infra.emulators.bigquery.googlesql.supported import check
from infra.emulators.bigquery.tables.listing import Listing
from infra.emulators.bigquery.tables.resources import DatasetKey, TableKey, TableResource
from infra.emulators.bigquery.tables.schema import Json

_DEFINITIONS = (exp.Create, exp.Drop, exp.TruncateTable, exp.Alter)
_MANIPULATIONS: dict[type[exp.Expr], str] = {
    exp.Insert: "INSERT",
    exp.Update: "UPDATE",
    exp.Delete: "DELETE",
    exp.Merge: "MERGE",
}


@dataclass(frozen=True)
class Statement:
    """A statement ready for DuckDB.

    `kind` is the API's statementType. `columns` are the names that it mentions, None where it takes
    all of them. `expanded` are the aliases of UNNESTs beside a `*`, whose records BigQuery would
    expand. `definition` is the parsed tree of a data definition, which has no `sql`. `target` is
    the table that INSERT, UPDATE, DELETE or MERGE changes.
    """

    kind: str
    sql: str
    values: dict[str, Any]
    tables: tuple[TableResource, ...]
    columns: frozenset[str] | None
    expanded: frozenset[str] = frozenset()
    definition: exp.Expr | None = None
    target: TableKey | None = None


@dataclass(frozen=True)
class Translator:
    """Translates with one catalog.

    Args:
        find: returns a table by its full name or raises NotFoundError.
        listing: gives the rows of an INFORMATION_SCHEMA view: its name, the parts of the name
            before it, the job's project.
    """

    find: Callable[[TableKey], TableResource]
    listing: Callable[[str, Sequence[str], str], Listing]

    def translate(
        self,
        sql: str,
        project: str,
        default_dataset: DatasetKey | None,
        parameters: Sequence[Json] = (),
        is_view: bool = False,
    ) -> Statement:
        """Returns the DuckDB statement for one GoogleSQL statement.

        Args:
            sql: GoogleSQL.
            project: the project of names that have none.
            default_dataset: the data set of names that have none.
            parameters: QueryParameter resources.
            is_view: whether it is a view's query, on whose result a filter may still come.

        Raises:
            InvalidQueryError: for what BigQuery refuses as well.
            NotFoundError: for a table that does not exist.
            UnsupportedError: for what this server can't answer.
        """
        tree = parse(sql)
        names = self.names(project, default_dataset)
        if isinstance(tree, _DEFINITIONS) or _is_alter(tree):
            return Statement(definition_kind(tree), "", {}, (), None, definition=tree)
        kind = "SELECT" if isinstance(tree, exp.Query) else _MANIPULATIONS.get(type(tree))
        if kind is None:
            raise unsupported(f"{type(tree).__name__.upper()} statements")
        bindings, resolved = Bindings(), Resolved()
        tree = resolve(put_parameters(tree, parameters, bindings), names, resolved)
        if not is_view:
            check_partition_filters(tree, resolved.tables)
        target = None if kind == "SELECT" else _target(tree, resolved)
        _fit_manipulation(tree, resolved)
        columns, expanded = _mentioned_columns(tree), _expanded_aliases(tree)
        sql = _written(rewrite(tree))
        tables = tuple(resolved.tables.values())
        return Statement(kind, sql, bindings.values, tables, columns, expanded, target=target)

    def names(self, project: str, default_dataset: DatasetKey | None) -> Names:
        """Returns where names of a statement are looked up."""
        return Names(project, default_dataset, self.find, self.listing, parse_query)


def parse(sql: str) -> exp.Expr:
    """Parses one GoogleSQL statement and refuses unknown parts.

    Raises:
        InvalidQueryError: for a syntax error, with the line and column, or an unknown function.
        UnsupportedError: for a script, or an expression that this server can't answer.
    """
    try:
        found = [tree for tree in sqlglot.parse(sql, dialect="bigquery") if tree is not None]
    except sqlglot.errors.SqlglotError as error:
        raise InvalidQueryError(_syntax_message(error)) from error
    if not found:
        raise InvalidQueryError("Syntax error: Unexpected end of statement")
    if len(found) > 1:
        raise unsupported("Scripts of several statements")
    (tree,) = found
    if isinstance(tree, exp.Delete) and not tree.this:
        # DELETE without FROM is read as MySQL's DELETE of several tables.
        tree.set("this", tree.args["tables"][0])
        tree.set("tables", None)
    if isinstance(tree, _DEFINITIONS):
        # A query inside is checked when its own text is translated.
        return tree
    check(tree)
    for select in list(tree.find_all(exp.Select)):
        _name_columns(select)
    return tree


def parse_query(sql: str) -> exp.Expr:
    """Reads a view's query.

    Raises:
        InvalidQueryError: where it isn't a query.
    """
    tree = parse(sql)
    if not isinstance(tree, exp.Query):
        raise InvalidQueryError("A view's query must be a SELECT")
    return tree


def _syntax_message(error: sqlglot.errors.SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return f"Syntax error: {error}"
    first = details[0]
    return f"Syntax error: {first['description']} at [{first['line']}:{first['col']}]"


def _name_columns(select: exp.Select) -> None:
    """Names what has no name as BigQuery does: f0_, f1_ and so on, and a path by its last part."""
    unnamed = 0
    for position, projection in enumerate(select.expressions):
        if isinstance(projection, exp.Alias | exp.Star | exp.Column):
            continue
        if isinstance(projection, exp.Dot):
            if isinstance(projection.expression, exp.Star):
                continue
            name = projection.expression.name
        else:
            name = f"f{unnamed}_"
            unnamed += 1
        select.expressions[position].replace(exp.alias_(projection.copy(), name, quoted=True))


def definition_kind(tree: exp.Expr) -> str:
    """Returns the API's statementType of a data definition."""
    if isinstance(tree, exp.Command):
        return f"ALTER_{_altered_kind(tree)}"
    kind = str(tree.args.get("kind") or "TABLE").upper()
    if isinstance(tree, exp.Create):
        is_filled = kind == "TABLE" and tree.expression is not None
        return f"CREATE_{kind}_AS_SELECT" if is_filled else f"CREATE_{kind}"
    if isinstance(tree, exp.Drop):
        return f"DROP_{kind}"
    return "TRUNCATE_TABLE" if isinstance(tree, exp.TruncateTable) else f"ALTER_{kind}"


def _is_alter(tree: exp.Expr) -> bool:
    # sqlglot keeps several forms of ALTER as they are written.
    if not isinstance(tree, exp.Command) or tree.name.upper() != "ALTER":
        return False
    return _altered_kind(tree) != ""


def _altered_kind(tree: exp.Expr) -> str:
    tokens = sqlglot.tokenize(str(tree.expression), dialect="bigquery")
    return tokens[0].text.upper() if tokens else ""


def _target(tree: exp.Expr, resolved: Resolved) -> TableKey | None:
    node = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
    found = resolved.tables.get(f"{node.catalog}.{node.db}.{node.name}")
    return None if found is None else found.key


def _fit_manipulation(tree: exp.Expr, resolved: Resolved) -> None:
    if isinstance(tree, exp.Update):
        if tree.args.get("where") is None:
            raise InvalidQueryError("UPDATE must have a WHERE clause")
        for assignment in tree.expressions:
            # DuckDB takes no alias on the left of an assignment.
            if isinstance(assignment, exp.EQ) and isinstance(assignment.this, exp.Column):
                assignment.this.set("table", None)
    elif isinstance(tree, exp.Delete):
        if tree.args.get("where") is None:
            raise InvalidQueryError("DELETE must have a WHERE clause")
    elif isinstance(tree, exp.Insert) and isinstance(tree.this, exp.Table):
        # Without a list the columns are those of the schema; DuckDB would count the hidden one too.
        table = resolved.tables[f"{tree.this.catalog}.{tree.this.db}.{tree.this.name}"]
        columns = [exp.to_identifier(field.name, quoted=True) for field in table.schema]
        tree.set("this", exp.Schema(this=tree.this, expressions=columns))


def _mentioned_columns(tree: exp.Expr) -> frozenset[str] | None:
    for star in tree.find_all(exp.Star):
        if not isinstance(star.parent, exp.Count):
            return None
    return frozenset(node.name.lower() for node in tree.find_all(exp.Identifier))


def _expanded_aliases(tree: exp.Expr) -> frozenset[str]:
    found = set()
    for unnest in tree.find_all(exp.Unnest):
        select = unnest.parent_select
        alias = unnest.args.get("alias")
        if (
            alias is not None
            and select is not None
            and any(isinstance(e, exp.Star) for e in select.expressions)
        ):
            found |= {column.name for column in alias.columns}
    return frozenset(found)


def _written(tree: exp.Expr) -> str:
    try:
        return tree.sql("duckdb", identify=True, unsupported_level=sqlglot.ErrorLevel.RAISE)
    except sqlglot.errors.UnsupportedError as error:
        raise unsupported(re.sub(r"\s+", " ", str(error)).strip()) from error
