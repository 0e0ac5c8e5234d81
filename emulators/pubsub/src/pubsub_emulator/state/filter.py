"""The subscription filter language: parses text into a tree that matches attributes.

Grammar and errors: https://cloud.google.com/pubsub/docs/subscription-message-filter
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput, UnexpectedToken

from pubsub_emulator.errors import InvalidArgument

MAX_FILTER_BYTES = 256

# Each level of a filter uses only AND or only OR. The grammar intentionally has no rule for mixing
# the two without parentheses.
_GRAMMAR = r"""
    ?start: expression
    ?expression: term
        | term (AND term)+ -> all_of
        | term (OR term)+ -> any_of
    ?term: simple
        | (NOT | MINUS) simple -> negation
    ?simple: "(" expression ")"
        | ATTRIBUTES ":" key -> has
        | ATTRIBUTES "." key "=" STRING -> equals
        | ATTRIBUTES "." key "!=" STRING -> differs
        | HAS_PREFIX "(" ATTRIBUTES "." key "," STRING ")" -> has_prefix
    ?key: BARE | STRING
    AND: /AND(?![\w-])/
    OR: /OR(?![\w-])/
    NOT: /NOT(?![\w-])/
    MINUS: "-"
    ATTRIBUTES: /attributes(?![\w-])/
    HAS_PREFIX: /hasPrefix(?![\w-])/
    BARE: /[A-Za-z0-9_-]+/
    STRING: /"(?:[^"\\\n]|\\.)*"/
    %ignore /[ \t\r\n]+/
"""

_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_NAMED_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"\\": b"\\", b'"': b'"', b"'": b"'", b"?": b"?", b"`": b"`",
}  # fmt: skip


class Filter(Protocol):
    """Matches a message by its attributes."""

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if a message with these attributes is delivered."""


@dataclass(frozen=True)
class Has:
    """`attributes:KEY`."""

    key: str

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if the key exists, regardless of its value."""
        return self.key in attributes


@dataclass(frozen=True)
class Equals:
    """`attributes.KEY = "value"`."""

    key: str
    value: str

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if the key exists with exactly this value."""
        return attributes.get(self.key) == self.value


@dataclass(frozen=True)
class HasPrefix:
    """`hasPrefix(attributes.KEY, "prefix")`."""

    key: str
    prefix: str

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if the key exists and its value has this prefix."""
        value = attributes.get(self.key)
        return value is not None and value.startswith(self.prefix)


@dataclass(frozen=True)
class Negation:
    """`NOT x`, `-x`, and `!=`, which also matches a message without the key."""

    operand: Filter

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if the operand does not match."""
        return not self.operand.matches(attributes)


@dataclass(frozen=True)
class AllOf:
    """`x AND y AND …`."""

    operands: tuple[Filter, ...]

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if every operand matches."""
        return all(operand.matches(attributes) for operand in self.operands)


@dataclass(frozen=True)
class AnyOf:
    """`x OR y OR …`."""

    operands: tuple[Filter, ...]

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """True if at least one operand matches."""
        return any(operand.matches(attributes) for operand in self.operands)


def needed_attributes(filter_: Filter) -> tuple[Equals, ...]:
    """Return equality conditions, at least one of which must hold for the filter to match."""
    if isinstance(filter_, Equals):
        return (filter_,)
    if isinstance(filter_, AllOf):
        return tuple(
            condition for operand in filter_.operands for condition in needed_attributes(operand)
        )
    return ()


def parse_filter(text: str) -> Filter | None:
    """Parse a subscription's filter.

    Args:
        text: the filter, at most 256 bytes of UTF-8. Empty matches everything.

    Returns:
        The tree that matches attributes. None: the filter is empty.

    Raises:
        InvalidArgument: the filter is too long or invalid. The message includes the column and the
            reason.
    """
    size_bytes = len(text.encode())
    if size_bytes > MAX_FILTER_BYTES:
        raise InvalidArgument(
            f"The value for filter is too large. You passed {size_bytes} bytes in the request, "
            f"but the maximum value is {MAX_FILTER_BYTES}."
        )
    if not text.strip():
        return None
    try:
        tree: Filter = _parser().parse(text)  # type: ignore[assignment]  # the transformer runs while parsing
        return tree
    except UnexpectedInput as error:
        raise InvalidArgument(_refusal(text, error)) from None
    except _BadLiteral as error:
        raise InvalidArgument(f"Invalid filter: {error} (filter={text}).") from None


@functools.cache
def _parser() -> Lark:
    # Built on first use, because most processes that start this server never parse a filter.
    return Lark(_GRAMMAR, parser="lalr", transformer=_TreeBuilder())


class _BadLiteral(Exception):
    """A string literal contains an invalid escape."""


class _TreeBuilder(Transformer[Token, Filter]):
    """The parser calls its methods for each rule and literal that it completes."""

    def STRING(self, token: Token) -> str:
        return _unescape(str(token)[1:-1])

    def has(self, children: list[str]) -> Filter:
        return Has(str(children[1]))

    def equals(self, children: list[str]) -> Filter:
        return Equals(str(children[1]), children[2])

    def differs(self, children: list[str]) -> Filter:
        return Negation(Equals(str(children[1]), children[2]))

    def has_prefix(self, children: list[str]) -> Filter:
        return HasPrefix(str(children[2]), children[3])

    def negation(self, children: list[Filter]) -> Filter:
        return Negation(children[1])

    def all_of(self, children: list[Filter]) -> Filter:
        return AllOf(tuple(children[::2]))

    def any_of(self, children: list[Filter]) -> Filter:
        return AnyOf(tuple(children[::2]))


def _unescape(literal: str) -> str:
    # Hex and octal escapes represent UTF-8 bytes, so the literal is assembled from bytes.
    try:
        return _ESCAPE.sub(_unescape_one, literal.encode()).decode()
    except UnicodeDecodeError:
        raise _BadLiteral(f'the escapes in "{literal}" are not valid UTF-8') from None


def _unescape_one(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, named = match.groups()
    if named is not None:
        if named not in _NAMED_ESCAPES:
            raise _BadLiteral(
                f"unknown escape {match[0].decode(errors='replace')} in a string literal"
            )
        return _NAMED_ESCAPES[named]
    if octal is not None or hexadecimal is not None:
        code = int(octal, 8) if octal is not None else int(hexadecimal, 16)
        if code > 0xFF:
            raise _BadLiteral(f"escape {match[0].decode()} is not a valid byte")
        return bytes([code])
    code = int(short or long, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise _BadLiteral(f"escape {match[0].decode()} is not a valid character")
    return chr(code).encode()


def _refusal(text: str, error: UnexpectedInput) -> str:
    is_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    rest = "" if is_end or error.pos_in_stream is None else text[error.pos_in_stream :]
    word = re.match(r"[\w-]*", rest)
    reason = _reason(rest, word[0] if word else "")
    column = len(text) + 1 if not rest else len(text) - len(rest) + 1
    return f"Invalid filter: {reason} at column {column} (filter={text})."


def _reason(rest: str, word: str) -> str:
    if not rest:
        return "unexpected end of expression"
    if word in ("AND", "OR"):
        return (
            "AND and OR can't be mixed without parentheses, and each needs an expression on both "
            "sides"
        )
    if word.upper() in ("AND", "OR", "NOT") and not word.isupper():
        return f"operators must be uppercase, got {word!r}"
    if word and rest[len(word) :].lstrip().startswith("("):
        return (
            f'unknown function {word!r}; the only function is hasPrefix(attributes.KEY, "PREFIX")'
        )
    if rest.startswith("\\"):
        return "escapes are only allowed in string literals"
    return f"unexpected {word or rest[0]!r}"
