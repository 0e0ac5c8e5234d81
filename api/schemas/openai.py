"""The bodies of requests, as pydantic models that validate and document them.

Fields are those of OpenAI's API (https://platform.openai.com/docs/api-reference). Extensions say
so. Replies are in openai_replies.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared.diffusion_schedulers import SCHEDULER_NAMES

LARGEST_SEED = 2**53 - 11
"""JSON numbers above 2^53 are not exact everywhere, and ten images have consecutive seeds."""
LONGEST_PROMPT = 32_000
_WHITE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAATUlEQVR42u3PQQ0AAAgEILV/5zOFDz"
    "doQCepz6aeExAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQELi3cqoDfaKuZM4AAAAASUVORK5CYI"
    "I="
)
"""A white PNG of 64 x 64 pixels, so that the example works as it is."""
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
"""OpenAI's bounds."""
EndUser = Annotated[str, Field(max_length=128)]
"""Who uses the caller's application. The bound is OpenAI's for `safety_identifier`."""
CacheKey = Annotated[str, Field(max_length=64)]
"""OpenAI's bound for `prompt_cache_key`."""
Option = Annotated[str, Field(max_length=64)]
"""A choice among a few words. New ones are accepted."""
ItemId = Annotated[str, Field(max_length=256)]
"""The id of an answer, of a part of it or of a call. OpenAI's are shorter."""
OPTIONS_MAX_BYTES = 1024
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


def _known(name: str) -> str:
    if name not in SCHEDULER_NAMES:
        raise ValueError(f"{name!r} is not a scheduler; known: {', '.join(SCHEDULER_NAMES)}")
    return name


SchedulerName = Annotated[
    str, AfterValidator(_known), Field(json_schema_extra={"enum": list(SCHEDULER_NAMES)})
]


def _is_short(options: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(options)) > OPTIONS_MAX_BYTES:
        raise ValueError(f"longer than {OPTIONS_MAX_BYTES} bytes as JSON")
    return options


Options = Annotated[dict[str, Any], AfterValidator(_is_short)]
"""Options that have no effect."""


class Body(BaseModel):
    """What callers send: fields we don't know are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shape_of(value: Any) -> str:
    """The shape of an input by its first element, so that errors mention only this shape."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, list):
        return (
            "token_lists:"
            if isinstance(first, list)
            else "tokens:"
            if isinstance(first, int)
            else "texts:"
        )
    return "text:"


class EmbeddingsBody(Body):
    """Texts to embed, or token ids together with `tokenizer`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "all-MiniLM-L6-v2", "input": ["a cat", "a kitten"]}
        },
    )

    model: str
    input: Annotated[
        Annotated[Text, Tag("text:")]
        | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("texts:")]
        | Annotated[Tokens, Tag("tokens:")]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("token_lists:")],
        Discriminator(shape_of),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None,
        ge=1,
        description="How many dimensions to keep, from the first. The vector is normalized again.",
    )
    truncate: Literal["end", "start"] | None = Field(
        None,
        description=(
            "Extension: which side of a too long text is cut. "
            "Without it such texts are refused (400)."
        ),
    )
    tokenizer: str | None = Field(
        None,
        description=(
            "Extension: the model whose tokenizer made the token ids in `input`; "
            "without it they are refused."
        ),
    )
    user: EndUser | None = None


class _ImageBody(Body):
    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    model: str | None = Field(None, description="Default: the first image model of the catalog.")
    n: int = Field(1, ge=1, le=10)
    size: str = Field(
        "auto", pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$", description="WIDTHxHEIGHT, or auto."
    )
    response_format: Literal["url", "b64_json"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp, from 0 to 100."
    )
    seed: int | None = Field(
        None, ge=0, le=LARGEST_SEED, description="Extension: image i of n uses seed + i."
    )
    num_inference_steps: int | None = Field(None, ge=1, description="Extension.")
    guidance_scale: float | None = Field(None, ge=0, le=100, description="Extension.")
    negative_prompt: str | None = Field(None, max_length=LONGEST_PROMPT, description="Extension.")
    scheduler: SchedulerName | None = Field(
        None, description=f"Extension: one of {', '.join(SCHEDULER_NAMES)}."
    )
    quality: Option | None = Field(None, description="Accepted, without effect.")
    style: Option | None = Field(None, description="Accepted, without effect.")
    background: Option | None = Field(None, description="Accepted, without effect.")
    moderation: Option | None = Field(None, description="Accepted, without effect.")
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    stream: bool | None = Field(
        None,
        description="Only false. This API does not stream images.",
        json_schema_extra={"enum": [False, None]},
    )
    partial_images: int | None = Field(
        None, description="Only 0.", json_schema_extra={"enum": [0, None]}
    )

    @field_validator("stream", "partial_images")
    @classmethod
    def _is_not_streamed(cls, value: bool | int | None, info: ValidationInfo) -> bool | int | None:
        if value:
            raise ValueError("images are not streamed by this API; leave this field out")
        return value

    @model_validator(mode="after")
    def _png_has_no_quality(self) -> _ImageBody:
        if self.output_compression is not None and self.output_format == "png":
            raise ValueError("output_compression is for output_format jpeg and webp")
        return self


class GenerationBody(_ImageBody):
    """A prompt to draw images from."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "a large red circle on a white background",
                "size": "64x64",
                "seed": 7,
            }
        },
    )


class SourceImage(Body):
    """A source image inside a JSON body."""

    image_url: str = Field(
        pattern=r"^data:", description="A base64 data: URI. Other URLs are not fetched."
    )


def _as_form(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        # A form has no null. Absent fields are not sent.
        kinds = [kind for kind in field.pop("anyOf", ()) if kind["type"] != "null"]
        field |= kinds[0] if kinds else {}
        if "enum" in field:
            field["enum"] = [value for value in field["enum"] if value is not None]
        if field.get("default", "") is None:
            del field["default"]
    schema["properties"]["image"] = {
        "type": "string",
        "format": "binary",
        "description": "PNG, JPEG or WebP.",
    }
    schema["required"].append("image")


class EditForm(_ImageBody):
    """A prompt and a source image, as a form. The file is the field `image`."""

    model_config = ConfigDict(json_schema_extra=_as_form)

    strength: float = Field(0.8, gt=0, le=1, description="Extension: 1 ignores the source image.")
    input_fidelity: Option | None = Field(None, description="Accepted, without effect.")


class EditBody(EditForm):
    """A prompt and a source image, as JSON."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "a large blue circle on a white background",
                "images": [{"image_url": _WHITE}],
                "strength": 0.6,
            }
        },
    )

    images: list[SourceImage] = Field(
        min_length=1, max_length=1, description="Exactly one source image."
    )
