"""Images that join a running batch on a GPU, compared with the same images generated alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from shared.errors import PenstockError
from shared.models.tasks import Result
from shared.models.tasks.image import ImageResult
from workers.models.base import PreparedImage
from workers.models.image.model import ImageModel

JOIN_EVERY = 2
"""Number of steps between one image joining the batch and the next."""
MAX_STEPS = 10_000


def drawn(
    model: ImageModel, items: Sequence[PreparedImage], *, join_every: int = 0
) -> list[np.ndarray]:
    """Generates images in one running batch. Returns each image's pixels, [height, width, 3].

    Args:
        items: the images, in the order in which they are admitted.
        join_every: an item is admitted this many steps after the previous one.

    Raises:
        RuntimeError: one of the images was not generated.
    """
    results: dict[int, Result | PenstockError] = {}
    admitted = steps = 0
    while len(results) < len(items):
        while admitted < len(items) and steps >= admitted * join_every:
            model.admit(admitted, items[admitted])
            admitted += 1
        results |= model.step().results
        steps += 1
        if steps > MAX_STEPS:
            raise RuntimeError("the images never finished")
    return [_pixels(results[slot]) for slot in range(len(items))]


def distances(model: ImageModel, items: Mapping[str, PreparedImage]) -> dict[str, np.ndarray]:
    """Returns how far each pixel in a mixed batch is from the same image alone, on a 255 scale."""
    alone = {name: drawn(model, [item])[0] for name, item in items.items()}
    together = drawn(model, list(items.values()), join_every=JOIN_EVERY)
    return {
        name: np.abs(one - mixed)
        for (name, one), mixed in zip(alone.items(), together, strict=True)
    }


def text_image(side: int, steps: int, guidance: float) -> PreparedImage:
    return PreparedImage(
        key="",
        length=side * side * steps,
        prompt="a red circle left of a blue star",
        negative_prompt="",
        width=side,
        height=side,
        steps=steps,
        guidance_scale=guidance,
        seed=1,
        scheduler="ddim",
    )


def masked(item: PreparedImage) -> PreparedImage:
    """Returns the same image generated from a source image, with a mask over its center."""
    mask = np.zeros((item.height, item.width), np.uint8)
    mask[item.height // 4 : -item.height // 4, item.width // 4 : -item.width // 4] = 255
    source = gradient(item.width, item.height)
    return msgspec.structs.replace(item, source=source, strength=1.0, mask=mask.tobytes())


def gradient(width: int, height: int) -> bytes:
    """Returns RGB pixels whose colors each increase in a different direction."""
    across = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return np.stack([across, down, 255 - across], -1).astype(np.uint8).tobytes()


def outline(width: int, height: int) -> bytes:
    """Returns the edges of a square in white on black, as an edge ControlNet expects."""
    edges = np.zeros((height, width, 3), np.uint8)
    top, left = height // 4, width // 4
    edges[top : height - top, left : width - left] = 255
    edges[top + 1 : height - top - 1, left + 1 : width - left - 1] = 0
    return edges.tobytes()


def _pixels(result: Any) -> np.ndarray:
    if not isinstance(result, ImageResult):
        raise RuntimeError(f"no image but {result!r}")
    with Image.open(io.BytesIO(result.image.data or b""), formats=["PNG"]) as image:
        return np.asarray(image).astype(int)
