"""The usage routes' responses: OpenAI's buckets, and our summary."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class EmbeddingsUsage(
    msgspec.Struct, kw_only=True, tag_field="object", tag="organization.usage.embeddings.result"
):
    """Usage for models billed by the token."""

    input_tokens: Count
    """Input tokens for all delivered results, including results from the cache."""
    charged_tokens: Amount
    """The part of `input_tokens` that was charged for."""
    num_model_requests: Count
    project_id: str | None
    """The tenant."""
    user_id: None = None
    api_key_id: str | None
    model: str | None


class ImagesUsage(
    msgspec.Struct, kw_only=True, tag_field="object", tag="organization.usage.images.result"
):
    """Usage for models billed by the pixel-step."""

    images: Count
    """Images delivered, including those from the cache."""
    pixel_steps: Count
    charged_pixel_steps: Amount
    num_model_requests: Count
    source: None = None
    size: None = None
    project_id: str | None
    """The tenant."""
    user_id: None = None
    api_key_id: str | None
    model: str | None


class Money(msgspec.Struct, kw_only=True):
    """An amount."""

    value: Amount
    currency: Literal["usd"] = "usd"


class Costs(msgspec.Struct, kw_only=True, tag_field="object", tag="organization.costs.result"):
    """Charges."""

    amount: Money
    line_item: str | None
    """The model."""
    project_id: str | None
    """The tenant."""
    api_key_id: str | None
    organization_id: None = None
    quantity: None = None


class UsageBucket(msgspec.Struct, kw_only=True):
    """One time span. Empty spans are included."""

    object: Literal["bucket"] = "bucket"
    start_time: Count
    end_time: Count
    results: list[EmbeddingsUsage | ImagesUsage | Costs]


class UsagePage(msgspec.Struct, kw_only=True):
    """Buckets in order. `next_page` is the value of `page` for the next request."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class ModelUsage(msgspec.Struct, kw_only=True):
    """Usage for one model, or for all models."""

    model: str | None
    """None means all models."""
    requests: Count
    """All requests, including rejected ones, as in the reports."""
    refused: Count
    """The number of `requests` that were rejected as a whole, so they have no items."""
    items: Count
    succeeded: Count
    cached: Count
    """Successful items that came from the cache or joined an identical item."""
    tokens: Count
    charged_tokens: Amount
    pixel_steps: Count
    charged_pixel_steps: Amount
    device_s: Amount
    cost_usd: Amount


class UsageSpan(msgspec.Struct, kw_only=True):
    """Usage within a time span."""

    start_time: Count
    end_time: Count
    total: ModelUsage
    models: list[ModelUsage]


class UsageReply(msgspec.Struct, kw_only=True):
    """A tenant's usage, in UTC."""

    object: Literal["usage"] = "usage"
    tenant: str
    as_of: Amount
    """Unix time at which the rows were read. A row arrives a few seconds after the response it
    describes.
    """
    today: UsageSpan
    month: UsageSpan
    range: UsageSpan | None
    """Usage from `from` to `to`, if set."""
    budget_usd_per_month: Amount | None
