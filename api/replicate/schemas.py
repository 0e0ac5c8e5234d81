"""The public request bodies of the Predictions API.

Field names are those of Replicate's API (https://replicate.com/docs/reference/http) and, inside
`input`, those that its Stable Diffusion models have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from api.bodies import MAX_URL_CHARS, Body

WebhookEvent = Literal["start", "output", "logs", "completed"]
WEBHOOK_EVENTS: tuple[WebhookEvent, ...] = ("start", "output", "logs", "completed")
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]", max_length=MAX_URL_CHARS)]


class PredictionBody(Body):
    """A prediction of the model in the path."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": {"prompt": "a large red circle on a white background", "seed": 7}}
        }
    )

    input: dict[str, Any] = Field(description="As the model's `openapi_schema` says.")
    webhook: Url | None = Field(None, description="URL to which the events below are sent, signed.")
    webhook_events_filter: list[WebhookEvent] | None = Field(
        None, description="Which events are sent. Default: all."
    )
    webhook_completed: Url | None = Field(
        None, description="Older form: URL to which only `completed` is sent."
    )
    stream: bool | None = Field(
        None, description="Accepted, without effect: every prediction can be streamed."
    )

    @model_validator(mode="after")
    def _one_webhook(self) -> PredictionBody:
        if self.webhook and self.webhook_completed:
            raise ValueError("give either webhook or webhook_completed, not both")
        return self

    @property
    def webhook_target(self) -> tuple[str, tuple[str, ...]]:
        """The URL of the webhook and its events. Empty without a webhook."""
        if self.webhook_completed:
            return self.webhook_completed, ("completed",)
        if not self.webhook:
            return "", ()
        chosen = (
            WEBHOOK_EVENTS if self.webhook_events_filter is None else self.webhook_events_filter
        )
        return self.webhook, tuple(event for event in WEBHOOK_EVENTS if event in chosen)


class VersionedBody(PredictionBody):
    """A prediction of the model that `version` names."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"version": "all-MiniLM-L6-v2", "input": {"text": "a cat on a mat"}}
        }
    )

    version: str = Field(
        min_length=1,
        max_length=512,
        description="A model's name, `owner/name`, or the id of its version.",
    )
