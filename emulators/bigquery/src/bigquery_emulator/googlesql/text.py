"""Reads a statement's text before it is analyzed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bigquery_emulator.googlesql.calls import unsupported

_TOKENS = re.compile(
    r'"""(?:\\.|.)*?"""'
    r"|'''(?:\\.|.)*?'''"
    r'|"(?:\\.|[^"\\])*"'
    r"|'(?:\\.|[^'\\])*'"
    r"|--[^\n]*|\#[^\n]*|/\*.*?\*/"
    r"|`(?P<name>(?:\\.|[^`\\])*)`"
    r"|(?P<end>;)"
    r"|(?P<word>\w+)"
    r"|(?P<space>\s+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_POSITION = re.compile(r" at \[(\d+):(\d+)\]$")
_DEFINITIONS = frozenset({"CREATE", "DROP", "TRUNCATE", "ALTER"})
_SCRIPTS = frozenset(
    {"BEGIN", "BREAK", "CALL", "CASE", "COMMIT", "CONTINUE", "DECLARE", "EXECUTE", "FOR", "IF"}
    | {"ITERATE", "LEAVE", "LOOP", "RAISE", "REPEAT", "RETURN", "ROLLBACK", "SET", "WHILE"}
)


def is_definition(sql: str) -> bool:
    """True if a statement is a data definition, such as CREATE TABLE.

    Raises:
        UnsupportedError: the statement is a script.
    """
    first, ended = "", False
    for token in _TOKENS.finditer(sql):
        if token["word"] and not first:
            first = token["word"].upper()
        if token["end"]:
            ended = True
        elif ended and (token["word"] or token["other"] or token["name"]):
            raise unsupported("Multi-statement scripts")
    if first in _SCRIPTS:
        raise unsupported("Scripts")
    return first in _DEFINITIONS


def tokens(sql: str) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each token: strings, comments, names, words, spaces, symbols."""
    for token in _TOKENS.finditer(sql):
        yield token.span()


def possible_names(sql: str) -> set[tuple[str, ...]]:
    """Returns all names in a statement that may be table names, split into parts, as written.

    This includes column names. No table is missed, unless its name contains a comment.
    """
    names: set[tuple[str, ...]] = set()
    parts: list[str] = []
    joint = ""
    for token in _TOKENS.finditer(sql):
        part = token["word"] or token["name"]
        if part is None:
            if not token["space"]:
                joint = token["other"] or ""
        elif joint == "." and parts:
            parts.append(part)
            joint = ""
        elif joint == "-" and parts and token["word"]:
            parts[-1] += f"-{part}"  # for example in my-project.dataset.table
            joint = ""
        else:
            names.add(tuple(parts))
            parts, joint = [part], ""
    return {*names, tuple(parts)} - {()}


class SplitNames:
    """A statement in which each part of a table name is in its own pair of backquotes.

    BigQuery treats `project.dataset.table` in one pair of backquotes as three names, with `table`
    as the alias. The analyzer treats it as one name.
    """

    def __init__(self, sql: str, names: Iterable[str]) -> None:
        # line, column, and number of inserted characters
        self._added: list[tuple[int, int, int]] = []
        wanted, parts, at = set(names), [], 0
        for token in _TOKENS.finditer(sql):
            if token["name"] in wanted and token["name"] is not None:
                split = "`.`".join(name_parts(token["name"]))
                parts += [sql[at : token.start() + 1], split]
                at = token.end() - 1
                line_start = sql.rfind("\n", 0, at) + 1
                grown = len(split) - len(token["name"])
                self._added.append((sql.count("\n", 0, at) + 1, at - line_start + 1, grown))
        self.sql = "".join([*parts, sql[at:]])

    def as_given(self, message: str) -> str:
        """Returns an error message with its position converted to one in the original statement."""
        match = _POSITION.search(message)
        if match is None:
            return message
        line, column = int(match[1]), int(match[2])
        for at_line, at_column, grown in self._added:
            if at_line == line and at_column + grown <= column:
                column -= grown
        return f"{message[: match.start()]} at [{line}:{column}]"


def name_parts(name: str) -> list[str]:
    """Splits `project.dataset.table`. A project may have a domain: `example.com:project`."""
    domain, colon, rest = name.rpartition(":")
    first, *others = rest.split(".")
    return [f"{domain}{colon}{first}", *others]
