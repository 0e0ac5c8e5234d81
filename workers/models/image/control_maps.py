"""Makes the maps of ControlNets of callers' images, in the I/O process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from PIL import Image

from shared.errors import BadInput
from shared.image_entry import Control
from shared.tasks.image import ControlInput
from workers.models.base import PreparedImage


def with_control(
    item: PreparedImage, control: ControlInput, pixels: bytes, known: Mapping[str, Control]
) -> PreparedImage:
    """Returns the item with its control, and the map of its image.

    Args:
        item: without a control.
        control: of the request.
        pixels: its image in RGB, of the size of the item.
        known: the controls of the model, by name.

    Raises:
        BadInput: the control is not one of the model, or guides in no part of the steps.
    """
    entry = known.get(control.name)
    if entry is None:
        names = ", ".join(known) or "none"
        raise BadInput(f"control {control.name!r} is unknown; known: {names}", field="control")
    if not 0 <= control.start < control.end <= 1:
        raise BadInput(
            f"control_guidance_start {control.start} and control_guidance_end {control.end} are "
            "not in order from 0 to 1",
            field="control_guidance_start",
        )
    image = Image.frombytes("RGB", (item.width, item.height), pixels)
    return msgspec.structs.replace(
        item,
        control=control.name,
        control_map=map_of(image, entry).tobytes(),
        control_scale=control.scale,
        control_start=control.start,
        control_end=control.end,
    )


def map_of(image: Image.Image, entry: Control) -> Image.Image:
    """Returns the map of an image for a ControlNet, in RGB and of the same size."""
    if entry.preprocessor == "canny":
        # SciPy takes a tenth of a second to import, and only this needs it.
        from workers.models.image.canny import edges

        outline = edges(np.asarray(image), entry.canny_low, entry.canny_high)
        return Image.fromarray(outline).convert("RGB")
    if entry.preprocessor == "tile" and entry.tile_factor > 1:
        small = [max(1, round(side / entry.tile_factor)) for side in image.size]
        coarse = image.resize((small[0], small[1]), Image.Resampling.BOX)
        return coarse.resize(image.size, Image.Resampling.BICUBIC)
    return image
