"""JSON schemas: which ones are accepted, and which parts are enforced per token or on the whole
text.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, ModelFailed
from shared.models.tasks.text import RESPONSE_FORMAT, GenerationInput
from tests.workers.models.generation import tiny
from tests.workers.models.generation.test_schema_work import doubling
from workers.models.base import PreparedPrompt
from workers.models.engines.llama_cpp import grammar_of
from workers.models.generation.model import GenerationModel
from workers.models.generation.prompts import PromptPreparer
from workers.models.generation.schemas import read_schema, why_not_matched
from workers.models.generation.vocabulary import Vocabulary

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> GenerationModel:
    return tiny.open_model(folder)


@pytest.fixture(scope="module")
def preparer(folder: Path) -> PromptPreparer:
    return PromptPreparer(tiny.entry(), folder)


@pytest.mark.parametrize(
    "annotation",
    [
        {"format": "password"},
        {"format": "binary"},
        {"format": "path"},
        {"format": "of my own"},
        {"uniqueItems": False},
        {"then": False},
        {"minContains": 3},
        {"deprecated": True, "readOnly": True, "examples": ["x"], "default": "y"},
        {"discriminator": {"propertyName": "kind"}, "x-order": 3},
        {"maxLength": 9.0},
        {"x-guidance": {"whitespace_pattern": "x*"}},
    ],
    ids=str,
)
def test_what_constrains_nothing_is_ignored(
    vocabulary: Vocabulary, annotation: dict[str, Any]
) -> None:
    schema = {"type": "string"} | annotation
    found = read_schema(json.dumps(schema), vocabulary, is_call=False)
    assert accepts(vocabulary, found.followed, '"abc"')
    assert not accepts(vocabulary, found.followed, "5")
    assert not accepts(vocabulary, found.followed, 'x"abc"')
    assert not why_not_matched('"abc"', found.checked or found.followed)


def accepts(vocabulary: Vocabulary, schema: str, text: str) -> bool:
    """True if a text's tokens are all allowed and the text may end after them."""
    matcher = vocabulary.matcher(schema)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.consume_token(one) for one in ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,2]", "[1,1]"),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, "4", "6"),
        ({"type": "integer", "not": {"const": 3}}, "4", "3"),
        ({"type": "array", "contains": {"const": 3}}, "[3]", "[4]"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"a":1}', '{"ab":1}'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":2}', '{"a":1}'),
        (
            {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
            '{"b":1}',
            '{"a":1}',
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
            '{"a":1}',
            '{"b":1}',
        ),
    ],
    ids=lambda given: str(given)[:50],
)
def test_what_no_grammar_follows_is_checked_at_the_end(
    vocabulary: Vocabulary, schema: dict[str, Any], right: str, wrong: str
) -> None:
    found = read_schema(json.dumps(schema), vocabulary, is_call=False)
    assert json.loads(found.checked) == schema
    assert all(accepts(vocabulary, found.followed, text) for text in (right, wrong))
    assert not why_not_matched(right, found.checked)
    assert "of the schema)" in why_not_matched(wrong, found.checked)


def test_what_a_grammar_follows_is_not_checked_again(vocabulary: Vocabulary) -> None:
    schema = json.dumps({"oneOf": [{"type": "integer"}, {"type": "string", "format": "date"}]})
    assert read_schema(schema, vocabulary, is_call=False).checked == ""


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"$ref": "https://example.com/a.json"},
            "'https://example.com/a.json' is not in the schema",
        ),
        ({"$ref": "#nowhere"}, "the schema has no $anchor 'nowhere'"),
        ({"$ref": "#/$defs/none"}, "the schema has no '/$defs/none'"),
        ({"enum": []}, "no JSON matches it"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no JSON matches it"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern '(?=a)b': look-around, including"),
        ({"type": "string", "pattern": "["}, "pattern '[': unclosed character class"),
        ({"type": "string", "pattern": 5}, "attern"),
        (
            {"type": "object", "patternProperties": {"a": {"type": "null"}, "b": {"const": 1}}},
            "a name may match /a/ and /b/",
        ),
        (
            {"type": "integer", "multipleOf": 0.123456789},
            "multipleOf: the numbers have too many digits",
        ),
        ({"type": 5}, "type"),
        ({"type": "integer", "multipleOf": 999_983}, "they amount to 1e+06"),
        (doubling("oneOf", 40), "takes more than the maximum of 100000 evaluations of its parts"),
    ],
    ids=lambda given: str(given)[:50],
)
def test_refusals_are_in_words_of_the_field(
    preparer: PromptPreparer, schema: dict[str, Any], reason: str
) -> None:
    given = GenerationInput(9, 1, prompt="a", json_schema=json.dumps(schema))
    (refused,) = preparer.prepare([given])
    assert isinstance(refused, BadInput)
    assert refused.field == RESPONSE_FORMAT
    assert reason in refused.message
    for inner in (
        "coerce",
        "Bias",
        "lenient",
        "guidance",
        "registry",
        "regex parse",
        "json-schema:",
    ):
        assert inner not in refused.message
    (refused,) = preparer.prepare([_of_a_tool(given)])
    assert isinstance(refused, BadInput)
    assert refused.field == "tools[0].function.parameters"


def _of_a_tool(given: GenerationInput) -> GenerationInput:
    given.schema_field = "tools[0].function.parameters"
    return given


def test_a_call_has_one_space_at_most_between_two_parts(vocabulary: Vocabulary) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    call = read_schema(schema, vocabulary, is_call=True).followed
    answer = read_schema(schema, vocabulary, is_call=False).followed
    for between, in_call, in_answer in (("", 1, 1), (" ", 1, 1), ("\n  ", 0, 1), ("\t" * 40, 0, 0)):
        text = f'{{"a":{between}1}}'
        assert accepts(vocabulary, call, text) == in_call
        assert accepts(vocabulary, answer, text) == in_answer


DATA = {"maxItems": 10**6, "minItems": 10**6, "multipleOf": 123457}
DATA_SCHEMAS: list[dict[str, Any]] = [
    {"const": DATA},
    {"enum": [1, [DATA]]},
    {"type": "array", "items": {"anyOf": [{"const": {"properties": {"a": DATA}}}]}},
    {
        "properties": {
            "a": {"const": DATA},
            "properties": {"const": DATA},
            "const": {"enum": [DATA]},
        }
    },
    {"type": "integer", "default": DATA, "examples": [DATA]},
]
COUNTS: list[dict[str, Any]] = [
    {"type": "array", **DATA},
    {"properties": {"const": {"type": "array", **DATA}, "properties": {"items": DATA}}},
    {"$defs": {"enum": {"properties": {"default": {"not": {"type": "array", **DATA}}}}}},
    {"const": {"a": DATA}, "items": {"$ref": "#/const/a"}},
    {"enum": [DATA], "items": {"$ref": "#/%65num/0"}},
    {"$defs": {"const": DATA}, "items": {"$ref": "#/$defs"}},
]
"""Engines may take these numbers for element counts, even if only a reference makes them that."""


@pytest.mark.parametrize("schema", DATA_SCHEMAS, ids=json.dumps)
def test_counts_in_constants_are_data(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    read_schema(text, vocabulary, is_call=False)
    assert json.loads(grammar_of(text, {}).partition("%json ")[2]) == schema | {"x-guidance": {}}


@pytest.mark.parametrize("schema", COUNTS, ids=json.dumps)
def test_counts_that_may_be_element_counts_are_bounded(
    vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    text = json.dumps(schema)
    with pytest.raises(ValueError, match="multipleOf"):
        read_schema(text, vocabulary, is_call=False)
    assert "1000000" not in grammar_of(text, {})


@pytest.mark.parametrize(("most", "is_matched"), [(1, True), (2, False)])
def test_a_text_that_breaks_its_schema_at_the_end_fails(
    model: GenerationModel, preparer: PromptPreparer, most: int, is_matched: bool
) -> None:
    schema = {
        "type": "array",
        "items": {"const": 1},
        "minItems": most,
        "maxItems": most,
        "uniqueItems": True,
    }
    given = GenerationInput(40, 1, prompt="a", temperature=0, json_schema=json.dumps(schema))
    (item,) = preparer.prepare([given])
    assert isinstance(item, PreparedPrompt)
    (found,) = tiny.run(model, item)
    if is_matched:
        assert json.loads(found.text) == [1]
        return
    assert isinstance(found, ModelFailed)
    assert "[1,1] has non-unique elements (#/uniqueItems of the schema)" in found.message


def test_a_text_that_is_cut_is_not_checked(
    model: GenerationModel, preparer: PromptPreparer
) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 9, "uniqueItems": True}
    given = GenerationInput(4, 1, prompt="a", temperature=0, json_schema=json.dumps(schema))
    (item,) = preparer.prepare([given])
    assert isinstance(item, PreparedPrompt)
    assert tiny.run(model, item)[0].finish_reason == "length"
