"""JSON schemas of callers: what the tokens of a text are held to, and what only a whole text shows.

A grammar decides token by token, so it follows most of a schema, but not that the items of a list
differ, or that one of several forms matches and no other. Such a schema is taken all the same. What
the grammar leaves out is checked when the text has ended, and a text that breaks it fails.

The size of a schema is bounded, because all texts of a batch pay for it at each token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema_rs

from workers.models.generation.vocabulary import Vocabulary

MAX_BYTES = 32 * 1024
"""The size of the schema as JSON. One of this size takes up to about 0.2 s to read."""
MAX_CHARACTERS = 4096
"""The limit for a constant, a pattern or a name, as JSON has it: a control character is six of
them. One of this length takes 2 ms at each token, and one of 60,000 takes 35 ms."""
MAX_DEPTH = 100
"""Objects and lists of a schema within each other. The matcher takes 124."""
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_MATCHED = frozenset({"description", "title", "$comment", "$id", "$schema"})


def check_size(json_schema: str) -> None:
    """Checks the size of a schema.

    Raises:
        ValueError: the schema, or a text in it, is too large or too deep, or it is not JSON.
    """
    size_bytes = len(json_schema.encode())
    if size_bytes > MAX_BYTES:
        raise ValueError(f"it has {size_bytes} bytes, and at most {MAX_BYTES} are supported")
    # Before it is read: how deep Python's own parser goes depends on the version and the stack.
    depth = _depth(json_schema)
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested {depth} levels deep, and at most {MAX_DEPTH} are supported")
    longest = max(map(_json_length, _matched_texts(json.loads(json_schema))), default=0)
    if longest > MAX_CHARACTERS:
        raise ValueError(
            f"a constant, pattern or name in it has {longest} characters as JSON, and "
            f"at most {MAX_CHARACTERS} are supported"
        )


def _depth(text: str) -> int:
    """The most objects and lists within each other in JSON, which is not parsed for it."""
    levels = itertools.accumulate(_BRACKETS.get(letter, 0) for letter in _STRING.sub("", text))
    return max(levels, default=0)


def _json_length(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False)) - len('""')


def _matched_texts(schema: Any) -> Iterator[str]:
    """All texts of a schema but those that only explain it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield from part
            waiting += [
                value
                for name, value in part.items()
                if not (name in _NOT_MATCHED and isinstance(value, str))
            ]


class GrammarSchema(NamedTuple):
    """A schema as the model follows it.

    `followed` is for the grammar, as JSON. `checked` is the schema that a whole text is compared
    with. Empty: the grammar follows all of it.
    """

    followed: str
    checked: str = ""


NO_SCHEMA = GrammarSchema("")
_GRAMMAR_OPTIONS = "x-guidance"
"""The field that llguidance reads its options from. One in a caller's schema has no meaning."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
_CALL = {"whitespace_pattern": " ?"}
"""Nobody reads the JSON of a call, so it needs no new lines, of which a model may not find out."""


def read_schema(source: str, vocabulary: Vocabulary, *, is_call: bool) -> GrammarSchema:
    """Finds out how a schema can be followed.

    Args:
        source: the schema, as JSON.
        vocabulary: the model's.
        is_call: whether it is that of a call of a tool.

    Raises:
        ValueError: it can't be used.
    """
    check_size(source)
    schema = json.loads(source, parse_float=_number)
    if not isinstance(schema, dict):
        raise ValueError("it is not a JSON object")
    options = dict(_CALL) if is_call else {}
    schema.pop(_GRAMMAR_OPTIONS, None)
    plain = json.dumps(schema)
    strict = json.dumps(schema | {_GRAMMAR_OPTIONS: options}) if options else plain
    try:
        vocabulary.matcher(strict)
        return GrammarSchema(strict)
    except ValueError:
        lenient = json.dumps(schema | {_GRAMMAR_OPTIONS: options | _LENIENT})
    try:
        vocabulary.matcher(lenient)
    except ValueError as error:
        raise ValueError(_in_words(str(error))) from error
    _validator(plain)
    return GrammarSchema(lenient, plain)


def why_not_matched(text: str, schema: str) -> str:
    """Returns why a JSON text does not match a schema. Empty: it does."""
    try:
        _validator(schema).validate(json.loads(text))
    except jsonschema_rs.ValidationError as error:
        path = "".join(f"/{part}" for part in error.schema_path)
        return f"{error.message[:200]} (#{path} of the schema)"
    except ValueError as error:
        return str(error)
    return ""


def _validator(schema: str) -> Any:
    try:
        # Patterns of strangers must not take exponential time, which this engine can't.
        return jsonschema_rs.validator_for(
            json.loads(schema),
            offline=True,
            validate_formats=False,
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise ValueError(_in_words(str(error))) from error


def _number(text: str) -> int | float:
    """JSON has one kind of numbers: a maxItems of 2.0 is one of 2."""
    number = float(text)
    return int(number) if number.is_integer() else number


_WORDS = (
    (
        r"Resource '(.*?)' is not present",
        "$ref: {0} is not in the schema; only references within it work, such as #/$defs/name",
    ),
    (r"Anchor '(.*?)' does not exist", "$ref: the schema has no $anchor {0}"),
    (r"Pointer '(.*?)' does not exist", "$ref: the schema has no {0}"),
    (r"Unsatisfiable schema", "no JSON matches it"),
    (
        r"patternProperty regexes (.*?) are not disjoint",
        "patternProperties: a name may match {0}; use patterns of which a name matches one",
    ),
    (
        r"Value for 'multipleOf' has too many digits",
        "multipleOf: it has too many digits; use fewer",
    ),
)
"""Errors of llguidance, and what a caller is told."""
_REGEX_ERROR = re.compile(r"regex parse error:\s*(.*?)\n.*error: (.*)", re.DOTALL)
_WITHOUT = re.compile(r"\s*while processing .*", re.DOTALL)


def _in_words(error: str) -> str:
    if match := _REGEX_ERROR.search(error):
        pattern, reason = match.groups()
        return f"pattern {pattern[:80]!r}: {reason.strip()}"
    for pattern, told in _WORDS:
        if matched := re.search(pattern, error):
            return told.format(*(repr(one) if "$ref" in told else one for one in matched.groups()))
    return _WITHOUT.sub("", error).split("\n")[0]
