"""Predictions with image models: images generated from a prompt, or from an image and a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from api.errors import WrongField
from api.inputs.codec_protocol import UNPADDED, Padding
from api.inputs.guides import (
    ImageFields,
    check_accepted,
    check_guides,
    guide_urls,
    show_files,
    show_guides,
)
from api.inputs.image_draft import (
    MAX_MASK_BLUR,
    USUAL_STRENGTH,
    ImageDraft,
    ImageSource,
    check_size,
    consecutive,
    size_of,
)
from api.inputs.source_images import ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs, check_results
from shared.errors import BadInput
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Flow, Model
from shared.models.image_interface import ImageMode
from shared.models.tasks.image import ImageInput, ImageResult, ImagesInput, ImagesResult

MAX_PADDING = 4096
"""Pixels per side."""


def _or_one_number(schema: dict[str, Any]) -> None:
    sides = schema["anyOf"][0]
    schema["anyOf"].insert(0, sides["items"] | {"minimum": 1})


class ImagePredictionInput(ImageFields):
    """Input for image models. With `image`, the model runs image-to-image at `strength`."""

    image: str | None = Field(
        None,
        description="A base64 data: URI, an https URL, or the URL of a file or result of this API.",
    )
    strength: float | None = Field(None, gt=0, le=1, description="1 ignores the source image.")
    prompt_strength: float | None = Field(
        None, gt=0, le=1, description="Replicate's name for `strength`."
    )
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    size: str | None = Field(
        None, pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$", description="WIDTHxHEIGHT as a single value."
    )
    mask: str | None = Field(
        None,
        description=(
            "Mask for `image`, with the same size: white pixels are redrawn, black pixels keep "
            "`image`. Accepts the same kinds of values as `image`."
        ),
    )
    mask_blur: float | None = Field(
        None,
        ge=0,
        le=MAX_MASK_BLUR,
        description="Softness of the mask's edge, inward: a standard deviation in pixels.",
    )
    padding: list[Annotated[int, Field(ge=0, le=MAX_PADDING)]] | None = Field(
        None,
        min_length=4,
        max_length=4,
        description=(
            "Number of pixels to draw around `image`: for all sides, or as [left, top, right, "
            "bottom]. Included in width and height."
        ),
        json_schema_extra=_or_one_number,
    )
    num_outputs: int = Field(1, ge=1, le=4, description="Image i uses seed + i.")
    output_format: Literal["png", "jpg", "jpeg", "webp"] = "png"

    @model_validator(mode="after")
    def _check_conflicts(self) -> ImagePredictionInput:
        if self.size and (self.width or self.height):
            raise ValueError("size can't be combined with width and height")
        if self.strength and self.prompt_strength:
            raise ValueError("strength and prompt_strength are mutually exclusive")
        return self

    @model_validator(mode="after")
    def _masks_an_image(self) -> ImagePredictionInput:
        if self.mask is not None and self.image is None:
            raise WrongField("mask", "requires image; send the image to be masked")
        if self.padding is not None and self.image is None:
            raise WrongField("padding", "requires image; send the image to extend")
        if self.mask_blur is not None and self.mask is None and self.padding is None:
            raise WrongField("mask_blur", "requires mask or padding; set one, or omit mask_blur")
        return self

    @field_validator("padding", mode="before")
    @classmethod
    def _on_each_side(cls, value: object) -> object:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return [value] * 4 if is_number else value

    @field_validator("padding")
    @classmethod
    def _pads(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and not any(value):
            raise ValueError("must have at least one nonzero side; omit it for no padding")
        return value

    @property
    def mode(self) -> ImageMode:
        """Starting point for the drawing: `mask` (also with `padding`), `image`, or `text`."""
        if self.mask is not None or self.padding is not None:
            return "mask"
        return "text" if self.image is None else "image"

    @property
    def files(self) -> dict[str, str]:
        """The URLs of all files, keyed by field."""
        named = {"image": self.image, "mask": self.mask}
        return {name: url for name, url in named.items() if url is not None} | guide_urls(self)

    @property
    def source(self) -> ImageSource | None:
        """The image to start from, or None to start from the prompt alone."""
        if self.image is None:
            return None
        return ImageSource(
            "image",
            self.strength or self.prompt_strength or USUAL_STRENGTH,
            mask=None if self.mask is None else "mask",
            redraws="white",
            blur=self.mask_blur or 0.0,
            padding=self.sides,
        )

    @property
    def sides(self) -> Padding:
        """The padding on the left, top, right, and bottom."""
        left, above, right, below = self.padding or UNPADDED
        return left, above, right, below


class ImageApi(ApiTask):
    """The output is a list of URLs."""

    input_schema = ImagePredictionInput

    output_schema: ClassVar = {"type": "array", "items": {"type": "string", "format": "uri"}}

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        """Returns a model's input schema, with only the fields that it accepts."""
        schema = show_guides(super().input_schema_of(model), [model])
        fields, names = schema["properties"], list(model.image.adapters)
        kinds: list[dict[str, Any]] = [{"enum": names, "type": "string"}] if names else []
        if (urls := model.image.adapter_urls) is not None:
            below = "|".join(re.escape(beginning) for beginning in urls.allowed)
            kinds.append({"type": "string", "format": "uri", "pattern": f"^({below})"})
        if kinds:
            fields["lora_weights"] |= {"anyOf": [*kinds, {"type": "null"}]}
        else:
            del fields["lora_weights"], fields["lora_scale"]
        if model.image.upscale is None:
            del fields["upscale"]
        usual = {
            "width": model.image.width,
            "height": model.image.height,
            "num_inference_steps": model.image.steps,
            "guidance_scale": model.image.guidance_scale,
        }
        # A pipeline may not have all of them.
        for name in usual.keys() & fields.keys():
            fields[name]["default"] = usual[name]
        if model.image.interface is not None and "text" not in model.image.interface.tasks:
            schema["required"] = [*schema["required"], "image"]
        return schema

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item per image. The images differ only in their seeds."""
        parsed = ImagePredictionInput.model_validate(raw_input, strict=True)
        check_guides(parsed, model)
        check_accepted(parsed, model, parsed.mode)
        size, files, shown_input = _size(parsed, model), parsed.files, raw_input
        _check_padding(parsed.sides, size, model)
        draft = ImageDraft(parsed, model, size, caller, images)
        await draft.fetch(files)
        first = await draft.first(parsed.source)
        if files:
            first = await draft.store(first)
            shown_input = show_files(raw_input, await draft.keep_inline())
        inputs = consecutive(first, first.seed, parsed.num_outputs)
        is_repeatable = parsed.seed is not None
        return Inputs(
            inputs, shown_input, True, is_repeatable, parsed.output_format, parsed.upscale
        )


def _check_padding(sides: Padding, size: tuple[int, int] | None, model: Model) -> None:
    """Checks that the padding leaves part of the image visible and that its size is supported.

    Raises:
        BadInput: no part is visible, or the size is not supported.
    """
    across, down = sides[0] + sides[2], sides[1] + sides[3]
    if size is None:
        # In that case, the size is computed as a multiple, not counting the padding.
        if across % model.image.multiple or down % model.image.multiple:
            reason = (
                "left plus right and top plus bottom must be multiples of "
                f"{model.image.multiple} for {model.name} unless size is set"
            )
            raise BadInput(f"padding: {reason}", field="padding")
    elif across >= size[0] or down >= size[1]:
        reason = f"leaves no room for the image in {size[0]}x{size[1]} pixels"
        raise BadInput(f"padding: {reason}", field="padding")


def _size(parsed: ImagePredictionInput, model: Model) -> tuple[int, int] | None:
    """Returns the requested size, if any."""
    if parsed.size:
        return size_of(parsed.size, model)
    if not (parsed.width or parsed.height):
        return None
    return check_size(parsed.width or model.image.width, parsed.height or model.image.height, model)


def images_of(outcomes: Sequence[ItemOutcome], model: Model) -> list[ImageResult | None]:
    """Returns the images from a successful request. None represents a withheld image."""
    if isinstance(run := outcomes[0].result, ImagesResult):
        return run.images
    return [*check_results((outcome.result for outcome in outcomes), ImageResult, model)]


def image_server(model: Model, upscale: int | None, catalog: Catalog) -> Model:
    """Returns the flow for images from `model`, or just the model if no steps follow.

    Args:
        upscale: factor by which to enlarge images, or None to leave them as they are.
        catalog: contains the models that the steps use.

    Raises:
        BadInput: the model's images can't be enlarged.
    """
    if upscale is not None and model.image.upscale is None:
        raise BadInput(f"upscale: is not supported by {model.name}; omit it", field="upscale")
    return catalog.image_run(model, upscales=upscale is not None) or model


def plan_images(read: Inputs, model: Model, catalog: Catalog) -> tuple[Model, Inputs]:
    """Returns what to run and its inputs: the model, or a flow if more steps follow the images.

    Args:
        read: the request's inputs. Large sources are in the object store.
        model: the model named in the request. If it does not generate images, no steps follow.
        catalog: contains the models that the flow's steps use.

    Raises:
        BadInput: the model's images can't be enlarged.
    """
    images = [value for value in read.inputs if isinstance(value, ImageInput)]
    if not images:
        return model, read
    served = image_server(model, read.upscale, catalog)
    if not isinstance(served, Flow):
        return model, read
    seeds = [image.seed for image in images]
    images_input = ImagesInput(images[0], seeds, read.is_repeatable, read.upscale or 1)
    return served, replace(read, inputs=[images_input])


TASK = ImageApi()
