"""Similarity: computes the cosine similarity of two texts' vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shared.models.entry import CatalogEntry
from shared.models.flow_types import StepSchema
from shared.models.tasks.base import (
    LinkTo,
    StepInput,
    TaskInput,
    TaskResult,
    WorkBound,
)
from shared.models.tasks.embedding import (
    SPECIAL_TOKENS,
    TEXT_FIELDS,
    EmbeddingTask,
    Truncate,
    bound_tokens,
    bound_window,
    cut_estimate,
    estimate_tokens,
    read_text,
)

RESULT_BYTES = 128
"""Maximum size of a score with its field names, as JSON."""


class SimilarityInput(TaskInput, tag="similarity"):
    """A text and the text to compare it to."""

    text: str
    query: str
    truncate: Truncate = "end"
    max_tokens: int = 0
    """Maximum number of tokens to read from `text`, without special tokens. 0 means the model's
    maximum.
    """

    def estimate_work(self, entry: CatalogEntry) -> int:
        text = cut_estimate(estimate_tokens(self.text), self.max_tokens)
        return text + estimate_tokens(self.query)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns one token per byte in both texts, plus special tokens, up to the maximum."""
        text, query = bound_tokens(self.text), bound_tokens(self.query)
        read = min(text, self.max_tokens) if self.max_tokens else text
        each = (bound_window(tokens + SPECIAL_TOKENS, entry) for tokens in (read, query))
        return WorkBound(sum(each))

    def cache_form(self) -> tuple[object, ...]:
        """Returns both exact texts, the side to cut, and the limit if set."""
        bound = (self.max_tokens,) if self.max_tokens else ()
        return ("similarity", self.text, self.query, self.truncate, *bound)


class SimilarityResult(TaskResult, tag="similarity"):
    """The similarity of two texts, and the number of tokens in both.

    The score is a cosine from -1 to 1, or the output of a cross-encoder, from 0 to 1. Special
    tokens count.
    """

    score: float
    tokens: int
    truncated_tokens: int = 0
    """Total number of tokens cut from the two texts because either was too long for the model."""

    def find_wrong_number(self) -> str:
        """Returns the reason a score can't be used for ranking."""
        return "" if math.isfinite(self.score) else "a score that is not a finite number"

    def to_output(self, media_type: str, link_to: LinkTo) -> float:
        return self.score

    def step_value(self) -> float:
        return self.score


class SimilarityTask(EmbeddingTask):
    """Sentence encoders used only for cosine similarity, and cross-encoders.

    Entries are the same as for embedding. Cross-encoders do not have dimensions.
    """

    name = "similarity"
    noun = "a similarity model"
    compares_texts = True

    def check_entry(self, entry: CatalogEntry) -> None:
        """Checks that a cross-encoder uses torch. It has no vectors to compare."""
        if entry.rerank == "cosine":
            super().check_entry(entry)
        elif entry.backend != "torch" or entry.precision in ("int8", "int4"):
            raise ValueError(
                "a cross-encoder requires the torch backend and precision fp32, bf16, fp16 or auto"
            )
        elif entry.dimensions is not None:
            raise ValueError("a cross-encoder does not compute vectors; omit dimensions")

    def result_bytes(self, entry: CatalogEntry) -> int:
        return RESULT_BYTES

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        query = {"query": TEXT_FIELDS["text"]}
        return StepSchema(
            {
                "type": "object",
                "properties": {**TEXT_FIELDS, **query},
                "required": ["text", "query"],
            },
            {"type": "number"},
        )

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        text, query = (read_text(entry, values, field) for field in ("text", "query"))
        return StepInput(SimilarityInput(text, query, values.get("truncate") or "none"))

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns an embedding model's bound, doubled for two texts."""
        return WorkBound(2 * super().step_bound(entry).work)


SIMILARITY = SimilarityTask()
