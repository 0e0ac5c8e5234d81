"""Query parameters that lists share: filters by creation time, model and key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Query
from pydantic import AfterValidator, BeforeValidator

from shared.errors import BadInput
from shared.tenants.api_key import holds_key
from shared.tenants.rules import NOT_AN_ID


def _read_time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"must be a time in ISO 8601, such as 2026-10-01T12:00Z, got {text[:40]!r}"
        ) from None


def _refuse_key(text: str) -> str:
    if holds_key(text):
        raise ValueError(NOT_AN_ID)
    return text


CreatedAfter = Annotated[
    datetime | None,
    BeforeValidator(_read_time),
    Query(description="Only entries created at or after this time, in ISO 8601."),
]
CreatedBefore = Annotated[
    datetime | None,
    BeforeValidator(_read_time),
    Query(description="Only entries created before this time, in ISO 8601."),
]
OfModel = Annotated[str, Query(description="Only entries with this model.")]
KeyId = Annotated[
    str,
    AfterValidator(_refuse_key),
    Query(description="Only entries created by the API key with this public ID."),
]
Include = Annotated[
    Literal["api_key_id"] | None,
    Query(description="Adds the public ID of the API key that created each entry."),
]


def model_name(text: str) -> str:
    """Returns the name in `model`, without the owner that it may have. Empty: all models.

    Raises:
        BadInput: there is only an owner.
    """
    if text.endswith("/"):
        raise BadInput("model: must be a model name, with or without its owner", field="model")
    return text.rpartition("/")[2]


def unix_s(moment: datetime | None, default_s: float) -> float:
    """Returns a time in Unix seconds. Without a time zone, it is in UTC."""
    if moment is None:
        return default_s
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
