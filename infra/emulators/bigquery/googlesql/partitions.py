"""Checks that queries filter on partitions where a table requires it (`requirePartitionFilter`).

A filter counts where BigQuery could skip partitions by it: a comparison of the partitioning column
with something constant, in the WHERE or ON beside the table, or further out if nothing between
needs the other rows: no LIMIT, no window and no grouping that the column isn't a key of. Checked
after `references`, before anything is rewritten. Source:
https://docs.cloud.google.com/bigquery/docs/querying-partitioned-tables
"""

from collections.abc import Iterable, Iterator, Mapping

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.tables.resources import TableResource

# A column as a filter names it: the source's alias, or None, and the column's name, both in lower
# case.
_Column = tuple[str | None, str]
_Ctes = Mapping[str, exp.Expr]
_COMPARISONS = (exp.EQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


def check_partition_filters(tree: exp.Expr, tables: Mapping[str, TableResource]) -> None:
    """Refuses a statement that reads a whole table which demands a filter on its partitions.

    Args:
        tree: a statement whose tables are DuckDB names already.
        tables: the tables by DuckDB name.

    Raises:
        InvalidQueryError: naming the table and its column.
    """
    if not any(
        table.partitioning and table.partitioning.is_filter_required for table in tables.values()
    ):
        return
    if isinstance(tree, exp.Update | exp.Delete):
        _check_source(tree.this, _pruned(_conjuncts(tree.args.get("where"))), {}, tables)
    elif isinstance(tree, exp.Merge):
        _check_source(tree.this, _pruned(_conjuncts(tree.args.get("on"))), {}, tables)
        _check_source(tree.args["using"], _pruned(_conjuncts(tree.args.get("on"))), {}, tables)
    for query in _nested_queries(
        [tree] if isinstance(tree, exp.Query) else list(tree.args.values())
    ):
        _check_query(query, set(), {}, tables)


def _check_query(
    query: exp.Expr, wanted: set[str], ctes: _Ctes, tables: Mapping[str, TableResource]
) -> None:
    """Checks a query of whose output columns `wanted` are filtered by what stands around it."""
    with_ = query.args.get("with_")
    if with_ is not None:
        ctes = {**ctes, **{cte.alias.lower(): cte.this for cte in with_.expressions}}
    if isinstance(query, exp.Subquery):
        _check_query(query.this, wanted, ctes, tables)
    elif isinstance(query, exp.SetOperation):
        _check_set_operation(query, wanted, ctes, tables)
    elif isinstance(query, exp.Select):
        _check_select(query, wanted, ctes, tables)


def _check_set_operation(
    query: exp.SetOperation, wanted: set[str], ctes: _Ctes, tables: Mapping[str, TableResource]
) -> None:
    # The first query names the columns; the others are filtered at the same places.
    names = [name.lower() for name in query.named_selects]
    for side in (query.this, query.expression):
        own = [name.lower() for name in side.named_selects]
        is_aligned = len(own) == len(names) and "*" not in own
        inner = (
            {own[names.index(name)] for name in wanted if name in names} if is_aligned else wanted
        )
        _check_query(side, inner if query.args.get("limit") is None else set(), ctes, tables)


def _check_select(
    select: exp.Select, wanted: set[str], ctes: _Ctes, tables: Mapping[str, TableResource]
) -> None:
    joins = select.args.get("joins") or []
    filters = [select.args.get("where"), *(join.args.get("on") for join in joins)]
    columns = set(_pruned(part for condition in filters for part in _conjuncts(condition)))
    columns |= {column for name in wanted for column in _inward(select, name)}
    from_ = select.args.get("from_")
    sources = [*([from_.this] if from_ is not None else []), *(join.this for join in joins)]
    for source in sources:
        _check_source(source, columns, ctes, tables)
    others = [value for key, value in select.args.items() if key not in ("from_", "joins", "with_")]
    for query in _nested_queries([*others, *(join.args.get("on") for join in joins)]):
        _check_query(query, set(), ctes, tables)


def _check_source(
    source: exp.Expr, columns: Iterable[_Column], ctes: _Ctes, tables: Mapping[str, TableResource]
) -> None:
    alias = source.alias_or_name.lower()
    filtered = {name for owner, name in columns if owner in (None, alias)}
    if isinstance(source, exp.Subquery):
        _check_query(source, filtered, ctes, tables)
    elif isinstance(source, exp.Table) and not source.db and source.name.lower() in ctes:
        body = ctes[source.name.lower()]
        # A recursive CTE reads itself: the body is checked once, without its own name.
        inner = {name: query for name, query in ctes.items() if name != source.name.lower()}
        _check_query(body, filtered, inner, tables)
    elif isinstance(source, exp.Table):
        table = tables.get(f"{source.catalog}.{source.db}.{source.name}")
        if table is None or table.partitioning is None or not table.partitioning.is_filter_required:
            return
        column = table.partitioning.column
        pseudo = {"_partitiontime", "_partitiondate"} if table.has_partition_time else set()
        if not filtered & {column.lower(), *pseudo}:
            raise InvalidQueryError(
                f"Cannot query over table '{str(table.key).replace(':', '.')}' without a filter"
                f" over column(s) '{column}' that can be used for partition elimination"
            )


def _inward(select: exp.Select, name: str) -> Iterator[_Column]:
    """Gives the source columns that an outer filter on the output column `name` filters as well."""
    if select.args.get("limit") is not None or select.args.get("offset") is not None:
        return
    for projection in select.expressions:
        inner = projection.unalias()
        if isinstance(inner, exp.Star):
            column: _Column = (None, name)
        elif isinstance(inner, exp.Column) and isinstance(inner.this, exp.Star):
            column = (inner.table.lower(), name)
        elif isinstance(inner, exp.Column) and projection.alias_or_name.lower() == name:
            column = (inner.table.lower() or None, inner.name.lower())
        elif isinstance(inner, exp.Cast | exp.Date) and projection.alias_or_name.lower() == name:
            # A view's DATE(received_at) AS day: a filter on the day is one on the column.
            found = inner.find(exp.Column)
            if found is None:
                continue
            column = (found.table.lower() or None, found.name.lower())
        else:
            continue
        if _is_key(select, column[1]):
            yield column


def _is_key(select: exp.Select, column: str) -> bool:
    windows = [window for window in select.find_all(exp.Window) if window.parent_select is select]
    for window in windows:
        parts_by = window.args.get("partition_by") or []
        if column not in {part.name.lower() for part in parts_by if isinstance(part, exp.Column)}:
            return False
    group = select.args.get("group")
    if group is None:
        return not any(node.parent_select is select for node in _plain_aggregates(select))
    keys: set[str] = set()
    for key in group.expressions:
        named = _projection(select, key)
        parts = [key] if named is None else [key, named]
        keys.update(found.name.lower() for part in parts for found in part.find_all(exp.Column))
    return column in keys


def _projection(select: exp.Select, key: exp.Expr) -> exp.Expr | None:
    """Returns the output column that a GROUP BY names by its place or its alias."""
    projections: list[exp.Expr] = select.expressions
    if isinstance(key, exp.Literal) and not key.is_string:
        return projections[int(key.name) - 1]
    named = [
        projection
        for projection in projections
        if projection.alias.lower() == key.name.lower() != ""
    ]
    return named[0] if isinstance(key, exp.Column) and named else None


def _plain_aggregates(select: exp.Select) -> Iterator[exp.Expr]:
    for node in select.find_all(exp.AggFunc):
        if node.find_ancestor(exp.Window) is None:
            yield node


def _conjuncts(condition: exp.Expr | None) -> list[exp.Expr]:
    if condition is None:
        return []
    inner = condition.this if isinstance(condition, exp.Where) else condition
    return list(inner.flatten()) if isinstance(inner, exp.And) else [inner]


def _pruned(conditions: Iterable[exp.Expr]) -> set[_Column]:
    """Returns the columns by which conditions that all hold let partitions be skipped."""
    return {column for condition in conditions for column in _pruned_by(condition)}


def _pruned_by(condition: exp.Expr) -> set[_Column]:
    inner = condition.unnest()
    if isinstance(inner, exp.And):
        return _pruned(_conjuncts(inner))
    if isinstance(inner, exp.Or):
        return _pruned_by(inner.this) & _pruned_by(inner.expression)
    if isinstance(inner, _COMPARISONS):
        return _compared(inner.this, [inner.expression]) or _compared(
            inner.expression, [inner.this]
        )
    if isinstance(inner, exp.Between):
        return _compared(inner.this, [inner.args["low"], inner.args["high"]])
    if isinstance(inner, exp.In) and inner.expressions:
        return _compared(inner.this, inner.expressions)
    return set()


def _compared(side: exp.Expr, others: list[exp.Expr]) -> set[_Column]:
    if any(other.find(exp.Column, exp.Query) is not None for other in others):
        return set()
    if side.find(exp.Query) is not None:
        return set()
    columns = {
        (column.table.lower() or None, column.name.lower()) for column in side.find_all(exp.Column)
    }
    return columns if len(columns) == 1 else set()


def _nested_queries(values: Iterable[object]) -> Iterator[exp.Expr]:
    """Gives the outermost queries inside the arguments of a node."""
    for value in values:
        if isinstance(value, list):
            yield from _nested_queries(value)
        elif isinstance(value, exp.Expr):
            for node in value.walk(prune=lambda found: isinstance(found, exp.Query)):
                if isinstance(node, exp.Query) and not isinstance(node, exp.Table):
                    yield node
