"""Caches statements that differ only in literals, so that they are analyzed only once.

Dashboards and reports send the same statement with different dates and IDs. A translated statement
is stored as a template, with marks in place of literals whose values did not affect the
translation. Such literals are whole numbers, strings, and plain dates and timestamps that are
compared with something or inserted. For the template to apply, all other literals must be
identical, and literals that were equal to each other must still be equal, because the analyzer
treats equal expressions as one.
"""

from __future__ import annotations

import datetime as dt
import re
import secrets
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types
from zetasql.wasi._pb2.zetasql.public.type_pb2 import TypeProto
from zetasql.wasi._pb2.zetasql.public.value_pb2 import ValueProto

from bigquery_emulator.googlesql.analysis.tree import Node
from bigquery_emulator.googlesql.text import tokens
from bigquery_emulator.googlesql.translation.literals import literal

_LONGEST = 20_000
_MOST_LITERALS = 500
_MOST_DIGITS = len(str(2**63))
_FUNCTIONS = frozenset(
    f"ZetaSQL:${name}"
    for name in ("equal", "not_equal", "less", "less_or_equal", "greater", "greater_or_equal")
) | {"ZetaSQL:$between", "ZetaSQL:$in"}
"""Functions whose translation never depends on a literal's value, unless that value may be NaN."""
_NAMES_FROM_VALUES = "PIVOT"  # also matches UNPIVOT
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,6})?( ?UTC|Z|[+-]\d\d:\d\d)?")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MOST_INT64 = 2**63 - 1
_MOST_EXACT = 2**53
_NONCE = secrets.token_hex(8)
"""Ensures that no text in a statement looks like a mark."""
_MARK = re.compile(rf"\x01{_NONCE}:\d+\x02")


@dataclass(frozen=True)
class _Literal:
    """A number or string as written: its content and its byte position."""

    content: int | str
    start: int
    end: int


class StatementText:
    """A statement's text, without its literals."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._parts: list[str] = []
        self.literals: list[_Literal] = []
        """None if it is not worth creating a template for the statement."""
        if len(sql) > _LONGEST or _NAMES_FROM_VALUES in sql.upper():
            return
        literals = [_Literal(content, *span) for content, span in _literals(sql)]
        if len(literals) > _MOST_LITERALS:
            return
        self.literals = literals
        ends = [0, *(literal.end for literal in literals)]
        starts = [*(literal.start for literal in literals), len(sql)]
        self._parts = [sql[end:start] for end, start in zip(ends, starts, strict=True)]

    @cached_property
    def equals(self) -> tuple[int, ...]:
        """Returns, for each literal, the index of the first one equal to it (possibly itself)."""
        first: dict[tuple[type, int | str], int] = {}
        keys = [(type(literal.content), literal.content) for literal in self.literals]
        return tuple(first.setdefault(key, place) for place, key in enumerate(keys))

    @property
    def key(self) -> Hashable:
        """Returns the key, which is the same for all statements that may share a template."""
        kinds = tuple(isinstance(literal.content, str) for literal in self.literals)
        return tuple(self._parts), kinds, self.equals

    def byte_ranges(self) -> list[tuple[int, int]]:
        """The literals' positions in the UTF-8 text."""
        if self._sql.isascii():
            return [(literal.start, literal.end) for literal in self.literals]
        length = [0]
        for letter in self._sql:
            length.append(length[-1] + len(letter.encode(errors="replace")))
        return [(length[literal.start], length[literal.end]) for literal in self.literals]


def _literals(sql: str) -> Iterator[tuple[int | str, tuple[int, int]]]:
    """Yields the content and span of whole numbers, and of strings without escapes or a prefix."""
    before, before_end = "", 0
    all_tokens = list(tokens(sql))
    for place, (start, end) in enumerate(all_tokens):
        token = sql[start:end]
        joined = before if before_end == start else ""
        following = all_tokens[place + 1] if place + 1 < len(all_tokens) else None
        after = sql[slice(*following)] if following else ""
        if token.isdecimal() and token.isascii() and len(token) <= _MOST_DIGITS:
            # Must not be part of 1.5, or of a name such as my-project-1.
            if not joined.endswith((".", "-")) and after[:1] not in (".", "-"):
                yield int(token), (start, end)
        elif token[0] in "'\"" and token[:3] not in ("'''", '"""'):
            is_prefixed = joined[-1:].isalnum()
            if not is_prefixed and "\\" not in token and "\n" not in token:
                yield token[1:-1], (start, end)
        before, before_end = token, end


@dataclass(frozen=True)
class FreeLiterals:
    """A statement's literals that may vary.

    `kinds` are their types, by literal index. `marks` replace the literals, keyed by their ranges
    in the statement.
    """

    kinds: dict[int, TypeProto]
    marks: dict[tuple[int, int], str]


def free_literals(tree: Node, text: StatementText) -> FreeLiterals:
    """Returns the statement's literals that may vary.

    Args:
        tree: the analyzer's tree for the statement.
        text: the text that was given to the analyzer.
    """
    if not text.literals:
        return FreeLiterals({}, {})
    places = {end: place for place, (_, end) in enumerate(text.byte_ranges())}
    literal_nodes: dict[int, Node] = {}
    copies = set()  # results, or possible results, of rewriting a literal
    for node, is_free in _literal_nodes(tree):
        # Matched by their end, because the node DATE '2024-01-01' starts before its literal.
        place = places.get(_range(node)[1])
        if (
            place is None
            or place in literal_nodes
            or not is_free
            or not _is_plain(node, text, place)
        ):
            copies.add(_bytes(node))
        if place is not None:
            literal_nodes[place] = node
    free = {place: node for place, node in literal_nodes.items() if _bytes(node) not in copies}
    first: dict[tuple[int, int], int] = {}
    marks = {
        _range(node): _mark(first.setdefault((text.equals[place], node.type.type_kind), place))
        for place, node in free.items()
    }
    return FreeLiterals({place: node.type for place, node in free.items()}, marks)


def _literal_nodes(tree: Node) -> Iterator[tuple[Node, bool]]:
    """Yields each Literal node, along with True if nothing depends on its value."""
    nodes = [tree]
    for parent in nodes:
        children = parent.children()
        nodes += children
        is_free = parent.kind == "DMLValue" or (
            parent.kind == "FunctionCall" and parent.function.name in _FUNCTIONS
        )
        yield from ((node, is_free) for node in children if node.kind == "Literal")


def _is_plain(node: Node, text: StatementText, place: int) -> bool:
    return bool(_value(text.literals[place].content, node.type) == node.value.value)


def _bytes(node: Node) -> bytes:
    return bytes(node.value.value.SerializeToString(deterministic=True))


def _mark(place: int) -> str:
    return f"\x01{_NONCE}:{place}\x02"


def _range(node: Node) -> tuple[int, int]:
    location = node.parse_location_range
    return location.start, location.end


def _value(content: int | str, kind: TypeProto) -> ValueProto | None:
    """Returns a literal's value, converted to its type, if it is written in plain form."""
    if isinstance(content, int):
        if kind.type_kind == types.TYPE_INT64 and content <= _MOST_INT64:
            return ValueProto(int64_value=content)
        if kind.type_kind == types.TYPE_DOUBLE and content <= _MOST_EXACT:
            return ValueProto(double_value=content)
        return None
    if kind.type_kind == types.TYPE_STRING:
        return ValueProto(string_value=content)
    try:
        if kind.type_kind == types.TYPE_DATE and _DATE.fullmatch(content):
            days = dt.date.fromisoformat(content) - _EPOCH.date()
            return ValueProto(date_value=days.days)
        if kind.type_kind == types.TYPE_TIMESTAMP and _TIMESTAMP.fullmatch(content):
            return _moment(content)
    except ValueError:  # no such day
        return None
    return None


def _moment(content: str) -> ValueProto:
    moment = dt.datetime.fromisoformat(content.replace(" UTC", "Z").replace("UTC", "Z"))
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)) - _EPOCH
    value = ValueProto()
    value.timestamp_value.seconds = since.days * 86_400 + since.seconds
    value.timestamp_value.nanos = since.microseconds * 1_000
    return value


@dataclass(frozen=True)
class StatementTemplate:
    """A translated statement without the literals that may vary.

    Args:
        sql: the statement's translation to DuckDB SQL, with marks.
    """

    text: StatementText
    free: FreeLiterals
    sql: tuple[str, ...]

    def filled(self, text: StatementText) -> tuple[str, ...] | None:
        """Returns the SQL for a statement with the same key. None: it must be translated again."""
        written: dict[str, str] = {}
        for place, own_literal in enumerate(text.literals):
            kind = self.free.kinds.get(place)
            if kind is not None:
                value = _value(own_literal.content, kind)
                if value is None:
                    return None
                written[self._marks[place]] = literal(value, kind)
            elif own_literal.content != self.text.literals[place].content:
                return None
        return tuple(_MARK.sub(lambda mark: written[mark[0]], part) for part in self.sql)

    def with_own(self) -> tuple[str, ...]:
        """Returns the SQL of the original statement."""
        own = self.filled(self.text)
        assert own is not None, "a literal has changed: this is a bug"
        return own

    @cached_property
    def _marks(self) -> dict[int, str]:
        by_end = {end: place for place, (_, end) in enumerate(self.text.byte_ranges())}
        return {by_end[end]: mark for (_, end), mark in self.free.marks.items()}
