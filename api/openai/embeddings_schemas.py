"""Request and response bodies for POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from api.bodies import Body, EndUser, Text, Tokens, Usage, shape_of
from api.validators import null_is


class EmbeddingWindow(msgspec.Struct):
    """A window of a text: the characters from `start` (inclusive) to `end` (exclusive).

    Characters are Unicode code points. `input`: the text's position in the request. `tokens`:
    number of tokens processed, including special tokens.
    """

    input: int
    start: int
    end: int
    tokens: int


class EmbeddingItem(msgspec.Struct):
    """One vector: a list of floats, or base64 of little-endian float32.

    `truncated_tokens` is the number of tokens cut from the text. It is present if the request has
    `truncate`. With `chunk`, a vector has its `window`, or the list of `windows` that it averages.
    """

    index: int
    embedding: list[float] | bytes
    object: Literal["embedding"] = "embedding"
    truncated_tokens: int | msgspec.UnsetType = msgspec.UNSET
    window: EmbeddingWindow | msgspec.UnsetType = msgspec.UNSET
    windows: list[EmbeddingWindow] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsReply(msgspec.Struct):
    """Vectors in input order."""

    data: list[EmbeddingItem]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class Chunk(Body):
    """How to cut long texts into windows, each with a separate vector.

    A window ends after a sentence (`by: sentence`) or a word (`by: tokens`), and starts with up to
    `overlap` tokens from the previous window, in whole sentences or words.
    """

    tokens: int | None = Field(
        None,
        ge=8,
        le=1_000_000,
        description="Maximum tokens per window, without special tokens. Default: the maximum "
        "that the model reads at once.",
    )
    overlap: int = Field(0, ge=0, description="At most half of `tokens`.")
    by: Literal["sentence", "tokens"] = "sentence"
    pool: Literal["none", "mean"] = Field(
        "none",
        description="`mean`: one vector per text, the mean of its windows weighted by tokens.",
    )


def _shape_of(value: Any) -> str:
    return "file:" if isinstance(value, dict | FileOfText) else shape_of(value)


class FileOfText(Body):
    """A UTF-8 text file uploaded to POST /v1/files, as `content` or with purpose `user_data`."""

    file: str = Field(min_length=1, max_length=256)


class EmbeddingsBody(Body):
    """Texts to embed, or token IDs along with `tokenizer`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "all-MiniLM-L6-v2", "input": ["a cat", "a kitten"]}
        },
    )

    model: str
    input: Annotated[
        Annotated[Text, Tag("text:")]
        | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("texts:")]
        | Annotated[Tokens, Tag("tokens:")]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("token_lists:")]
        | Annotated[FileOfText, Tag("file:")],
        Discriminator(_shape_of),
    ]
    encoding_format: Annotated[Literal["float", "base64"], null_is("float")] = "float"
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Number of leading dimensions to keep. The vector is normalized again.",
    )
    truncate: Literal["end", "start"] | None = Field(
        None,
        description=(
            "Extension: the side of an overlong text to cut. Without it, overlong texts are "
            "rejected (400)."
        ),
    )
    tokenizer: str | None = Field(
        None,
        description=(
            "Extension: the model whose tokenizer produced the token IDs in `input`. Without it, "
            "token IDs are rejected."
        ),
    )
    chunk: Chunk | None = Field(
        None,
        description="Extension: cut texts into windows. Texts may then have 4 MiB in total.",
    )
    user: EndUser | None = None
