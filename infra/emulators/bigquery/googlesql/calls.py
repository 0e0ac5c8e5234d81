"""The small words that the rewriting of expressions is written in."""

from collections.abc import Callable

from sqlglot import exp

from infra.emulators.bigquery.errors import UnsupportedError

Rewrite = Callable[[exp.Expr], exp.Expr]


def call(name: str, *args: exp.Expr) -> exp.Expr:
    """Returns a call of a macro in the schema `bq`, or of a DuckDB function unknown to sqlglot."""
    return exp.Anonymous(this=name, expressions=list(args))


def cast(value: exp.Expr, kind: str) -> exp.Expr:
    """Returns `value` cast to a DuckDB type."""
    return exp.Cast(this=value, to=exp.DataType.build(kind, dialect="duckdb"))


def text(value: str) -> exp.Expr:
    """Returns a string literal."""
    return exp.Literal.string(value)


def number(value: int) -> exp.Expr:
    """Returns an integer literal."""
    return exp.Literal.number(value)


def unsupported(what: str) -> UnsupportedError:
    """Returns the error for what BigQuery can do and this server can't."""
    return UnsupportedError(f"{what}: not supported by the embedded BigQuery", "query")
