"""Splits pages into passages."""

from __future__ import annotations

from typing import Any

import pytest

from examples.passages.predict import InvalidInput, Predictor


def passages(*pages: str, max_chars: int = 40) -> list[tuple[int, str]]:
    """Splits pages numbered 3, 4, … into passages."""
    read = [[{"markdown": page}] for page in pages]
    numbers = list(range(3, 3 + len(pages)))
    document = {"pages": read, "numbers": numbers}
    divided = Predictor().predict(document=document, max_chars=max_chars)
    return [(passage["page"], passage["text"]) for passage in divided]


def test_whole_sentences_are_together_as_far_as_they_fit() -> None:
    assert passages("# The dam\n\nIt is shut. Its gate is made of oak.\nWho has the key?") == [
        (3, "# The dam It is shut."),
        (3, "Its gate is made of oak."),
        (3, "Who has the key?"),
    ]


def test_pages_are_apart_and_those_without_text_have_none() -> None:
    assert passages("One.", "", " \n", "![img-0.jpeg](img-0.jpeg)", "Five.") == [
        (3, "One."),
        (7, "Five."),
    ]
    assert passages() == []


def test_what_is_too_long_is_cut_between_words_or_anywhere() -> None:
    long = " ".join(["mill"] * 12)
    assert passages(long) == [(3, " ".join(["mill"] * 8)), (3, " ".join(["mill"] * 4))]
    assert passages("x" * 90) == [(3, "x" * 40), (3, "x" * 40), (3, "x" * 10)]
    assert passages("abc", max_chars=1) == [(3, "a"), (3, "b"), (3, "c")]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"pages": [[{"markdown": "a"}]]},
        {"pages": [[{"markdown": "a"}]], "numbers": [1, 2]},
        {"pages": [[{"text": "a"}]], "numbers": [1]},
        {"pages": 1, "numbers": [1]},
    ],
)
def test_another_document_is_the_callers_mistake(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Predictor().predict(document=document, max_chars=40)
    assert refused.value.field == "document"
