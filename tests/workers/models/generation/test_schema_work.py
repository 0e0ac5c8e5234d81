"""How long checking a whole text against a schema can delay the other texts in the batch."""

import json
import re
from typing import Any

import pytest

from workers.models.generation.schemas import check_size, why_not_matched


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """A schema of a few lines: each level compares the same value with the next level twice."""
    levels_of = {
        f"a{level}": {keyword: [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(levels)
    }
    return {
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": levels_of | {f"a{levels}": {"type": "integer"}},
    }


WITHIN_ITSELF = {
    "$defs": {"n": {"oneOf": [{"items": {"$ref": "#/$defs/n"}}, {"items": {"$ref": "#/$defs/n"}}]}},
    "$ref": "#/$defs/n",
}
BY_NAMES = {
    "$defs": {
        "one": {"$id": "urn:a:one", "allOf": [{"$ref": "two"}, {"$ref": "#b"}]},
        "two": {"$id": "two", "$anchor": "b", "items": {"$ref": "urn:a:one"}},
    },
    "$ref": "urn:a:one",
}
DEEP = "[" * 60 + "]" * 60


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (doubling("oneOf", 40), '{"x": 1}'),
        (doubling("anyOf", 40), '{"x": "a"}'),
        (doubling("allOf", 40), '{"x": 1}'),
        (WITHIN_ITSELF, DEEP),
        (BY_NAMES, DEEP),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "1"),
    ],
    ids=["oneOf", "anyOf", "allOf", "within itself", "by names", "endless"],
)
def test_a_schema_that_multiplies_itself_is_not_compared(schema: dict[str, Any], text: str) -> None:
    reason = why_not_matched(text, json.dumps(schema))
    assert (
        reason
        == "checking text against it takes more than the maximum of 100000 evaluations of its parts"
    )


@pytest.mark.parametrize(
    ("schema", "sum_"),
    [
        ({"type": "integer", "multipleOf": 999_983}, "1e+06"),
        ({"type": "number", "multipleOf": 10.0001}, "1e+05"),
        ({"multipleOf": 10**300 + 1}, "1e+30"),
        ({"properties": {f"p{n}": {"multipleOf": 9001} for n in range(3)}}, "2.7e+04"),
        ({"allOf": [{"multipleOf": 211}, {"multipleOf": 199}]}, "4.2e+04"),
    ],
)
def test_numbers_that_a_grammar_counts_to_are_bounded(schema: dict[str, Any], sum_: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"they amount to {sum_}, which exceeds")):
        check_size(json.dumps(schema))


def test_usual_multiples_are_taken() -> None:
    for number in (1, 0.01, 1e-9, 12.5, 86_400, 10**9, True):
        check_size(json.dumps({"allOf": [{"multipleOf": number}, {"multipleOf": 7}]}))


def test_a_text_that_is_nested_too_deep_ends_no_batch() -> None:
    schema = json.dumps({"type": "array", "items": {"$ref": "#"}, "uniqueItems": True})
    assert why_not_matched("[" * 100_000 + "]" * 100_000, schema) == "it is nested too deeply"


@pytest.mark.parametrize("is_right", [True, False])
def test_a_large_text_and_a_recursive_schema_are_compared(*, is_right: bool) -> None:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    schema = {"$defs": {"person": person}, "type": "array", "items": {"$ref": "#/$defs/person"}}
    one: dict[str, Any] = {"name": "x", "tags": ["a", "b"]}
    people = [one | {"friends": [one] * 5} for _ in range(300)]
    people[-1]["friends"][0] = one | {"tags": ["a", "a" if not is_right else "b"]}
    reason = why_not_matched(json.dumps(people), json.dumps(schema))
    assert reason == ("" if is_right else "it has a part that the schema excludes")
