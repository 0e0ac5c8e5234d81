"""Embedding: converts a text, or its tokens, into a vector."""

from __future__ import annotations

import math
import struct
import unicodedata
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from shared.errors import BadInput, InputTooLarge
from shared.models.entry import Batch, CatalogEntry
from shared.models.flow_types import StepSchema
from shared.models.tasks.base import (
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)

Truncate = Literal["none", "end", "start"]
"""How to handle a text that is too long for its model: reject it, or truncate it on the specified
side.

The wire default is `end`, because earlier releases offered no choice. The API sends `none` unless
the caller sets it.
"""

BYTES_PER_TOKEN = 4
"""Approximate average in texts.

OpenAI assumes the same for its limits (https://platform.openai.com/tokenizer).
"""
SPECIAL_TOKENS = 2

MAX_BATCH_TOKENS = 32_768
"""Default upper bound on a batch. Larger batches gained nothing on an H200
(docs/measurements/gpu.md).
"""
USUAL_BATCH_TOKENS = 2048
"""Tokens per batch on a device without measurements. On CPUs, larger batches gain nothing."""
TOKENS_PER_ITEM = 32
"""Shortest average text length at which a batch of the default size is full."""
USUAL_BATCH_ITEMS = USUAL_BATCH_TOKENS // TOKENS_PER_ITEM
JOB_REPLY_BYTES = 256 * 1024
"""Maximum size of the vectors in a reply, in base64. Reading them blocks the event loop for about
1 ms.
"""
BATCHES_ADMITTED = 4
"""Number of full batches that an API instance admits by default.

With overlap, a GPU has two batches, a third waits in the worker, and a fourth is on its way.
"""
USUAL_IN_FLIGHT = 512

TEXT_FIELDS: Mapping[str, Any] = {
    "text": {"type": "string", "minLength": 1},
    "truncate": {"type": "string", "enum": ["end", "start"]},
}
"""A sentence encoder's flow step inputs, as JSON Schema."""


def estimate_tokens(text: str) -> int:
    """Returns the approximate number of tokens in a text, including special tokens."""
    return -(-_size_bytes(text) // BYTES_PER_TOKEN) + SPECIAL_TOKENS


def cut_estimate(tokens: int, max_tokens: int) -> int:
    """Limits an estimate to `max_tokens` plus special tokens. 0 means no limit."""
    return min(tokens, max_tokens + SPECIAL_TOKENS) if max_tokens else tokens


def bound_tokens(text: str) -> int:
    """Returns the maximum number of tokens a tokenizer can produce, without special tokens.

    A token is at least one byte long, but tokenizers may normalize a text first
    (https://www.unicode.org/reports/tr15/). The decomposed forms are the longest.
    """
    if text.isascii():
        return len(text)
    forms = (unicodedata.normalize("NFD", text), unicodedata.normalize("NFKD", text))
    return max(map(_size_bytes, (text, *forms)))


def bound_window(tokens: int, entry: CatalogEntry) -> int:
    """Returns the maximum number of tokens a model reads from a text.

    Args:
        tokens: maximum number of tokens in the text, including special tokens.
        entry: the model's entry in the catalog.
    """
    window = entry.text.max_input_tokens
    return tokens if window is None else min(tokens, window)


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def read_text(entry: CatalogEntry, values: Mapping[str, Any], field: str) -> str:
    """Returns the text in a flow step input.

    Raises:
        BadInput: the value is not text, or is too long for the model.
    """
    text = values.get(field)
    if not isinstance(text, str) or not text:
        raise BadInput(f"{field}: must be text with at least one character", field=field)
    if len(text.encode(errors="replace")) > entry.text.max_input_bytes:
        raise InputTooLarge(
            f"{field}: must be at most {entry.text.max_input_bytes} bytes", field=field
        )
    return text


class TextInput(TaskInput, tag="text"):
    """One text to embed."""

    text: str
    truncate: Truncate = "end"
    max_tokens: int = 0
    """Maximum number of tokens to read, without special tokens. 0 means the model's maximum."""

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns a token count based on the text's length."""
        return cut_estimate(estimate_tokens(self.text), self.max_tokens)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns one token per byte plus special tokens, capped at the model's maximum."""
        tokens = bound_tokens(self.text)
        read = min(tokens, self.max_tokens) if self.max_tokens else tokens
        return WorkBound(bound_window(read + SPECIAL_TOKENS, entry))

    def cache_form(self) -> tuple[object, ...]:
        """Returns the exact text, the side to cut, and the limit if set."""
        bound = (self.max_tokens,) if self.max_tokens else ()
        return ("text", self.text, self.truncate, *bound)


class TokensInput(TaskInput, tag="tokens"):
    """One text to embed, as token IDs from the model's tokenizer, without special tokens."""

    tokens: list[int]
    truncate: Truncate = "end"

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns the number of tokens, including special tokens."""
        return len(self.tokens) + SPECIAL_TOKENS

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns the number of tokens, including special tokens, capped at the model's maximum."""
        return WorkBound(bound_window(len(self.tokens) + SPECIAL_TOKENS, entry))

    def cache_form(self) -> tuple[object, ...]:
        """Returns the tokens, and the side to cut."""
        return ("tokens", self.tokens, self.truncate)


class TextToTokenize(TaskInput, tag="text_to_tokenize"):
    """A text whose tokens are needed to split it into windows.

    The model does not run, so this is free. It does count toward limits, as part of the request
    that needs it.
    """

    text: str

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns a token count based on the text's length."""
        return estimate_tokens(self.text)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns 0, because tokenizing is free."""
        return WorkBound(0)

    def cache_form(self) -> tuple[object, ...]:
        return ("text_to_tokenize", self.text)


class TextTokens(TaskResult, tag="text_tokens"):
    """The start positions of a text's tokens, and how many tokens its model reads at once.

    `starts`: each token's starting character, as little-endian uint32. `begins_word`: one byte per
    token, which is 1 if the token is the first in a word. If a text is split between words, its
    parts have the same tokens as the whole.
    """

    starts: bytes
    begins_word: bytes
    max_tokens: int

    def to_output(self, media_type: str, link_to: LinkTo) -> int:
        return len(self.begins_word)


class EmbeddingResult(TaskResult, tag="embedding"):
    """One vector as little-endian float32, and the text's token count, including special tokens."""

    vector: bytes
    tokens: int
    truncated_tokens: int = 0
    """Number of tokens cut because the text was too long for the model."""

    def find_wrong_number(self) -> str:
        """Returns the reason a vector can't be compared with others."""
        if not self.vector or len(self.vector) % 4:
            return (
                f"a vector of {len(self.vector)} bytes, which is not a whole number of float32 "
                "values"
            )
        # already loaded in model processes, and not needed in other processes
        import numpy as np

        values = np.frombuffer(self.vector, "<f4")
        if not np.isfinite(values).all():
            return "a vector with NaN or an infinite number"
        return "" if values.any() else "an all-zero vector, which has no direction"

    def to_output(self, media_type: str, link_to: LinkTo) -> list[float]:
        return self.step_value()

    def step_value(self) -> list[float]:
        return list(struct.unpack(f"<{len(self.vector) // 4}f", self.vector))


def batch_of_tokens(entry: CatalogEntry, tokens: int) -> Batch:
    """Returns the batch limits for an encoder that processes `tokens` tokens at a time.

    They don't exceed the entry's limits, and allow proportionally fewer items, but never fewer than
    usual.
    """
    batch = entry.batch
    max_tokens = batch.max_tokens or MAX_BATCH_TOKENS
    if tokens >= max_tokens:
        return batch
    items = max(min(batch.max_items, USUAL_BATCH_ITEMS), batch.max_items * tokens // max_tokens)
    return batch.model_copy(update={"max_tokens": tokens, "max_items": items})


class EmbeddingTask(Task):
    """Sentence encoders. The unit of work and price is the token."""

    name = "embedding"
    noun = "an embedding model"
    gen_ai_operation = "embeddings"
    unit = "tokens"
    first_guesses: ClassVar = FirstGuesses()
    runs_graphs = True

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sets the largest batch, and how many items an API instance admits to fill it."""
        batch = fields.get("batch")
        limits = dict(batch) if isinstance(batch, Batch | Mapping) else {}
        tokens = _whole(limits.get("max_tokens"), MAX_BATCH_TOKENS)
        items = max(USUAL_BATCH_ITEMS, tokens // TOKENS_PER_ITEM)
        admitted = BATCHES_ADMITTED * _whole(limits.get("max_items"), items)
        return {
            "batch": {"max_tokens": tokens, "max_items": items},
            "max_in_flight": max(USUAL_IN_FLIGHT, admitted),
        }

    def check_entry(self, entry: CatalogEntry) -> None:
        """Requires dimensions, and a backend that supports its precision."""
        if entry.backend == "torch" and entry.precision == "int8":
            raise ValueError("embeddings in precision int8 require backend onnx or auto")
        if entry.backend == "onnx" and entry.precision == "bf16":
            raise ValueError("precision bf16 requires the torch backend, or auto")
        if entry.dimensions is None:
            raise ValueError(f"{self.noun} requires dimensions")

    def budget(self, entry: CatalogEntry) -> int:
        """Returns the upper bound.

        Workers replace this value with the number found for their device.
        """
        return entry.batch.max_tokens or MAX_BATCH_TOKENS

    def usual_batch(self, entry: CatalogEntry) -> Batch:
        return batch_of_tokens(entry, USUAL_BATCH_TOKENS)

    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns the minimum cosine similarity to the reference."""
        return entry.tolerance.cosine

    def result_bytes(self, entry: CatalogEntry) -> int:
        """Returns a vector's size in base64, which is a third larger than its raw bytes."""
        return math.ceil((entry.dimensions or 1) * 4 / 3) * 4

    def largest_job(self, entry: CatalogEntry, item_work: float = math.inf) -> int:
        """Returns a typical batch's number of texts, so a large request still has several jobs.

        Vectors don't go to the object store, so their only limit is the time it takes to read them.
        """
        batch = self.usual_batch(entry)
        in_batch = min(batch.max_items, (batch.max_tokens or USUAL_BATCH_TOKENS) // item_work)
        in_reply = JOB_REPLY_BYTES // self.result_bytes(entry)
        return max(super().largest_job(entry, item_work), min(int(in_batch), in_reply))

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        return StepSchema(
            {"type": "object", "properties": TEXT_FIELDS, "required": ["text"]},
            {"type": "array", "items": {"type": "number"}},
        )

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        text = read_text(entry, values, "text")
        return StepInput(TextInput(text, values.get("truncate") or "none"))

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns one token per byte in the longest text, capped at the model's maximum."""
        return WorkBound(bound_window(entry.text.max_input_bytes + SPECIAL_TOKENS, entry))


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


EMBEDDING = EmbeddingTask()
