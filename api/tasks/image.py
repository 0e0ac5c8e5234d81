"""Predictions of image models: images from a prompt, or from an image and a prompt.

Also builds the first image of a request from its parameters and the defaults of the model.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
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
    with_fetched_adapter,
    with_guides,
)
from api.inputs.source_images import FetchedFile, ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs
from shared.errors import BadInput, PenstockError
from shared.messages import ItemOutcome, ReplyBody
from shared.models.after_image import input_of
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.image_interface import ImageMode
from shared.models.tasks import Input
from shared.models.tasks.custom import CustomInput
from shared.models.tasks.image import ImageInput, ImageResult, ImagesResult, choose_adapter

USUAL_STRENGTH = 0.8
MAX_MASK_BLUR = 64.0
"""Pixels."""
MAX_PADDING = 4096
"""Pixels of a side."""


def checked_size(width: int, height: int, model: Model) -> tuple[int, int]:
    """Validates an output size in pixels.

    Raises:
        BadInput: the model can't produce it.
    """
    limits = model.image
    if width % limits.multiple or height % limits.multiple:
        raise BadInput(
            f"size: width and height must be multiples of {limits.multiple} for {model.name}",
            field="size",
        )
    if width * height > limits.largest_pixels:
        reason = (
            f"{width}x{height} has {width * height} pixels, which exceeds the maximum of "
            f"{limits.largest_pixels} for {model.name}"
        )
        raise BadInput(f"size: {reason}", field="size")
    return width, height


def results_of(outcomes: Sequence[ItemOutcome], model: Model) -> list[ImageResult]:
    """Returns the images of outcomes, all of which have a result."""
    results = [outcome.result for outcome in outcomes]
    images = [result for result in results if isinstance(result, ImageResult)]
    if len(images) < len(results):
        raise PenstockError(f"{model.name} returned a result that is not an image; this is a bug")
    return images


def images_in(reply: ReplyBody, model: Model) -> list[ImageResult | None]:
    """Returns the images of a prediction that succeeded. None: it is withheld."""
    if isinstance(reply.output, ImagesResult):
        return reply.output.images
    return [*results_of(reply.outcomes, model)]


def is_run(model: Model, upscale: int | None) -> bool:
    """Returns whether a request for images is a flow, or is refused because it can't be one."""
    return upscale is not None or model.image.safety is not None


def as_run(
    inputs: Sequence[Input],
    upscale: int | None,
    model: Model,
    catalog: Catalog,
    *,
    is_repeatable: bool,
) -> tuple[Model, CustomInput] | None:
    """Returns the flow that a request is, and its input. None: no step follows its images.

    Args:
        inputs: of the request. Large sources are in the object store.
        upscale: how many times as wide and high its images become. None: not at all.
        model: that it names. If it draws no images, no step follows.
        catalog: has the models of the steps.
        is_repeatable: True if equal requests get equal images.

    Raises:
        BadInput: images of the model can't be enlarged.
    """
    images = [one for one in inputs if isinstance(one, ImageInput)]
    if not images:
        return None
    if upscale is not None and model.image.upscale is None:
        raise BadInput(f"upscale: is not supported by {model.name}; leave it out", field="upscale")
    flow = catalog.image_flow(model, len(images), upscales=upscale is not None)
    if flow is None:
        return None
    return flow, input_of(images, upscale, is_repeatable=is_repeatable)


def size_of(text: str, model: Model) -> tuple[int, int]:
    """Parses and validates WIDTHxHEIGHT."""
    width, height = (int(length) for length in text.split("x"))
    return checked_size(width, height, model)


def first_image(request: ImageFields, model: Model, size: tuple[int, int]) -> ImageInput:
    """Builds the first image. The next ones use the following seeds.

    Raises:
        BadInput: more steps than the model allows, or an adapter that it has not.
    """
    defaults = model.image
    steps = defaults.steps if request.num_inference_steps is None else request.num_inference_steps
    if steps > defaults.longest_steps:
        reason = f"must be at most {defaults.longest_steps} for {model.name}, got {steps}"
        raise BadInput(f"num_inference_steps: {reason}", field="num_inference_steps")
    return ImageInput(
        prompt=request.prompt,
        width=size[0],
        height=size[1],
        steps=steps,
        guidance_scale=defaults.guidance_scale
        if request.guidance_scale is None
        else request.guidance_scale,
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        scheduler=request.scheduler or defaults.scheduler,
        negative_prompt=request.negative_prompt or "",
        adapter=choose_adapter(model, request.lora_weights, request.lora_scale, takes_urls=True),
        clip_skip=request.clip_skip or None,
        guidance_rescale=request.guidance_rescale or 0.0,
    )


def with_source(first: ImageInput, image: Blob, strength: float, model: Model) -> ImageInput:
    """Returns an image that starts from a source.

    Args:
        strength: of the request or the default. Models that accept none edit the source as a whole.

    Raises:
        BadInput: the strength leaves no step.
    """
    if not model.image.accepts("strength"):
        return msgspec.structs.replace(first, image=image)
    _check_strength(first.steps, strength)
    return msgspec.structs.replace(first, image=image, strength=strength)


def _check_strength(steps: int, strength: float) -> None:
    if int(steps * strength) < 1:
        reason = (
            f"{strength:g} of {steps} steps is less than one step; increase strength or "
            "num_inference_steps"
        )
        raise BadInput(f"strength: {reason}", field="strength")


def _or_one_number(schema: dict[str, Any]) -> None:
    sides = schema["anyOf"][0]
    schema["anyOf"].insert(0, sides["items"] | {"minimum": 1})


class ImagePredictionInput(ImageFields):
    """The input of image models. With `image` it is image-to-image at `strength`."""

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
    def _said_once(self) -> ImagePredictionInput:
        if self.size and (self.width or self.height):
            raise ValueError("size can't be combined with width and height")
        if self.strength and self.prompt_strength:
            raise ValueError("strength and prompt_strength are mutually exclusive")
        return self

    @model_validator(mode="after")
    def _masks_an_image(self) -> ImagePredictionInput:
        if self.mask is not None and self.image is None:
            raise WrongField("mask", "requires image; send the image that it masks")
        if self.padding is not None and self.image is None:
            raise WrongField("padding", "requires image; send the image to extend")
        if self.mask_blur is not None and self.mask is None and self.padding is None:
            raise WrongField("mask_blur", "requires mask or padding; leave it out")
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
            raise ValueError("must have at least one pixel on a side; otherwise leave it out")
        return value

    @property
    def mode(self) -> ImageMode:
        """What the image is drawn from."""
        if self.mask is not None or self.padding is not None:
            return "mask"
        return "text" if self.image is None else "image"

    @property
    def sides(self) -> Padding:
        """The padding to the left, above, to the right and below."""
        left, above, right, below = self.padding or UNPADDED
        return left, above, right, below


class ImageApi(ApiTask):
    """The output is a list of URLs."""

    input_schema = ImagePredictionInput

    output_schema: ClassVar = {"type": "array", "items": {"type": "string", "format": "uri"}}

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        """The input of a model. It has adapters, guides and `upscale` if the model has them."""
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
        if model.image.interface is not None and "text" not in model.image.interface.tasks:
            schema["required"] = [*schema["required"], "image"]
        return schema

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item for each image. They differ in their seeds."""
        parsed = ImagePredictionInput.model_validate(raw_input, strict=True)
        check_guides(parsed, model)
        check_accepted(parsed, model, parsed.mode)
        size, shown = _size(parsed, model), raw_input
        if parsed.image is None and not guide_urls(parsed):
            first = first_image(parsed, model, size or (model.image.width, model.image.height))
        else:
            first, kept = await _from_pictures(parsed, model, caller, images)
            shown = show_files(raw_input, kept)
        first = await with_fetched_adapter(first, model, caller, images)
        inputs = [
            msgspec.structs.replace(first, seed=first.seed + number)
            for number in range(parsed.num_outputs)
        ]
        is_repeatable = parsed.seed is not None
        return Inputs(inputs, shown, True, is_repeatable, parsed.output_format, parsed.upscale)


async def _from_pictures(
    parsed: ImagePredictionInput, model: Model, caller: ImageCaller, images: SourceImages
) -> tuple[ImageInput, dict[str, str]]:
    """Returns the first image, which has a source or a guide.

    And the URLs of files that were in the input itself, by place.
    """
    named = {"image": parsed.image, "mask": parsed.mask}
    urls = {name: url for name, url in named.items() if url is not None} | guide_urls(parsed)
    files = await images.fetch_images(urls, caller)
    size = _size(parsed, model)
    if "image" in files:
        first = await _from_image(parsed, files, model, caller, images)
        size = first.width, first.height
    else:
        first = first_image(parsed, model, size or (model.image.width, model.image.height))
    data = {name: file.data for name, file in files.items()}
    first = await with_guides(first, parsed, data, size, model, caller, images)
    first = first.with_sources([await images.stored(blob) for blob in first.sources])
    kept = {
        name: await images.keep(files[name], caller, name.rpartition(".")[2])
        for name, one in urls.items()
        if one.startswith("data:")
    }
    return first, kept


async def _from_image(
    parsed: ImagePredictionInput,
    files: Mapping[str, FetchedFile],
    model: Model,
    caller: ImageCaller,
    images: SourceImages,
) -> ImageInput:
    """Returns the first image, which starts from a source, maybe within a mask."""
    sides = parsed.sides
    is_masked = parsed.mask is not None or sides != UNPADDED
    strength = parsed.strength or parsed.prompt_strength or USUAL_STRENGTH
    size = _size(parsed, model)
    _check_padding(sides, size, model)
    source = await images.prepare(files["image"].data, size, model.image, caller, sides)
    first = first_image(parsed, model, source.size)
    first = with_source(first, source.image, strength, model)
    if is_masked:
        data = files["mask"].data if "mask" in files else b""
        mask = await images.prepare_mask(data, source, parsed.mask_blur or 0.0, caller, sides)
        first = msgspec.structs.replace(first, mask=mask)
    return first


def _check_padding(sides: Padding, size: tuple[int, int] | None, model: Model) -> None:
    """Validates that a padding leaves something of the image, in a size that the model draws.

    Raises:
        BadInput: it does not.
    """
    across, down = sides[0] + sides[2], sides[1] + sides[3]
    if size is None:
        # Without it, the size is a multiple already.
        if across % model.image.multiple or down % model.image.multiple:
            reason = (
                "left plus right, and top plus bottom, must be multiples of "
                f"{model.image.multiple} for {model.name} unless size is set"
            )
            raise BadInput(f"padding: {reason}", field="padding")
    elif across >= size[0] or down >= size[1]:
        reason = f"leaves nothing of the image in {size[0]}x{size[1]} pixels"
        raise BadInput(f"padding: {reason}", field="padding")


def _size(parsed: ImagePredictionInput, model: Model) -> tuple[int, int] | None:
    """Returns the requested size. None if there is none."""
    if parsed.size:
        return size_of(parsed.size, model)
    if not (parsed.width or parsed.height):
        return None
    return checked_size(
        parsed.width or model.image.width, parsed.height or model.image.height, model
    )


TASK = ImageApi()
