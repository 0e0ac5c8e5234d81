"""Embedding: from a text, or its tokens, to a vector."""

from __future__ import annotations

import math
import operator
import struct
import unicodedata
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from shared.catalog_entry import CatalogEntry, Tolerance
from shared.errors import BadInput, InputTooLarge
from shared.flow_types import StepSchema
from shared.tasks.base import (
    ExampleRequest,
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)

Truncate = Literal["none", "end", "start"]
"""The handling of a text that is longer than its model takes: refuse it, or cut it at that side.

The default on the wire is `end`, as it was before there was a choice. The API sends `none` if
the caller says nothing.
"""

BYTES_PER_TOKEN = 4
"""The rough average of a text. OpenAI assumes the same for its limits
(https://platform.openai.com/tokenizer)."""
SPECIAL_TOKENS = 2

TEXT_FIELDS: Mapping[str, Any] = {
    "text": {"type": "string", "minLength": 1},
    "truncate": {"type": "string", "enum": ["end", "start"]},
}
"""What a step of a flow gives to a sentence encoder, as JSON Schema."""


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has, special tokens included."""
    return -(-_size_bytes(text) // BYTES_PER_TOKEN) + SPECIAL_TOKENS


def cut_estimate(tokens: int, max_tokens: int) -> int:
    """An estimate with special tokens, if at most `max_tokens` others are read. 0: all of them."""
    return min(tokens, max_tokens + SPECIAL_TOKENS) if max_tokens else tokens


def bound_tokens(text: str) -> int:
    """The most tokens that a tokenizer makes of a text, without special tokens.

    A token has at least one byte. But tokenizers may put a text into a normal form first
    (https://www.unicode.org/reports/tr15/). The forms that decompose it are the longest.
    """
    if text.isascii():
        return len(text)
    forms = (unicodedata.normalize("NFD", text), unicodedata.normalize("NFKD", text))
    return max(map(_size_bytes, (text, *forms)))


def bound_window(tokens: int, entry: CatalogEntry) -> int:
    """The most tokens that a model reads of a text.

    Args:
        tokens: the most that the text can have, special tokens included.
        entry: of the model, in the catalog.
    """
    window = entry.text.max_input_tokens
    return tokens if window is None else min(tokens, window)


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def checked_text(entry: CatalogEntry, values: Mapping[str, Any], field: str) -> str:
    """Returns a text of a step of a flow.

    Raises:
        BadInput: it is no text, or too long for the model.
    """
    text = values.get(field)
    if not isinstance(text, str) or not text:
        raise BadInput(f"{field}: a text of at least one character is needed", field=field)
    if len(text.encode(errors="replace")) > entry.text.max_input_bytes:
        raise InputTooLarge(f"{field}: longer than {entry.text.max_input_bytes} bytes", field=field)
    return text


class TextInput(TaskInput, tag="text"):
    """One text to embed."""

    text: str
    truncate: Truncate = "end"
    max_tokens: int = 0
    """Maximum tokens to read, without special tokens. 0: as many as the model takes."""

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Tokens, from the length of the text."""
        return cut_estimate(estimate_tokens(self.text), self.max_tokens)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """A token for every byte and the special ones, as far as the model reads them."""
        tokens = bound_tokens(self.text)
        read = min(tokens, self.max_tokens) if self.max_tokens else tokens
        return WorkBound(bound_window(read + SPECIAL_TOKENS, entry))

    def cache_form(self) -> tuple[object, ...]:
        """The text byte for byte, the side at which it is cut, and a bound if it has one."""
        bound = (self.max_tokens,) if self.max_tokens else ()
        return ("text", self.text, self.truncate, *bound)


class TokensInput(TaskInput, tag="tokens"):
    """One text to embed, as token ids of the model's own tokenizer, without special tokens."""

    tokens: list[int]
    truncate: Truncate = "end"

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Tokens, those given and the special ones."""
        return len(self.tokens) + SPECIAL_TOKENS

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """The tokens given and the special ones, as far as the model reads them."""
        return WorkBound(bound_window(len(self.tokens) + SPECIAL_TOKENS, entry))

    def cache_form(self) -> tuple[object, ...]:
        """The tokens, and the side at which they are cut."""
        return ("tokens", self.tokens, self.truncate)


class TextToTokenize(TaskInput, tag="text_to_tokenize"):
    """A text whose tokens are wanted, for windows of it. No model computes it, and it is free.

    It counts toward limits, as a part of the request that asks for it.
    """

    text: str

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Tokens, from the length of the text."""
        return estimate_tokens(self.text)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """None: it costs nothing."""
        return WorkBound(0)

    def cache_form(self) -> tuple[object, ...]:
        return ("text_to_tokenize", self.text)


class TextTokens(TaskResult, tag="text_tokens"):
    """Where the tokens of a text begin, and how many of them its model reads at once.

    `starts`: the character at which each token begins, little-endian uint32. `begins_word`: one
    byte per token, 1 if it is the first of a word. Text that is cut before a word has the same
    tokens in its parts as in whole.
    """

    starts: bytes
    begins_word: bytes
    max_tokens: int

    def to_output(self, media_type: str, link_to: LinkTo) -> int:
        return len(self.begins_word)


class EmbeddingResult(TaskResult, tag="embedding"):
    """One vector as little-endian float32, and the tokens of the text with special tokens."""

    vector: bytes
    tokens: int
    truncated_tokens: int = 0
    """Tokens that were left out, because the text was longer than the model takes."""

    def find_wrong_number(self) -> str:
        """Returns what is wrong with a vector that cannot be compared with others."""
        if not self.vector or len(self.vector) % 4:
            return f"a vector of {len(self.vector)} bytes, which is not a list of float32"
        import numpy as np  # model processes have it, and other processes need it for nothing else

        values = np.frombuffer(self.vector, "<f4")
        if not np.isfinite(values).all():
            return "a vector with NaN or an infinite number"
        return "" if values.any() else "a vector of zeros, which has no direction"

    def to_output(self, media_type: str, link_to: LinkTo) -> list[float]:
        """The vector as a list of floats."""
        return self.step_value()

    def step_value(self) -> list[float]:
        """The vector as a list of floats."""
        return list(struct.unpack(f"<{len(self.vector) // 4}f", self.vector))


class EmbeddingTask(Task):
    """Sentence encoders. Their unit of work and price is the token."""

    name = "embedding"
    noun = "an embedding model"
    gen_ai_operation = "embeddings"
    unit = "tokens"
    first_guesses: ClassVar = FirstGuesses()
    runs_graphs = True

    def check_entry(self, entry: CatalogEntry) -> None:
        """A model needs a budget of tokens, dimensions, and a backend for its precision."""
        if entry.backend == "vllm":
            raise ValueError(f"{self.noun} needs backend torch, onnx or auto")
        if entry.backend == "torch" and entry.precision == "int8":
            raise ValueError("embeddings in precision int8 need backend onnx or auto")
        if entry.backend == "onnx" and entry.precision == "bf16":
            raise ValueError("precision bf16 needs backend torch or auto")
        if entry.batch.max_tokens is None or entry.dimensions is None:
            raise ValueError(f"{self.noun} needs batch.max_tokens and dimensions")

    def budget(self, entry: CatalogEntry) -> int:
        assert entry.batch.max_tokens is not None, (
            "checked when the catalog was read; this is a bug"
        )
        return entry.batch.max_tokens

    def tolerance(self, entry: CatalogEntry) -> float:
        """The least cosine similarity to the reference."""
        return entry.tolerance.cosine

    def is_close(self, ours: TaskResult, theirs: TaskResult, tolerance: Tolerance) -> bool | None:
        """Compares two vectors by their cosine."""
        if not isinstance(ours, EmbeddingResult) or not isinstance(theirs, EmbeddingResult):
            return None
        if len(ours.vector) != len(theirs.vector):
            return False
        return _cosine(ours.vector, theirs.vector) >= tolerance.cosine

    def result_bytes(self, entry: CatalogEntry) -> int:
        """A vector in base64, which takes a third more than its bytes."""
        return math.ceil((entry.dimensions or 1) * 4 / 3) * 4

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        return StepSchema(
            {"type": "object", "properties": TEXT_FIELDS, "required": ["text"]},
            {"type": "array", "items": {"type": "number"}},
        )

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        text = checked_text(entry, values, "text")
        return StepInput(TextInput(text, values.get("truncate") or "none"))

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """A token for every byte of the longest text, as far as the model reads them."""
        return WorkBound(bound_window(entry.text.max_input_bytes + SPECIAL_TOKENS, entry))

    def example_request(self, entry: CatalogEntry, text: str) -> ExampleRequest:
        return ExampleRequest(path="/v1/embeddings", body={"model": entry.name, "input": text})

    def describe_answer(self, entry: CatalogEntry, answer: Any) -> str:
        """A unit vector."""
        vector = answer["data"][0]["embedding"]
        is_unit = math.isclose(math.hypot(*vector), 1.0, abs_tol=0.01)
        if len(vector) != entry.dimensions or not is_unit:
            raise ValueError(f"{len(vector)} numbers, no unit vector")
        return f"a unit vector of {len(vector)}"


def _cosine(one: bytes, other: bytes) -> float:
    """The cosine of two vectors of float32. NaN if one of them has no direction."""
    ours, theirs = (struct.unpack(f"<{len(each) // 4}f", each) for each in (one, other))
    length = math.hypot(*ours) * math.hypot(*theirs)
    return sum(map(operator.mul, ours, theirs)) / length if length else math.nan


EMBEDDING = EmbeddingTask()
