"""Callers' JSON schemas: the parts that constrain tokens, and the parts that need the whole text.

A grammar works token by token, so it enforces most of a schema, but it can't ensure, for example,
that a list's items are unique or that exactly one of several forms matches. Such schemas are
accepted anyway. The rest of the schema is checked once the text is complete, and a text that
violates it fails.

A schema's size is limited, because every text in a batch pays for it at each token. The amount of
checking is also limited, because checking delays the other texts too. If parts of a schema refer to
other parts twice, level after level, checking even a small schema could take more than a day.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

import jsonschema_rs

from workers.models.generation.vocabulary import Vocabulary

MAX_BYTES = 32 * 1024
"""The maximum size of the schema as JSON. A schema of this size takes up to about 0.2 s to read."""
MAX_CHARACTERS = 4096
"""The maximum length of a constant, a pattern, or a name as written in JSON, where a control
character counts as six characters. At this length, each token takes 2 ms; at a length of 60,000, it
takes 35 ms.
"""
MAX_DEPTH = 100
"""Maximum nesting depth of objects and lists in a schema. The matcher supports 124."""
MAX_MULTIPLES = 20_000
"""The maximum sum of all `multipleOf` values, ignoring decimal points and trailing zeros. A grammar
has a state for each remainder, so its time and memory are proportional to the sum: a sum of this
size takes 0.3 s, and a sum of one million takes 28 s.
"""
MAX_EVALUATIONS = 100_000
"""Maximum evaluations of a schema's parts for one text, which take about 0.1 s."""
MAX_EXPLAINED = 5_000
"""Maximum number of evaluations up to which the reason for a failure is determined. Finding the
reason takes far longer than the check itself.
"""
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_MATCHED = frozenset({"description", "title", "$comment", "$id", "$schema"})

_GRAMMAR_OPTIONS = "x-guidance"
"""The field from which llguidance reads its options. In a caller's schema, this field has no
effect.
"""
_LENIENT = {"lenient": True, "coerce_one_of": True}
_CALL = {"whitespace_pattern": " ?"}
"""No one reads a tool call's JSON, so it doesn't need line breaks, which a model can get stuck on.
"""

_JOINS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"})
"""If a schema has one of these keywords, several numbers may apply to one value."""

_TOO_MANY = (
    "checking text against it takes more than the maximum of "
    f"{MAX_EVALUATIONS} evaluations of its parts"
)

_SAME_LISTS, _SAME_NAMED = ("allOf", "anyOf", "oneOf"), ("dependentSchemas", "dependencies")
_SAME = ("not", "if", "then", "else")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_VALUES = ("additionalProperties", "unevaluatedProperties")
_OF_ELEMENTS = ("items", "additionalItems", "unevaluatedItems", "contains")
_ANYTHING: dict[str, Any] = {}
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data."""
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose values are schemas by name."""
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})

_WORDS = (
    (
        r"Resource '(.*?)' is not present",
        "$ref: {0} is not in the schema; only references within the schema are supported, "
        "such as #/$defs/name",
    ),
    (r"Anchor '(.*?)' does not exist", "$ref: the schema has no $anchor {0}"),
    (r"Pointer '(.*?)' does not exist", "$ref: the schema has no {0}"),
    (r"Unsatisfiable schema", "no JSON matches it"),
    (
        r"patternProperty regexes (.*?) are not disjoint",
        "patternProperties: a name may match {0}; use patterns that do not match the same name",
    ),
    (
        r"Value for 'multipleOf' has too many digits",
        "multipleOf: the number has too many digits; use fewer",
    ),
)
"""llguidance's errors, each with the message shown to callers."""
_REGEX_ERROR = re.compile(r"regex parse error:\s*(.*?)\n.*error: (.*)", re.DOTALL)
_WITHOUT = re.compile(r"\s*while processing .*", re.DOTALL)


def check_size(json_schema: str) -> None:
    """Checks a schema's size before doing anything else with it.

    Raises:
        ValueError: the schema, or a string or number in it, is too large or too deeply nested, or
            the schema isn't JSON.
    """
    size_bytes = len(json_schema.encode())
    if size_bytes > MAX_BYTES:
        raise ValueError(f"must be at most {MAX_BYTES} bytes, got {size_bytes}")
    # Done before parsing, because how deep Python's parser can go depends on its version and the
    # stack size.
    depth = _depth(json_schema)
    if depth > MAX_DEPTH:
        raise ValueError(f"must be nested at most {MAX_DEPTH} levels deep, got {depth}")
    schema = json.loads(json_schema)
    _check_multiples(schema)
    longest = max(map(_json_length, _find_matched_texts(schema)), default=0)
    if longest > MAX_CHARACTERS:
        raise ValueError(
            f"it contains a constant, pattern or name of {longest} characters as JSON, which "
            f"exceeds the maximum of {MAX_CHARACTERS}"
        )


def _depth(text: str) -> int:
    """Returns the nesting depth of objects and lists in JSON, without parsing it."""
    levels = itertools.accumulate(_BRACKETS.get(letter, 0) for letter in _STRING.sub("", text))
    return max(levels, default=0)


def _json_length(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False)) - len('""')


def _find_matched_texts(schema: Any) -> Iterator[str]:
    """Returns all strings in a schema, except annotations."""
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
    """A schema in the form that the model follows.

    `followed` is the schema of the grammar, as JSON. `checked` is the schema against which the
    complete text is checked. It is empty if the grammar follows the entire schema.
    """

    followed: str
    checked: str = ""


NO_SCHEMA = GrammarSchema("")


def read_schema(source: str, vocabulary: Vocabulary, *, is_call: bool) -> GrammarSchema:
    """Determines how a schema can be followed.

    Args:
        is_call: True for the schema of a tool call.

    Raises:
        ValueError: the schema can't be used.
    """
    check_size(source)
    schema = json.loads(source, parse_float=_number)
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
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
    # Each part is evaluated at least once, whatever the text. The text's own parts may multiply
    # that number.
    evaluations = _Evaluations(json.loads(plain))
    if any(evaluations.of(part, None) > MAX_EVALUATIONS for part in evaluations.schemas):
        raise ValueError(f"{_TOO_MANY}; use fewer parts that refer to the same part")
    _validator(plain)
    return GrammarSchema(lenient, plain)


def _check_multiples(schema: Any) -> None:
    """Checks the divisors in `multipleOf`.

    Raises:
        ValueError: the divisors are too large.
    """
    schemas = list(walk_schemas(schema))
    multiples = [part.get("multipleOf") for part in schemas]
    numbers = [
        number
        for number in multiples
        if isinstance(number, int | float) and not isinstance(number, bool)
    ]
    whole = [_digits_of(number) for number in numbers]
    total = sum(whole)
    if any(not _JOINS.isdisjoint(part) for part in schemas):
        total = max(total, math.lcm(*whole))
    if total > MAX_MULTIPLES:
        raise ValueError(
            "multipleOf: the numbers have too many digits; without decimal points they "
            f"amount to {min(total, 10**30):.3g}, which exceeds the maximum of "
            f"{MAX_MULTIPLES}"
        )


def _digits_of(number: float) -> int:
    """Returns a number without its decimal point and zeros: 125 for 1.25 and for 1250."""
    exact = Decimal(str(number))
    if not exact.is_finite():
        return 0
    return int("".join(map(str, exact.as_tuple().digits)).rstrip("0") or 0)


def why_not_matched(text: str, schema: str) -> str:
    """Returns the reason a JSON text does not match a schema. Empty if it does."""
    try:
        value, read = json.loads(text), json.loads(schema)
        count = _Evaluations(read).of(read, value)
        if count > MAX_EVALUATIONS:
            return _TOO_MANY
        validator = _validator(schema)
        if count > MAX_EXPLAINED:
            return "" if validator.is_valid(value) else "it has a part that the schema excludes"
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        path = "".join(f"/{part}" for part in error.schema_path)
        return f"{error.message[:200]} (#{path} of the schema)"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)
    return ""


class _Part(NamedTuple):
    """A part of a schema that a value is checked against, and how many times it is checked."""

    schema: Mapping[str, Any]
    value: Any
    times: int

    @property
    def key(self) -> tuple[int, int]:
        return id(self.schema), id(self.value)


class _Evaluations:
    """Limits how many evaluations of a schema's parts it takes to check a value against the schema.

    This assumes that no part is skipped and that a reference refers to everything it could refer
    to, so the count is never too low. Each part counts once for every path to it, but is visited
    only once for each value.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schemas = list(walk_schemas(schema))
        """All parts of the schema that may themselves be schemas."""
        self._roots = [schema, *(part for part in self.schemas if "$id" in part)]
        self._named_schemas: dict[str, list[Mapping[str, Any]]] = {}
        for part in self.schemas:
            for keyword in ("$anchor", "$dynamicAnchor", "$id"):
                if isinstance(name := part.get(keyword), str):
                    self._named_schemas.setdefault(_last_name(name), []).append(part)
        self._known: dict[tuple[int, int], int | None] = {}
        """Evaluations, keyed by schema and value. None while the evaluations are still being
        counted.
        """

    def of(self, schema: Mapping[str, Any], value: Any) -> int:
        """Returns the number of evaluations for a value.

        If the result exceeds MAX_EVALUATIONS, counting stopped there.
        """
        waiting = [_Part(schema, value, 1)]
        while waiting:
            part = waiting[-1]
            if self._known.get(part.key) is not None:
                waiting.pop()
                continue
            parts = list(itertools.islice(self._parts(part), MAX_EVALUATIONS))
            uncounted = [inner for inner in parts if self._known.get(inner.key) is None]
            is_endless = any(
                inner.key in self._known for inner in uncounted
            )  # the schema refers back to itself
            if is_endless or max(len(parts), len(self._known)) >= MAX_EVALUATIONS:
                return MAX_EVALUATIONS + 1
            if uncounted:
                self._known[part.key] = None
                waiting += uncounted
                continue
            counts = (inner.times * (self._known[inner.key] or 0) for inner in parts)
            self._known[part.key] = min(1 + sum(counts), MAX_EVALUATIONS + 1)
            waiting.pop()
        return self._known[id(schema), id(value)] or 0

    def _parts(self, part: _Part) -> Iterator[_Part]:
        schema, value, _ = part
        # For "unevaluated" keywords, properties and items are found by a separate evaluation.
        times = 1 if _UNEVALUATED.isdisjoint(schema) else 2
        same = [schema.get(keyword) for keyword in _SAME]
        for keyword in _SAME_LISTS:
            same += _as_list(schema.get(keyword))
        for keyword in _SAME_NAMED:
            same += _as_object(schema.get(keyword)).values()
        for keyword in _REFERENCES:
            same += self._targets(schema.get(keyword))
        for inner_schema in same:
            if isinstance(inner_schema, dict):
                yield _Part(inner_schema, value, times)
        for inner_schema, inner in _of_inner(schema, value):
            if isinstance(inner_schema, dict):
                yield _Part(inner_schema, inner, 1)

    def _targets(self, reference: Any) -> list[Any]:
        if not isinstance(reference, str):
            return []
        base, _, fragment = reference.partition("#")
        if fragment.startswith("/"):
            targets = [_at(root, unquote(fragment)) for root in self._roots]
        elif fragment or base:
            targets = list(self._named_schemas.get(_last_name(fragment or base), ()))
        else:
            targets = list(self._roots)
        return list({id(target): target for target in targets if target is not None}.values())


def walk_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Returns all objects in a schema that may be schemas.

    Constants and other data are left out, unless a reference may refer to a part of them.
    """
    data = frozenset() if any(map(_may_name_data, _find_references(schema))) else _DATA
    waiting = [(schema, False)]
    while waiting:
        part, is_named = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [
                (inner, name in _NAMED and not is_named)
                for name, inner in part.items()
                if is_named or name not in data
            ]
        elif isinstance(part, list):
            waiting += [(inner, False) for inner in part]


def _find_references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from (part[name] for name in _REFERENCES if isinstance(part.get(name), str))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _may_name_data(reference: str) -> bool:
    """Returns whether a reference may name data, or schemas by name, as if it were a schema."""
    names = unquote(reference).split("/")
    return not _DATA.isdisjoint(names) or names[-1] in _NAMED


def _of_inner(schema: Mapping[str, Any], value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from _of_object(schema, value)
    elif isinstance(value, list):
        yield from _of_list(schema, value)


def _of_object(schema: Mapping[str, Any], value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    properties = _as_object(schema.get("properties"))
    patterns = _as_object(schema.get("patternProperties")).values()
    # A name is compared with every pattern, even if any value would be valid.
    of_all = [pattern if isinstance(pattern, dict) else _ANYTHING for pattern in patterns]
    of_all += [part for keyword in _OF_VALUES if isinstance(part := schema.get(keyword), dict)]
    for name, inner in value.items():
        yield properties.get(name), inner
        yield schema.get("propertyNames"), name
        for part in of_all:
            yield part, inner


def _of_list(schema: Mapping[str, Any], value: list[Any]) -> Iterator[tuple[Any, Any]]:
    for keyword in ("prefixItems", "items"):
        yield from zip(_as_list(schema.get(keyword)), value, strict=False)
    for inner in value:
        for keyword in _OF_ELEMENTS:
            yield schema.get(keyword), inner


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _last_name(name: str) -> str:
    """Returns the last part of a name, which is the same for relative and absolute names."""
    return name.rstrip("#/").rpartition("/")[2]


def _at(schema: Any, pointer: str) -> Any:
    """Returns the value at a JSON pointer (RFC 6901), or None if there is no such value."""
    for escaped in pointer.split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
        else:
            schema = _as_object(schema).get(name)
    return schema


def _validator(schema: str) -> Any:
    try:
        # Callers' patterns must not take exponential time, and with this regex engine they can't.
        return jsonschema_rs.validator_for(
            json.loads(schema),
            offline=True,
            validate_formats=False,
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise ValueError(_in_words(str(error))) from error


def _number(text: str) -> int | float:
    """Converts a number. JSON has only one kind of number, so a maxItems of 2.0 means 2."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _in_words(error: str) -> str:
    if match := _REGEX_ERROR.search(error):
        pattern, reason = match.groups()
        return f"pattern {pattern[:80]!r}: {reason.strip()}"
    for pattern, message in _WORDS:
        if matched := re.search(pattern, error):
            return message.format(
                *(repr(group) if "$ref" in message else group for group in matched.groups())
            )
    return _WITHOUT.sub("", error).split("\n")[0]
