"""A listing such as INFORMATION_SCHEMA.TABLES as a part of a sqlglot tree."""

from sqlglot import exp

from infra.emulators.bigquery.googlesql.calls import call, text
from infra.emulators.bigquery.tables.listing import Listing


def listed(listing: Listing) -> exp.Expr:
    """Returns the query that gives a listing's rows."""
    row = exp.column("r")
    columns = [
        exp.alias_(call("struct_extract", row.copy(), text(field.name)), field.name, quoted=True)
        for field in listing.schema
    ]
    rows = call("from_json", text(listing.json), text(listing.structure))
    inner = exp.select(exp.alias_(call("unnest", rows), "r"))
    return exp.select(*columns).from_(exp.Subquery(this=inner, alias="listed"))
