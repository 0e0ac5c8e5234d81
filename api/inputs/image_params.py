"""Builds the first image of a request from its parameters and the defaults of the model."""

from __future__ import annotations

import secrets
from typing import Protocol

from shared.catalog import Model
from shared.errors import BadInput
from shared.tasks.image import ImageInput


class ImageRequest(Protocol):
    """The fields that all bodies for images share. None: the default of the model."""

    @property
    def prompt(self) -> str:
        """What the image should show."""

    @property
    def negative_prompt(self) -> str | None:
        """What the image should not show."""

    @property
    def num_inference_steps(self) -> int | None:
        """Denoise steps."""

    @property
    def guidance_scale(self) -> float | None:
        """How closely to follow the prompt."""

    @property
    def seed(self) -> int | None:
        """The seed of the first image. None: a random one."""

    @property
    def scheduler(self) -> str | None:
        """One of shared.diffusion_schedulers."""


def checked_size(width: int, height: int, model: Model) -> tuple[int, int]:
    """Validates an output size in pixels.

    Raises:
        BadInput: the model can't produce it.
    """
    limits = model.image
    if width % limits.multiple or height % limits.multiple:
        raise BadInput(
            f"size: width and height of {model.name} are multiples of {limits.multiple}",
            field="size",
        )
    if width * height > limits.largest_pixels:
        reason = (
            f"{width}x{height} is {width * height} pixels; "
            f"at most {limits.largest_pixels} are allowed for {model.name}"
        )
        raise BadInput(f"size: {reason}", field="size")
    return width, height


def size_of(text: str, model: Model) -> tuple[int, int]:
    """Parses and validates WIDTHxHEIGHT."""
    width, height = (int(length) for length in text.split("x"))
    return checked_size(width, height, model)


def first_image(request: ImageRequest, model: Model, size: tuple[int, int]) -> ImageInput:
    """Builds the first image. The next ones use the following seeds.

    Raises:
        BadInput: more steps than the model allows.
    """
    defaults = model.image
    steps = defaults.steps if request.num_inference_steps is None else request.num_inference_steps
    if steps > defaults.longest_steps:
        reason = f"{steps} steps; at most {defaults.longest_steps} are allowed for {model.name}"
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
    )


def check_strength(steps: int, strength: float) -> None:
    """Validates that a strength leaves at least one step.

    Raises:
        BadInput: it leaves none.
    """
    if int(steps * strength) < 1:
        reason = f"{strength:g} of {steps} steps is less than one step"
        raise BadInput(f"strength: {reason}", field="strength")
