"""Splits a data definition's text between its tokens.

Queries and expressions in a definition are passed on as written, because text generated from a
parsed tree might have a different meaning.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlglot.dialects.bigquery import BigQuery
from sqlglot.tokenizer_core import Token, TokenType

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.calls import unsupported

_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE)


def query_text(sql: str) -> str:
    """Returns the query of CREATE TABLE or CREATE VIEW: the text after the outermost AS.

    Raises:
        InvalidQueryError: there is no query.
    """
    for token, depth in _nested(_tokens(sql)):
        if depth == 0 and token.text.upper() == "AS":
            return sql[token.end + 1 :].strip().rstrip(";").rstrip()
    raise InvalidQueryError("Syntax error: Expected keyword AS")


def option_texts(sql: str) -> dict[str, str]:
    """Returns the expressions in a statement's outermost OPTIONS, keyed by lowercase option name.

    Raises:
        InvalidQueryError: an option has no value, or occurs twice.
    """
    tokens = _tokens(sql)
    for position, (token, depth) in enumerate(_nested(tokens)):
        if depth == 0 and token.text.upper() == "AS":
            break
        if depth == 0 and token.text.upper() == "OPTIONS" and _opens(tokens, position + 1):
            inner = tokens[position + 2 : _closing(tokens, position + 1)]
            return _named(sql, inner)
    return {}


@dataclass(frozen=True)
class AlterText:
    """An ALTER statement: the name of the object it changes, and the text of each action."""

    name: str
    is_optional: bool
    actions: list[str]


def alter_text(sql: str) -> AlterText:
    """Splits an ALTER statement.

    Raises:
        InvalidQueryError: the statement has no name or no action, or an empty action.
    """
    tokens = [token for token in _tokens(sql) if token.token_type != TokenType.SEMICOLON]
    is_optional = [token.text.upper() for token in tokens[2:4]] == ["IF", "EXISTS"]
    start = 4 if is_optional else 2
    # A name consists of words separated by dots; a dash within a name has no spaces around it.
    end = start + 1
    while end < len(tokens) and (
        tokens[end].token_type in (TokenType.DOT, TokenType.DASH)
        or tokens[end - 1].token_type in (TokenType.DOT, TokenType.DASH)
    ):
        end += 1
    if end >= len(tokens):
        raise InvalidQueryError("Syntax error: Unexpected end of statement")
    parts = [_text(sql, part) for part in _split(tokens[end:])]
    return AlterText(_text(sql, tokens[start:end]), is_optional, parts)


def words(sql: str) -> list[str]:
    """Returns a text's tokens in uppercase, except for quoted names and strings."""
    quoted = (TokenType.IDENTIFIER, TokenType.STRING)
    # At the start of a statement, the tokenizer treats RENAME and everything after it as one token.
    tokens = _tokens(f"ALTER {sql}")[1:]
    return [token.text if token.token_type in quoted else token.text.upper() for token in tokens]


def _tokens(sql: str) -> list[Token]:
    return list(BigQuery().tokenize(sql))


def _nested(tokens: Sequence[Token]) -> Iterator[tuple[Token, int]]:
    depth = angles = 0
    before = ""
    for token in tokens:
        if token.token_type in _CLOSING:
            depth -= 1
        elif angles and set(token.text) == {">"}:
            # The end of a STRUCT<...> or ARRAY<...>; a single token may close two.
            angles -= len(token.text)
        yield token, depth + angles
        if token.token_type in _OPENING:
            depth += 1
        elif token.text == "<" and before in ("STRUCT", "ARRAY"):
            angles += 1
        before = token.text.upper()


def _opens(tokens: Sequence[Token], position: int) -> bool:
    return position < len(tokens) and tokens[position].token_type == TokenType.L_PAREN


def _closing(tokens: Sequence[Token], opening: int) -> int:
    for position, (token, depth) in enumerate(_nested(tokens[opening:])):
        if position and depth == 0 and token.token_type in _CLOSING:
            return opening + position
    raise InvalidQueryError("Syntax error: Expected )")


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    for token, depth in _nested(tokens):
        if depth == 0 and token.token_type == TokenType.COMMA:
            parts.append([])
        else:
            parts[-1].append(token)
    if not all(parts):
        raise InvalidQueryError("Syntax error: Unexpected comma")
    return parts


def _named(sql: str, tokens: Sequence[Token]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in _split(tokens) if tokens else ():
        if len(part) < 3 or part[1].token_type != TokenType.EQ:
            if len(part) > 1 and part[1].text == "+":
                raise unsupported("OPTIONS with +=")
            raise InvalidQueryError(f"Syntax error in OPTIONS: {_text(sql, part)}")
        name = part[0].text.lower()
        if name in options:
            raise InvalidQueryError(f"Duplicate option specified: {name}")
        options[name] = _text(sql, part[2:])
    return options


def _text(sql: str, tokens: Sequence[Token]) -> str:
    # A quoted token's text does not include the quotes, but its position in the statement does.
    return sql[tokens[0].start : tokens[-1].end + 1]
