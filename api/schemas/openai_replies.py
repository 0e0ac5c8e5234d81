"""The bodies of replies, as structs.

msgspec encodes bytes as JSON without intermediate Python objects. Fields are those of OpenAI's API
(https://platform.openai.com/docs/api-reference). Extensions say so.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec


class Usage(msgspec.Struct):
    """Tokens of all inputs, with special tokens. Those of results from the cache count here too."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct):
    """One vector: a list of floats, or base64 of little-endian float32.

    `truncated_tokens` says how many tokens of the text were cut. It is present where the request
    has `truncate`.
    """

    index: int
    embedding: list[float] | bytes
    object: Literal["embedding"] = "embedding"
    truncated_tokens: int | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsReply(msgspec.Struct):
    """Vectors in the order of the inputs."""

    data: list[EmbeddingItem]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class ImageItem(msgspec.Struct, omit_defaults=True):
    """One image: base64, or a link that is valid for 60 minutes.

    The same `seed` draws the same image again.
    """

    seed: int
    b64_json: bytes | None = None
    url: str | None = None


class ImagesReply(msgspec.Struct):
    """Images in the order of their seeds."""

    data: list[ImageItem]
    model: str
    size: str
    output_format: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class ModelItem(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    task: str
    aliases: tuple[str, ...] = ()
    owned_by: str = "penstock"
    object: Literal["model"] = "model"


class ModelsReply(msgspec.Struct):
    """All served models."""

    data: list[ModelItem]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct):
    """What went wrong. `code` is stable, and `param` names the wrong field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail
