"""Converts a data definition's columns and PARTITION BY to API resources."""

from sqlglot import exp

from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.tables.schema import Json, Schema, parse_schema

_TRUNCATIONS = (exp.DateTrunc, exp.TimestampTrunc, exp.DatetimeTrunc)
_UNITS = ("HOUR", "DAY", "MONTH", "YEAR")


def columns(node: exp.Schema) -> Schema:
    """Returns the fields in a column list.

    Raises:
        InvalidError: BigQuery rejects a name or type.
        UnsupportedError: this server does not support one of the constraints or types.
    """
    # An unenforced key has no effect on rows, but clients that read the table's schema back would
    # notice that it is missing.
    wrong = [part for part in node.expressions if not isinstance(part, exp.ColumnDef)]
    if wrong:
        raise unsupported(f"{wrong[0].sql('bigquery')} in CREATE TABLE")
    return parse_schema([column(part) for part in node.expressions])


def column(node: exp.ColumnDef) -> Json:
    """Returns the TableFieldSchema for a column definition."""
    field = typed(node.name, node.args["kind"])
    for constraint in node.args.get("constraints") or ():
        if isinstance(constraint.kind, exp.NotNullColumnConstraint):
            field["mode"] = "REQUIRED"
        elif isinstance(constraint.kind, exp.Properties):
            field |= column_options(constraint.kind)
        else:
            raise unsupported(f"{constraint.sql('bigquery')} in a column")
    return field


def column_options(properties: exp.Properties) -> Json:
    """Returns the changes that a column's OPTIONS make to its TableFieldSchema."""
    options: Json = {}
    for item in properties.expressions:
        value = item.args["value"]
        if item.name.lower() != "description" or not isinstance(value, exp.Literal | exp.Null):
            raise unsupported(f"OPTIONS({item.name}) of a column")
        options["description"] = None if isinstance(value, exp.Null) else value.name
    return options


def typed(name: str, kind: exp.DataType) -> Json:
    """Returns the TableFieldSchema for a name and type."""
    if kind.this == exp.DType.ARRAY:
        return {**typed(name, kind.expressions[0]), "mode": "REPEATED"}
    if kind.this == exp.DType.STRUCT:
        fields = [column(part) for part in kind.expressions]
        return {"name": name, "type": "RECORD", "fields": fields}
    numbers = [part.this.name for part in kind.expressions if isinstance(part, exp.DataTypeParam)]
    if not numbers:
        return {"name": name, "type": kind.sql("bigquery")}
    plain = kind.copy()
    plain.set("expressions", [])
    named = ("precision", "scale") if kind.this == exp.DType.DECIMAL else ("maxLength",)
    return {"name": name, "type": plain.sql("bigquery"), **dict(zip(named, numbers, strict=False))}


def partitioning(node: exp.Expr) -> Json:
    """Returns the table settings for a definition's PARTITION BY.

    Raises:
        UnsupportedError: BigQuery does not partition by this expression.
    """
    inner = node.expressions[0] if isinstance(node, exp.Schema | exp.Tuple) else node
    if isinstance(inner, exp.RangeBucket):
        return {"rangePartitioning": _ranges(inner)}
    unit = "DAY"
    if isinstance(inner, _TRUNCATIONS):
        unit, inner = inner.args["unit"].name.upper(), inner.this
    elif isinstance(inner, exp.Date | exp.TsOrDsToDate):
        inner = inner.this
    if unit not in _UNITS or not isinstance(inner, exp.Column | exp.Identifier):
        raise unsupported(f"PARTITION BY {node.sql('bigquery')}")
    if inner.name.upper() in ("_PARTITIONDATE", "_PARTITIONTIME"):
        return {"timePartitioning": {"type": unit}}
    return {"timePartitioning": {"type": unit, "field": inner.name}}


def _ranges(node: exp.RangeBucket) -> Json:
    borders = node.expression
    parts = [borders.args.get(name) for name in ("start", "end", "step")]
    numbers = [part.sql() for part in parts if isinstance(part, exp.Literal | exp.Neg)]
    if not isinstance(node.this, exp.Column) or len(numbers) < 2:
        raise unsupported(f"PARTITION BY {node.sql('bigquery')}")
    # Without a step, GENERATE_ARRAY increments by one.
    value_range = dict(zip(("start", "end", "interval"), [*numbers, "1"], strict=False))
    return {"field": node.this.name, "range": value_range}
