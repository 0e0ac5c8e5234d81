"""From what a caller wishes to the first image to draw: the model's defaults and bounds, for every route that draws."""

from __future__ import annotations

import secrets
from typing import Protocol

from shared.catalog import Model
from shared.errors import BadInput
from shared.tasks.image import ImageInput


class Wish(Protocol):
    """What the bodies of all routes that draw have in common; None: as the model usually does."""

    @property
    def prompt(self) -> str:
        """What to draw."""

    @property
    def negative_prompt(self) -> str | None:
        """What not to draw."""

    @property
    def num_inference_steps(self) -> int | None:
        """Denoise steps."""

    @property
    def guidance_scale(self) -> float | None:
        """How closely to follow the prompt."""

    @property
    def seed(self) -> int | None:
        """Of the first image; None: a new one."""

    @property
    def scheduler(self) -> str | None:
        """One of shared.diffusion_schedulers."""


def checked_size(width: int, height: int, model: Model) -> tuple[int, int]:
    """The size in pixels, which the model must be able to draw.

    Raises:
        BadInput: it can't.
    """
    limits = model.image
    if width % limits.multiple or height % limits.multiple:
        raise BadInput(f"size: width and height of {model.name} are multiples of {limits.multiple}", field="size")
    if width * height > limits.largest_pixels:
        reason = (
            f"{width}x{height} is {width * height} pixels; at most {limits.largest_pixels} are allowed for {model.name}"
        )
        raise BadInput(f"size: {reason}", field="size")
    return width, height


def size_of(text: str, model: Model) -> tuple[int, int]:
    """The same from WIDTHxHEIGHT."""
    width, height = (int(length) for length in text.split("x"))
    return checked_size(width, height, model)


def first_image(wish: Wish, model: Model, size: tuple[int, int]) -> ImageInput:
    """The first image to draw; others differ in their seeds, which count up.

    Raises:
        BadInput: more steps than the model takes.
    """
    defaults = model.image
    steps = defaults.steps if wish.num_inference_steps is None else wish.num_inference_steps
    if steps > defaults.longest_steps:
        reason = f"{steps} steps; at most {defaults.longest_steps} are allowed for {model.name}"
        raise BadInput(f"num_inference_steps: {reason}", field="num_inference_steps")
    return ImageInput(
        prompt=wish.prompt,
        width=size[0],
        height=size[1],
        steps=steps,
        guidance_scale=defaults.guidance_scale if wish.guidance_scale is None else wish.guidance_scale,
        seed=secrets.randbelow(2**32) if wish.seed is None else wish.seed,
        scheduler=wish.scheduler or defaults.scheduler,
        negative_prompt=wish.negative_prompt or "",
    )


def check_strength(steps: int, strength: float) -> None:
    """Lets a strength pass that leaves steps to take.

    Raises:
        BadInput: it leaves none.
    """
    if int(steps * strength) < 1:
        reason = f"{strength:g} of {steps} steps is less than one step"
        raise BadInput(f"strength: {reason}", field="strength")
