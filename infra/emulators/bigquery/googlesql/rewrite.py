"""Rewrites the expressions whose meaning differs between GoogleSQL and DuckDB, children first.

After the tables are named and before sqlglot writes DuckDB's SQL. Calls to `bq.*` stand in
macros.sql.
"""

import re

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.aggregates import AGGREGATES
from infra.emulators.bigquery.googlesql.calls import Rewrite, call, cast, number, text, unsupported
from infra.emulators.bigquery.googlesql.datetimes import MOMENTS

# A number that stands here is a value, so it has BigQuery's 64 bits; elsewhere (LIMIT, an ordinal,
# a function's digits) DuckDB wants its plain form.
_VALUE_PARENTS = (
    *(exp.Binary, exp.Neg, exp.Paren, exp.Alias, exp.Array, exp.PropertyEQ, exp.Struct),
    *(exp.Case, exp.If, exp.Coalesce, exp.Tuple, exp.Select),
)
_FORMAT_PART = re.compile(r"%[-+ 0#]*\d*(?:\.\d+)?(.)")


def rewrite(tree: exp.Expr) -> exp.Expr:
    """Returns the statement with every expression that needs it in DuckDB's words.

    Args:
        tree: a statement that `supported.check` has accepted. It is changed in place.

    Raises:
        InvalidQueryError: for arguments that BigQuery refuses as well.
        UnsupportedError: where an option of a known function isn't supported.
    """
    for node in reversed(list(tree.bfs())):
        found = REWRITES.get(type(node))
        if found is None:
            continue
        replacement = found(node)
        if replacement is not node:
            node.replace(replacement)
    return tree


def _literal(node: exp.Expr) -> exp.Expr:
    if node.args.get("is_string"):
        return node
    digits = str(node.this)
    if not digits.isdigit():
        # 0.1 is a FLOAT64 in GoogleSQL and a decimal in DuckDB; an exponent makes it a float there
        # too.
        return node if "e" in digits.lower() else exp.Literal.number(f"{digits}e0")
    if isinstance(node.parent, _VALUE_PARENTS) and not isinstance(
        node.parent, exp.Interval | exp.Dot
    ):
        return cast(exp.Literal.number(digits), "BIGINT")
    return node


def _binary(name: str) -> Rewrite:
    return lambda node: call(name, node.this, node.expression)


def _unary(name: str) -> Rewrite:
    return lambda node: call(name, node.this)


def _round(node: exp.Expr) -> exp.Expr:
    if node.args.get("truncate"):
        raise unsupported("ROUND with a rounding mode")
    return node


def _like(node: exp.Expr) -> exp.Expr:
    if isinstance(node.parent, exp.Escape):
        return node
    # GoogleSQL escapes with a backslash; DuckDB has no escape unless told.
    return exp.Escape(this=node.copy(), expression=text("\\"))


def _bracket(node: exp.Expr) -> exp.Expr:
    (index,) = node.expressions
    if isinstance(index, exp.Literal) and index.is_string:
        return call("json_extract", node.this, text(f'$."{index.this}"'))
    starts_at_one = node.args.get("offset") == 1
    position = index if starts_at_one else exp.Add(this=index, expression=number(1))
    return call("bq.safe_at" if node.args.get("safe") else "bq.at", node.this, position)


def _casting(names: dict[exp.DType, str]) -> Rewrite:
    def rewrite_cast(node: exp.Expr) -> exp.Expr:
        if node.args.get("format"):
            raise unsupported("CAST ... FORMAT")
        name = names.get(node.args["to"].this)
        return node if name is None else call(name, node.this)

    return rewrite_cast


def _data_type(node: exp.Expr) -> exp.Expr:
    if node.this not in _KNOWN_TYPES:
        raise unsupported(f"Type {node.sql('bigquery')}")
    if node.this == exp.DType.DECIMAL and not node.expressions:
        return exp.DataType.build("DECIMAL(38, 9)", dialect="duckdb")
    return node


def _safe(node: exp.Expr) -> exp.Expr:
    # DuckDB's TRY refuses what may raise through error(), as the macros do.
    if any(str(part.this).startswith("bq.") for part in node.this.find_all(exp.Anonymous)):
        raise unsupported("SAFE. before this function")
    return call("try", node.this)


def _format(node: exp.Expr) -> exp.Expr:
    pattern = node.this
    if not (isinstance(pattern, exp.Literal) and pattern.is_string):
        raise unsupported("FORMAT with a pattern that isn't a literal")
    letters = [letter for letter in _FORMAT_PART.findall(str(pattern.this)) if letter != "%"]
    if set(letters) - set("difeEgGsxXot"):
        raise unsupported(f"FORMAT element in {pattern.this!r}")
    if len(letters) != len(node.expressions):
        raise InvalidQueryError("The number of arguments of FORMAT is not that of its pattern")
    args = [_formatted(letter, arg) for letter, arg in zip(letters, node.expressions, strict=True)]
    plain = _FORMAT_PART.sub(lambda part: re.sub("t$", "s", part.group()), str(pattern.this))
    return call("printf", text(plain), *args)


def _formatted(letter: str, value: exp.Expr) -> exp.Expr:
    if letter == "t":
        return exp.Coalesce(this=call("bq.string", value), expressions=[text("NULL")])
    return cast(value, "DOUBLE") if letter in "feEgG" else value


def _unnest(node: exp.Expr) -> exp.Expr:
    offset = node.args.get("offset")
    if not offset:
        return node
    # DuckDB's ordinality counts from 1; a subquery beside the array's table may read it as well.
    alias = node.args.get("alias")
    names = alias.columns if alias is not None else []
    (values,) = node.expressions
    item = exp.alias_(call("unnest", values), names[0].name if names else "unnest", quoted=True)
    position = exp.Sub(
        this=call("generate_subscripts", values.copy(), number(1)), expression=number(1)
    )
    numbered = exp.select(item, exp.alias_(position, offset.name, quoted=True))
    return exp.Subquery(
        this=numbered, alias=exp.TableAlias(this=exp.to_identifier(f"_{offset.name}", quoted=True))
    )


def _struct(node: exp.Expr) -> exp.Expr:
    if isinstance(node.parent, exp.Cast):
        # STRUCT<a INT64>(1): the type names the fields, by place.
        return node
    for position, part in enumerate(node.expressions, 1):
        if not isinstance(part, exp.PropertyEQ | exp.Column | exp.Alias):
            name = exp.to_identifier(f"_field_{position}", quoted=True)
            part.replace(exp.PropertyEQ(this=name, expression=part.copy()))
    return node


def _byte_length(node: exp.Expr) -> exp.Expr:
    return call("octet_length", call("bq.bytes", node.this))


def _substring(node: exp.Expr) -> exp.Expr:
    length = node.args.get("length")
    return call("bq.substr", node.this, node.args["start"], *([] if length is None else [length]))


_KNOWN_TYPES = frozenset(
    {
        *(exp.DType.TEXT, exp.DType.BIGINT, exp.DType.DOUBLE, exp.DType.BOOLEAN, exp.DType.BINARY),
        *(
            exp.DType.TIMESTAMPTZ,
            exp.DType.TIMESTAMP,
            exp.DType.DATE,
            exp.DType.TIME,
            exp.DType.DECIMAL,
        ),
        *(
            exp.DType.JSON,
            exp.DType.ARRAY,
            exp.DType.STRUCT,
            exp.DType.INT,
            exp.DType.UNKNOWN,
            exp.DType.LIST,
        ),
        # As DuckDB names the types of parameters.
        *(exp.DType.VARBINARY, exp.DType.TIMESTAMPNTZ),
    }
)
_CASTS = {
    exp.DType.TEXT: "bq.string",
    exp.DType.BIGINT: "bq.int64",
    exp.DType.BOOLEAN: "bq.bool",
    exp.DType.BINARY: "bq.bytes",
}
_SAFE_CASTS = {
    exp.DType.TEXT: "bq.string",
    exp.DType.BIGINT: "bq.safe_int64",
    exp.DType.BOOLEAN: "bq.safe_bool",
    exp.DType.BINARY: "bq.bytes",
}
REWRITES: dict[type[exp.Expr], Rewrite] = {
    **MOMENTS,
    **AGGREGATES,
    exp.Literal: _literal,
    exp.Div: _binary("bq.divide"),
    exp.SafeDivide: _binary("bq.safe_divide"),
    exp.IntDiv: _binary("bq.div"),
    exp.Mod: _binary("bq.mod"),
    exp.Round: _round,
    exp.Like: _like,
    exp.Bracket: _bracket,
    exp.Cast: _casting(_CASTS),
    exp.TryCast: _casting(_SAFE_CASTS),
    exp.DataType: _data_type,
    exp.SafeFunc: _safe,
    exp.Format: _format,
    exp.String: _unary("bq.string"),
    exp.JSONExtract: _binary("bq.json_query"),
    exp.Substring: _substring,
    exp.ByteLength: _byte_length,
    exp.Unnest: _unnest,
    exp.Struct: _struct,
}
