"""The reply of /v1/status, for the OpenAPI document and on the wire."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ModelStatus(msgspec.Struct, kw_only=True):
    """How busy a model is, as one instance of the API sees it."""

    model: str
    is_busy: bool
    """Whether items of anyone wait for a worker."""
    your_items_in_flight: Count
    """Items of your tenant that wait for a worker."""
    expected_wait_s: Seconds
    """Estimate for one more item of yours, in steps of 1, 2 and 5."""
    items_per_s: Seconds
    """What the workers compute while there is a queue, as last measured."""
    object: Literal["model.status"] = "model.status"


class StatusReply(msgspec.Struct):
    """How busy the models are that the key may use."""

    data: list[ModelStatus]
    object: Literal["list"] = "list"
