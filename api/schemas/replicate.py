"""The public bodies of the Predictions API: what creates a prediction, and what the input of each task holds.

Field names are those of Replicate's API (https://replicate.com/docs/reference/http) and, inside `input`, those that
its Stable Diffusion models have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from api.schemas.openai import LARGEST_SEED, LONGEST_PROMPT, Body, SchedulerName, Text
from shared.catalog import Model
from shared.diffusion_schedulers import SCHEDULER_NAMES

LONGEST_URL = 2048
WebhookEvent = Literal["start", "output", "logs", "completed"]
WEBHOOK_EVENTS: tuple[WebhookEvent, ...] = ("start", "output", "logs", "completed")
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]", max_length=LONGEST_URL)]


class PredictionBody(Body):
    """A prediction of the model in the path."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": {"prompt": "a large red circle on a white background", "seed": 7}}}
    )

    input: dict[str, Any] = Field(description="As the model's `openapi_schema` says.")
    webhook: Url | None = Field(None, description="URL to which the events below are sent, signed.")
    webhook_events_filter: list[WebhookEvent] | None = Field(None, description="Which events are sent. Default: all.")
    webhook_completed: Url | None = Field(None, description="Older form: URL to which only `completed` is sent.")
    stream: bool | None = Field(None, description="Accepted, without effect: every prediction can be streamed.")

    @model_validator(mode="after")
    def _one_webhook(self) -> PredictionBody:
        if self.webhook and self.webhook_completed:
            raise ValueError("give either webhook or webhook_completed, not both")
        return self

    @property
    def told(self) -> tuple[str, tuple[str, ...]]:
        """The webhook's URL and its events; empty where there is none."""
        if self.webhook_completed:
            return self.webhook_completed, ("completed",)
        if not self.webhook:
            return "", ()
        chosen = WEBHOOK_EVENTS if self.webhook_events_filter is None else self.webhook_events_filter
        return self.webhook, tuple(event for event in WEBHOOK_EVENTS if event in chosen)


class VersionedBody(PredictionBody):
    """A prediction of the model that `version` names."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"version": "all-MiniLM-L6-v2", "input": {"text": "a cat on a mat"}}}
    )

    version: str = Field(
        min_length=1, max_length=512, description="A model's name, `owner/name`, or the id of its version."
    )


class TextsInput(Body):
    """The input of embedding models: exactly one of `text`, `texts` and `input`."""

    text: Text | None = Field(None, description="One text. The output is its vector.")
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Several texts. The output is a list of vectors."
    )
    input: Text | Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="One text or several."
    )
    truncate: Literal["end", "start"] | None = Field(
        None, description="Which side of a too long text is cut. Without it the prediction fails."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> TextsInput:
        if sum(one is not None for one in (self.text, self.texts, self.input)) != 1:
            raise ValueError("give exactly one of text, texts and input")
        return self

    @property
    def given(self) -> str | list[str]:
        """The text, or the texts."""
        given = self.text or self.texts or self.input
        assert given is not None, "checked when the body was read; this is a bug"
        return given


class PictureInput(Body):
    """The input of image models. With `image` it is image-to-image at `strength`."""

    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    negative_prompt: str | None = Field(None, max_length=LONGEST_PROMPT)
    image: str | None = Field(None, description="A base64 data: URI, or the URL of a file or result of this API.")
    strength: float | None = Field(None, gt=0, le=1, description="1 ignores the source image.")
    prompt_strength: float | None = Field(None, gt=0, le=1, description="Replicate's name for `strength`.")
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    size: str | None = Field(None, pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$", description="WIDTHxHEIGHT, in one.")
    num_outputs: int = Field(1, ge=1, le=4, description="Image i uses seed + i.")
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED)
    scheduler: SchedulerName | None = Field(None, description=f"One of {', '.join(SCHEDULER_NAMES)}.")
    output_format: Literal["png", "jpg", "jpeg", "webp"] = "png"

    @model_validator(mode="after")
    def _said_once(self) -> PictureInput:
        if self.size and (self.width or self.height):
            raise ValueError("give either size, or width and height")
        if self.strength and self.prompt_strength:
            raise ValueError("give either strength or prompt_strength, not both")
        return self


def input_schema_of(model: Model) -> type[TextsInput] | type[PictureInput]:
    """What the input of `model` is checked against."""
    return TextsInput if model.task == "embedding" else PictureInput


def openapi_schema_of(model: Model) -> dict[str, Any]:
    """The model's input and output in the form that cog publishes, from which clients make their forms."""
    given = input_schema_of(model).model_json_schema(ref_template="#/components/schemas/{model}")
    vector = {"type": "array", "items": {"type": "number"}}
    output: dict[str, Any] = {"title": "Output", "type": "array", "items": {"type": "string", "format": "uri"}}
    if model.task == "embedding":
        output = {"title": "Output", "anyOf": [vector, {"type": "array", "items": vector}]}
    schemas = {"Input": given | {"title": "Input"}, "Output": output}
    return {
        "openapi": "3.1.0",
        "info": {"title": model.name, "version": model.revision},
        "paths": {},
        "components": {"schemas": schemas},
    }
