"""The bodies of /v1/files as OpenAI's clients send and read them.

Source: https://platform.openai.com/docs/api-reference/files
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import ConfigDict, Field

from api.schemas.openai import Body


class FileForm(Body):
    """The fields of an upload beside the file, as text."""

    model_config = ConfigDict(populate_by_name=False)

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, ge=3600, le=30 * 24 * 3600, alias="expires_after[seconds]")


class FileObject(msgspec.Struct):
    """An uploaded file, or one that a batch wrote. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None


class FilesPage(msgspec.Struct):
    """One page of files."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    results: list[dict[str, Any]] = []
    """The files of Replicate's clients, on the first page."""
    next: None = None
    previous: None = None


class FileDeleted(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"
