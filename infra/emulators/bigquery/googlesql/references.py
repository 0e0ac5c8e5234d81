"""Names to tables: replaces what a statement calls a table by the table it means.

A table becomes its DuckDB name, a view its query, INFORMATION_SCHEMA a list of values. First step
of `translate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import cast, unsupported
from infra.emulators.bigquery.googlesql.information import listed
from infra.emulators.bigquery.tables.listing import Listing
from infra.emulators.bigquery.tables.resources import (
    PARTITION_TIME,
    DatasetKey,
    TableKey,
    TableResource,
)

PARTITION_DATE = "_PARTITIONDATE"
_DEEPEST_VIEW = 16
_WRITES = (exp.Insert, exp.Update, exp.Delete, exp.Merge)


@dataclass(frozen=True)
class Names:
    """Where names are looked up.

    `find` returns a table or raises NotFoundError. `listing` gives the rows of an
    INFORMATION_SCHEMA view. `parse` reads and checks a view's GoogleSQL.
    """

    project: str
    default_dataset: DatasetKey | None
    find: Callable[[TableKey], TableResource]
    listing: Callable[[str, Sequence[str], str], Listing]
    parse: Callable[[str], exp.Expr]


@dataclass
class Resolved:
    """The tables that a statement reads or writes, by DuckDB name."""

    tables: dict[str, TableResource] = field(default_factory=dict)


def resolve(tree: exp.Expr, names: Names, resolved: Resolved, depth: int = 0) -> exp.Expr:
    """Replaces the table names of a statement. Views are put in as subqueries.

    Args:
        tree: a parsed statement. It is changed in place.
        names: where names are looked up.
        resolved: filled with the tables found.
        depth: how many views contain this statement.

    Returns:
        The statement.

    Raises:
        InvalidQueryError: for a name without a data set, or views nested too deeply.
        NotFoundError: for a table that does not exist.
    """
    if depth > _DEEPEST_VIEW:
        raise InvalidQueryError(
            f"Resources exceeded: views are nested more than {_DEEPEST_VIEW} deep"
        )
    for node in list(tree.find_all(exp.Table)):
        if isinstance(node.this, exp.Func) or _is_cte(node):
            continue
        replacement = _replacement(node, names, resolved, depth)
        if replacement is not node:
            node.replace(replacement)
    return tree


def table_key(node: exp.Table, names: Names) -> TableKey:
    """Returns the full name that a table of a statement has.

    Raises:
        InvalidQueryError: where it has no data set and the job has no default one.
    """
    table_id = node.name
    if "*" in table_id:
        raise unsupported("Wildcard tables")
    if "$" in table_id:
        raise unsupported("Partition decorators in SQL")
    if node.db:
        return TableKey(node.catalog or names.project, node.db, table_id)
    if names.default_dataset is None:
        raise InvalidQueryError(
            f'Table "{table_id}" must be qualified with a dataset (e.g. dataset.table).'
        )
    return TableKey(names.default_dataset.project, names.default_dataset.dataset_id, table_id)


def _is_cte(node: exp.Table) -> bool:
    if node.db:
        return False
    name = node.name.lower()
    around = {id(node)}
    parent = node.parent
    while parent is not None:
        with_ = parent.args.get("with_")
        if with_ is not None and _sees(with_, name, around):
            return True
        around.add(id(parent))
        parent = parent.parent
    return False


def _sees(with_: exp.With, name: str, around: set[int]) -> bool:
    # A CTE is seen by those after it, and with RECURSIVE by itself and those before it too.
    for cte in with_.expressions:
        if id(cte) in around and not with_.args.get("recursive"):
            return False
        if cte.alias.lower() == name:
            return True
    return False


def _replacement(node: exp.Table, names: Names, resolved: Resolved, depth: int) -> exp.Expr:
    alias = node.alias or node.name
    view = _information_view(node)
    if view is not None:
        before = [part for part in (node.catalog, node.db) if part]
        if not before and names.default_dataset is not None:
            before = [names.default_dataset.project, names.default_dataset.dataset_id]
        rows = names.listing(view, before, names.project)
        return _subquery(listed(rows), node.alias or node.name.split(".")[-1])
    table = names.find(table_key(node, names))
    if table.view_query is not None:
        if _is_target(node):
            raise InvalidQueryError(
                f"{table.key} is not allowed for this operation because it is a view"
            )
        inner = Names(table.key.project, None, names.find, names.listing, names.parse)
        return _subquery(resolve(names.parse(table.view_query), inner, resolved, depth + 1), alias)
    resolved.tables[table.physical] = table
    physical = _physical(table)
    if _is_target(node):
        kept = node.args.get("alias") or exp.TableAlias(
            this=exp.to_identifier(node.name, quoted=True)
        )
        physical.set(
            "alias", None if isinstance(node.find_ancestor(*_WRITES), exp.Insert) else kept
        )
        return physical
    if table.has_partition_time:
        return _subquery(_with_partition_time(node, physical), alias)
    physical.set("alias", exp.TableAlias(this=exp.to_identifier(alias, quoted=True)))
    return physical


def _information_view(node: exp.Table) -> str | None:
    *before, view = node.name.split(".")
    is_view = "INFORMATION_SCHEMA" in (part.upper() for part in before)
    return view if is_view or view.upper() == "__TABLES__" else None


def _physical(table: TableResource) -> exp.Table:
    catalog, schema, name = table.physical.split(".")
    return exp.Table(
        this=exp.to_identifier(name),
        db=exp.to_identifier(schema),
        catalog=exp.to_identifier(catalog),
    )


def _is_target(node: exp.Table) -> bool:
    parent = node.parent
    if isinstance(parent, exp.Schema):
        return isinstance(parent.parent, exp.Insert)
    return isinstance(parent, _WRITES) and parent.this is node


def _with_partition_time(node: exp.Table, physical: exp.Table) -> exp.Expr:
    """Shows a table's pseudo-columns only to a query that asks for them, as `*` never has them."""
    pseudo = {PARTITION_TIME.lower(), PARTITION_DATE.lower()}
    select = node.parent_select
    asks = select is not None and any(
        column.name.lower() in pseudo for column in select.find_all(exp.Column)
    )
    if not asks or select is None:
        return exp.select(exp.Star(except_=[exp.to_identifier(PARTITION_TIME)])).from_(physical)
    for star in select.expressions:
        plain = star.this if isinstance(star, exp.Column) else star
        if isinstance(plain, exp.Star):
            hidden = [exp.to_identifier(name) for name in (PARTITION_TIME, PARTITION_DATE)]
            plain.set("except_", [*(plain.args.get("except_") or []), *hidden])
    date = exp.alias_(cast(exp.column(PARTITION_TIME), "DATE"), PARTITION_DATE)
    return exp.select(exp.Star(), date).from_(physical)


def _subquery(query: exp.Expr, alias: str) -> exp.Expr:
    return exp.Subquery(
        this=query, alias=exp.TableAlias(this=exp.to_identifier(alias, quoted=True))
    )
