"""Predictions of image models: pictures from a prompt, or from a picture and a prompt."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field, model_validator

from api.inputs.image_params import check_strength, checked_size, first_image, size_of
from api.inputs.source_pictures import PictureCaller, SourcePictures
from api.schemas.openai import LARGEST_SEED, LONGEST_PROMPT, Body, SchedulerName
from api.tasks.base import ApiTask, Inputs
from shared.catalog import Model
from shared.diffusion_schedulers import SCHEDULER_NAMES

USUAL_STRENGTH = 0.8


class PictureInput(Body):
    """The input of image models. With `image` it is image-to-image at `strength`."""

    prompt: str = Field(min_length=1, max_length=LONGEST_PROMPT)
    negative_prompt: str | None = Field(None, max_length=LONGEST_PROMPT)
    image: str | None = Field(
        None, description="A base64 data: URI, or the URL of a file or result of this API."
    )
    strength: float | None = Field(None, gt=0, le=1, description="1 ignores the source image.")
    prompt_strength: float | None = Field(
        None, gt=0, le=1, description="Replicate's name for `strength`."
    )
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    size: str | None = Field(
        None, pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$", description="WIDTHxHEIGHT, in one."
    )
    num_outputs: int = Field(1, ge=1, le=4, description="Image i uses seed + i.")
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED)
    scheduler: SchedulerName | None = Field(
        None, description=f"One of {', '.join(SCHEDULER_NAMES)}."
    )
    output_format: Literal["png", "jpg", "jpeg", "webp"] = "png"

    @model_validator(mode="after")
    def _said_once(self) -> PictureInput:
        if self.size and (self.width or self.height):
            raise ValueError("give either size, or width and height")
        if self.strength and self.prompt_strength:
            raise ValueError("give either strength or prompt_strength, not both")
        return self


class ImageApi(ApiTask):
    """The output is a list of URLs."""

    input_schema = PictureInput
    output_schema: ClassVar = {"type": "array", "items": {"type": "string", "format": "uri"}}

    async def read(
        self, given: dict[str, Any], model: Model, caller: PictureCaller, pictures: SourcePictures
    ) -> Inputs:
        """One item for each picture. They differ in their seeds."""
        parsed = PictureInput.model_validate(given, strict=True)
        size, shown = _size(parsed, model), given
        if parsed.image is None:
            first = first_image(parsed, model, size or (model.image.width, model.image.height))
        else:
            strength = parsed.strength or parsed.prompt_strength or USUAL_STRENGTH
            data = await pictures.fetch(parsed.image, caller)
            source, size = await pictures.prepare(data, size, model.image, caller)
            first = first_image(parsed, model, size)
            check_strength(first.steps, strength)
            source = await pictures.stored(source)
            first = msgspec.structs.replace(first, image=source, strength=strength)
            if parsed.image.startswith("data:"):
                shown = given | {"image": await pictures.keep(parsed.image, data, caller)}
        inputs = [
            msgspec.structs.replace(first, seed=first.seed + number)
            for number in range(parsed.num_outputs)
        ]
        return Inputs(inputs, shown, True, parsed.seed is not None, parsed.output_format)


def _size(parsed: PictureInput, model: Model) -> tuple[int, int] | None:
    """The requested size. None: not given."""
    if parsed.size:
        return size_of(parsed.size, model)
    if not (parsed.width or parsed.height):
        return None
    return checked_size(
        parsed.width or model.image.width, parsed.height or model.image.height, model
    )


TASK = ImageApi()
