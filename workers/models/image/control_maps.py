"""Makes the maps of ControlNets of callers' pictures, in the I/O process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from PIL import Image

from shared.catalog_entry import Control
from shared.errors import BadInput
from shared.tasks.image import ControlInput
from workers.models.base import PreparedImage


def with_control(
    item: PreparedImage, control: ControlInput, pixels: bytes, known: Mapping[str, Control]
) -> PreparedImage:
    """Returns the item with its control, and the map of its picture.

    Args:
        item: without a control.
        control: of the request.
        pixels: its picture in RGB, of the size of the item.
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
    picture = Image.frombytes("RGB", (item.width, item.height), pixels)
    return msgspec.structs.replace(
        item,
        control=control.name,
        control_map=map_of(picture, entry).tobytes(),
        control_scale=control.scale,
        control_start=control.start,
        control_end=control.end,
    )


def map_of(picture: Image.Image, entry: Control) -> Image.Image:
    """Returns the map of a picture for a ControlNet, in RGB and of the same size."""
    if entry.preprocessor == "canny":
        # SciPy takes a tenth of a second to import, and only this needs it.
        from workers.models.image.canny import edges

        found = edges(np.asarray(picture), entry.canny_low, entry.canny_high)
        return Image.fromarray(found).convert("RGB")
    if entry.preprocessor == "tile" and entry.tile_factor > 1:
        small = [max(1, round(side / entry.tile_factor)) for side in picture.size]
        coarse = picture.resize((small[0], small[1]), Image.Resampling.BOX)
        return coarse.resize(picture.size, Image.Resampling.BICUBIC)
    return picture
