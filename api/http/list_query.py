"""Query parameters shared by list endpoints: filters by creation time, model, and key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Query
from pydantic import AfterValidator, BeforeValidator

from api.validators import read_time, refuse_key
from shared.errors import BadInput

CreatedAfter = Annotated[
    datetime | None,
    BeforeValidator(read_time),
    Query(description="Only entries created at or after this time, in ISO 8601."),
]
CreatedBefore = Annotated[
    datetime | None,
    BeforeValidator(read_time),
    Query(description="Only entries created before this time, in ISO 8601."),
]
OfModel = Annotated[str, Query(description="Only entries with this model.")]
KeyId = Annotated[
    str,
    AfterValidator(refuse_key),
    Query(description="Only entries created by the API key with this public ID."),
]
Include = Annotated[
    Literal["api_key_id"] | None,
    Query(description="Adds the public ID of the API key that created each entry."),
]


def model_name(text: str) -> str:
    """Returns the name in `model`, without the optional owner. Empty means all models.

    Raises:
        BadInput: `model` contains only an owner.
    """
    if text.endswith("/"):
        raise BadInput("model: must be a model name, with or without its owner", field="model")
    return text.rpartition("/")[2]


def unix_s(moment: datetime | None, default_s: float) -> float:
    """Returns a time in Unix seconds. A time without a time zone is assumed to be UTC."""
    if moment is None:
        return default_s
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
