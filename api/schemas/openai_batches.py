"""The bodies of /v1/batches as OpenAI's clients send and read them.

Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import ConfigDict, Field

from api.schemas.openai import Body, Metadata
from api.schemas.replicate import LONGEST_URL


class OutputExpiresAfter(Body):
    """How long the output file and the error file are kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class BatchBody(Body):
    """A batch to run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "input_file_id": "file-fe5f4d8f6a1b00000000000000000000",
                "endpoint": "/v1/embeddings",
                "completion_window": "24h",
            }
        },
    )

    input_file_id: str = Field(description="A file of purpose `batch`.")
    endpoint: Literal[
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/chat/completions",
        "/v1/completions",
    ] = Field(description="The `url` of all lines.")
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None
    webhook: str | None = Field(
        None,
        max_length=LONGEST_URL,
        description="Extension: URL to which the end of the batch is sent, signed.",
    )


class BatchRequestCounts(msgspec.Struct):
    """How many lines are over. Lines that were left undone have failed."""

    total: int
    completed: int
    failed: int


class BatchErrorItem(msgspec.Struct):
    """Why a file was refused."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct):
    """All reasons that are told, 100 at most."""

    data: list[BatchErrorItem]
    object: Literal["list"] = "list"


class InputTokensDetails(msgspec.Struct):
    """Always 0."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Always 0."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of the lines that were completed."""

    input_tokens: int
    total_tokens: int
    output_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    created_at: int
    expires_at: int
    request_counts: BatchRequestCounts
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"


class BatchesPage(msgspec.Struct):
    """One page of batches."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
