"""An output's schema: types that release 0.1.0 served keep the schema it wrote."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from typing import Any, Literal, NewType

import cog
import pytest
from cog import _inspector

from tests.workers.models.custom.forms import FORMS, predict
from workers.models.custom.runner.output_types import read_output

NEW = {"Nested", "Models", "StreamedModels", "Matrix", "Sheets", "Maybe"}
"""The forms rejected by release 0.1.0."""


def returned_by(name: str) -> Any:
    target = getattr(predict, name)
    function = target
    if inspect.isclass(target):
        function = next(
            vars(target)[one] for one in ("run", "predict", "predict_batch") if one in vars(target)
        )
    hint = typing.get_type_hints(function, include_extras=True)["return"]
    return typing.get_args(hint)[0] if function.__name__ == "predict_batch" else hint


@pytest.mark.parametrize("name", sorted({one.name for one in FORMS} - NEW))
def test_schema_is_that_of_release_0_1_0(name: str) -> None:
    """Otherwise a worker would reject a folder or an image that release 0.1.0 checked."""
    _inspector._find_coders(predict)
    hint = returned_by(name)
    assert (
        read_output(hint, yields=False).schema == _inspector._create_output_type(hint).json_type()
    )


class Inner(cog.BaseModel):  # type: ignore[misc]
    word: str


class Tree(cog.BaseModel):  # type: ignore[misc]
    children: list[Tree]
    inner: Inner | None


@dataclass
class Pair:
    first: int
    second: Any


class Color(Enum):
    RED = "red"


Name = NewType("Name", str)
INNER = {
    "type": "object",
    "properties": {"word": {"type": "string", "title": "Word"}},
    "required": ["word"],
}
STRINGS = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Any, {}),
        (object, {}),
        (bytes, {}),
        ("Unknown", {}),
        (str | None, {"type": "string", "nullable": True}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (
            list[list[float]],
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        ),
        (list[Inner], {"type": "array", "items": INNER}),
        (tuple[str, ...], STRINGS),
        (tuple[int, str], {"type": "array", "items": {}}),
        (set[str], STRINGS),
        (Sequence[str], STRINGS),
        (Iterable[str], STRINGS),
        (dict[str, list[int]], {"type": "object"}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Color, {"type": "string", "enum": ["red"]}),
        (Name, {"type": "string"}),
        (date, {"type": "string", "format": "date"}),
        (datetime, {"type": "string", "format": "date-time"}),
        (
            Pair,
            {
                "type": "object",
                "properties": {
                    "first": {"type": "integer", "title": "First"},
                    "second": {"type": "object", "title": "Second"},
                },
                "required": ["first", "second"],
            },
        ),
        (
            Tree,
            {
                "type": "object",
                "properties": {
                    "children": {"type": "array", "items": {"type": "object"}, "title": "Children"},
                    "inner": {**INNER, "nullable": True, "title": "Inner"},
                },
                "required": ["children"],
            },
        ),
    ],
)
def test_schema_says_what_is_known_of_a_type(hint: Any, schema: dict[str, Any]) -> None:
    assert read_output(hint, yields=False).schema == {"title": "Output", **schema}


@pytest.mark.parametrize(
    ("hint", "yields", "streams", "element"),
    [
        (
            Iterator[list[cog.Path]],
            True,
            "items",
            {"type": "array", "items": {"type": "string", "format": "uri"}},
        ),
        (Iterator[Inner], False, "items", INNER),
        (typing.Generator[int, None, None], True, "items", {"type": "integer"}),
        (Iterable[int], True, "items", {"type": "integer"}),
        (list[str], True, "items", {"type": "string"}),
        (str, True, "items", {"type": "object"}),
        (cog.ConcatenateIterator[str], True, "text", {"type": "string"}),
        (cog.AsyncConcatenateIterator, True, "text", {"type": "string"}),
    ],
)
def test_generators_are_streamed_whatever_they_declare(
    hint: Any, yields: bool, streams: str, element: dict[str, Any]
) -> None:
    output = read_output(hint, yields=yields)
    assert (output.streams, output.piece) == (streams, element)
    assert output.schema["x-cog-array-type"] == "iterator"


def test_a_text_is_made_of_texts() -> None:
    with pytest.raises(ValueError, match="ConcatenateIterator must have str elements"):
        read_output(cog.ConcatenateIterator[int], yields=True)
