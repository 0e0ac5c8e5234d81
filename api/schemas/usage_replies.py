"""The replies about usage: OpenAI's pages of buckets, and a summary of our own.

https://platform.openai.com/docs/api-reference/usage
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class EmbeddingsUsage(
    msgspec.Struct, kw_only=True, tag_field="object", tag="organization.usage.embeddings.result"
):
    """What models used that are billed by tokens."""

    input_tokens: Count
    """Of all results that were delivered, from the cache too."""
    charged_tokens: Amount
    """What of them is charged."""
    num_model_requests: Count
    project_id: str | None
    """The tenant."""
    user_id: None = None
    api_key_id: str | None
    model: str | None


class ImagesUsage(
    msgspec.Struct, kw_only=True, tag_field="object", tag="organization.usage.images.result"
):
    """What models used that are billed by pixel-steps."""

    images: Count
    """That were delivered, from the cache too."""
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
    """What was charged."""

    amount: Money
    line_item: str | None
    """The model."""
    project_id: str | None
    """The tenant."""
    api_key_id: str | None
    organization_id: None = None
    quantity: None = None


class UsageBucket(msgspec.Struct, kw_only=True):
    """One span of time, empty ones included."""

    object: Literal["bucket"] = "bucket"
    start_time: Count
    end_time: Count
    results: list[EmbeddingsUsage | ImagesUsage | Costs]


class UsagePage(msgspec.Struct, kw_only=True):
    """Buckets in order. `next_page` is the `page` of the next request."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class ModelUsage(msgspec.Struct, kw_only=True):
    """What one model was used for, or all together."""

    model: str | None
    """None: all together."""
    requests: Count
    refused: Count
    """Requests that were refused as a whole, with no items."""
    items: Count
    succeeded: Count
    cached: Count
    """Of the succeeded: from the cache, or joined to an identical item."""
    tokens: Count
    charged_tokens: Amount
    pixel_steps: Count
    charged_pixel_steps: Amount
    device_s: Amount
    cost_usd: Amount


class UsageSpan(msgspec.Struct, kw_only=True):
    """What was used in a span of time."""

    start_time: Count
    end_time: Count
    total: ModelUsage
    models: list[ModelUsage]


class UsageReply(msgspec.Struct, kw_only=True):
    """What a tenant used, by UTC."""

    object: Literal["usage"] = "usage"
    tenant: str
    as_of: Amount
    """Unix time at which the rows were read. Rows come a few seconds after their answers."""
    today: UsageSpan
    month: UsageSpan
    range: UsageSpan | None
    """From `from` to `to`, where these are given."""
    budget_usd_per_month: Amount | None
