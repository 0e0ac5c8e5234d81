"""Splits the pages of a document into passages short enough for an embedding model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cog import BasePredictor, Input

_IMAGE = re.compile(r"!\[[^\]\s]*\]\([^)\s]*\)")
_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
"""The end of a sentence, a line or a table row."""


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Splits pages at the ends of sentences and lines."""

    def predict(
        self,
        document: dict[str, Any] = Input(
            description=(
                "Its `pages`, each as returned by examples/ocr for a document of one page, and "
                "their ' '`numbers`, from 0."
            )
        ),
        max_chars: int = Input(
            description=("Maximum number of characters per passage."), default=800, ge=1
        ),
    ) -> list[dict[str, Any]]:
        """Returns the passages in order, each with its `page` and `text`.

        A page without text has no passages.
        """
        try:
            pages = [
                (number, "\n".join(part["markdown"] for part in parts))
                for number, parts in zip(document["numbers"], document["pages"], strict=True)
            ]
        except (LookupError, TypeError, ValueError) as error:
            reason = (
                "must have `pages`, lists of objects with `markdown`, and the same number of "
                "`numbers`"
            )
            raise InvalidInput("document", reason) from error
        return [
            {"page": number, "text": text}
            for number, markdown in pages
            for text in passages_of(markdown, max_chars)
        ]


def passages_of(markdown: str, max_chars: int) -> Iterator[str]:
    """Yields a page's passages, without its images.

    Each contains as many whole sentences as fit.
    """
    passage = ""
    for sentence in _END.split(_IMAGE.sub("", markdown)):
        for piece in pieces_of(sentence.strip(), max_chars):
            if passage and len(passage) + 1 + len(piece) > max_chars:
                yield passage
                passage = ""
            passage = f"{passage} {piece}".strip()
    if passage:
        yield passage


def pieces_of(sentence: str, max_chars: int) -> Iterator[str]:
    """Yields a sentence. A sentence that is too long is split, between words if possible."""
    while len(sentence) > max_chars:
        space = sentence.rfind(" ", 1, max_chars + 1)
        at = space if space > 0 else max_chars
        yield sentence[:at].rstrip()
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence
