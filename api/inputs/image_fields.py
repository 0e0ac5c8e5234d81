"""The fields of all bodies for images that say how they are drawn, in the words of diffusers.

OpenAI's bodies (api/openai/images.py) and predictions (api/tasks/image.py) have them, each with the
rest of its own API.
"""

from __future__ import annotations

from pydantic import Field

from api.bodies import (
    MAX_PROMPT_CHARS,
    MAX_SEED,
    MAX_URL_CHARS,
    SCHEDULER_CHOICE,
    ClipSkip,
    GuidanceRescale,
    SchedulerName,
    Upscale,
)
from api.inputs.controls import ControlFields
from api.inputs.ip_adapters import IpAdapterFields
from shared.image_entry import MAX_LORA_SCALE, MIN_LORA_SCALE


class ImageFields(ControlFields, IpAdapterFields):
    """How images are drawn. None: the default of the model."""

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Image i of a request uses seed + i."
    )
    scheduler: SchedulerName | None = Field(None, description=f"One {SCHEDULER_CHOICE[4:]}")
    clip_skip: ClipSkip | None = Field(
        None, description="How many of the last layers of CLIP do not read the prompt."
    )
    guidance_rescale: GuidanceRescale | None = Field(
        None, description="How much of the contrast that guidance adds is taken back, 0.7 if any."
    )
    lora_weights: str | None = Field(
        None,
        max_length=MAX_URL_CHARS,
        description=(
            "An adapter of the model, by its name. Or the https URL of its file, if the model "
            "takes any; with #sha256=DIGEST behind it, only the file of that digest."
        ),
    )
    lora_scale: float | None = Field(
        None,
        ge=MIN_LORA_SCALE,
        le=MAX_LORA_SCALE,
        description="How strongly the adapter counts. Default: as the catalog says, mostly 1.",
    )
    upscale: Upscale | None = Field(
        None,
        description=(
            "How many times as wide and high the image becomes, if the model has an upscaler: "
            "2 or 4."
        ),
    )
