"""Data definitions such as CREATE TABLE, which sqlglot parses because the analyzer doesn't."""

from __future__ import annotations

import sqlglot
from sqlglot import exp

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.calls import unsupported


def parse_definition(sql: str) -> exp.Expr:
    """Parses a data definition.

    Raises:
        InvalidQueryError: there is a syntax error. The message includes the line and column.
        UnsupportedError: this server does not support the statement.
    """
    try:
        tree = sqlglot.parse_one(sql, dialect="bigquery")
    except sqlglot.errors.SqlglotError as error:
        raise InvalidQueryError(_syntax_message(error)) from error
    known = isinstance(tree, exp.Create | exp.Drop | exp.TruncateTable | exp.Alter)
    if not known and not _is_alter(tree):
        raise unsupported("This statement")
    return tree


def _syntax_message(error: sqlglot.errors.SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return f"Syntax error: {error}"
    first = details[0]
    return f"Syntax error: {first['description']} at [{first['line']}:{first['col']}]"


def definition_kind(tree: exp.Expr) -> str:
    """Returns the API's statementType for a data definition."""
    if isinstance(tree, exp.Command):
        return f"ALTER_{_find_altered_kind(tree)}"
    kind = str(tree.args.get("kind") or "TABLE").upper()
    if isinstance(tree, exp.Create):
        is_filled = kind == "TABLE" and tree.expression is not None
        return f"CREATE_{kind}_AS_SELECT" if is_filled else f"CREATE_{kind}"
    if isinstance(tree, exp.Drop):
        return f"DROP_{kind}"
    return "TRUNCATE_TABLE" if isinstance(tree, exp.TruncateTable) else f"ALTER_{kind}"


def _is_alter(tree: exp.Expr) -> bool:
    # sqlglot stores several forms of ALTER as text.
    if not isinstance(tree, exp.Command) or tree.name.upper() != "ALTER":
        return False
    return _find_altered_kind(tree) != ""


def _find_altered_kind(tree: exp.Expr) -> str:
    tokens = sqlglot.tokenize(str(tree.expression), dialect="bigquery")
    return tokens[0].text.upper() if tokens else ""
