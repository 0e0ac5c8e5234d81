"""Checks and prepares image requests in the I/O process.

A source image is decoded and resized once. A ControlNet's map is computed from the caller's image.
ControlNets for edges are trained with OpenCV's `Canny`. Workers don't include OpenCV, because it
would add 60 MB for this purpose alone. The edges computed here match OpenCV's bit for bit.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from scipy import ndimage

from shared.errors import BadInput, InputTooLarge, ModelFailed
from shared.models.blob import Blob
from shared.models.image_entry import MAX_IP_ADAPTER_SCALE, Control, ImageDefaults
from shared.models.schedulers import SCHEDULER_NAMES, SCHEDULERS
from shared.models.tasks import Input
from shared.models.tasks.image import ControlInput, ImageInput, IpAdapterInput
from workers.models.base import PreparedControl, PreparedImage

_TAN_22 = 13573
"""tan(22.5°) times 2^15."""
_ALL_AROUND = np.ones((3, 3), bool)

SOURCE_FORMATS = ("PNG", "JPEG", "WEBP")
SOURCE_MAX_PIXELS = 16 * 1024 * 1024
"""Maximum number of pixels in a source image before it is resized: 48 MB when decoded."""
DEFAULT_STRENGTH = 0.8
SEED_LIMIT = 2**63
_MAX_RESIZED = 8
"""Maximum aspect ratio of an image. Beyond that ratio, the far ends are cropped."""


def edges(pixels: npt.NDArray[np.uint8], low: int, high: int) -> npt.NDArray[np.uint8]:
    """Returns 255 on edges and 0 elsewhere, [height, width].

    Follows J. Canny, A Computational Approach to Edge Detection, 1986. Gradients are Sobel
    gradients, from the channel with the largest gradient. A gradient that is the largest across its
    edge is kept if it is above `high`, or if it is above `low` and connected to a pixel that is.

    Args:
        pixels: image as [height, width, channels].
        low: threshold for |dx| + |dy|, in levels: 0 to 2040.
        high: same unit and range as `low`.
    """
    values = np.pad(pixels.astype(np.int32), ((1, 1), (1, 1), (0, 0)), "edge")
    columns = values[:-2] + 2 * values[1:-1] + values[2:]
    rows = values[:, :-2] + 2 * values[:, 1:-1] + values[:, 2:]
    across, down = columns[:, 2:] - columns[:, :-2], rows[2:] - rows[:-2]
    sizes = np.abs(across) + np.abs(down)
    channel = sizes.argmax(axis=2)[..., None]
    x, y, size = (
        np.take_along_axis(part, channel, axis=2)[..., 0] for part in (across, down, sizes)
    )
    thin = (size > low) & _is_largest(x, y, np.pad(size, 1))
    labels, _ = ndimage.label(thin, _ALL_AROUND)
    is_kept = np.bincount(labels[size > high], minlength=labels.max() + 1) > 0
    is_kept[0] = False
    return np.where(is_kept[labels], 255, 0).astype(np.uint8)


def _is_largest(
    x: npt.NDArray[np.int32], y: npt.NDArray[np.int32], padded: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Returns whether a gradient is the largest along its direction (to the nearest 45 degrees)."""
    height, width = x.shape

    def beside(down: int, right: int) -> npt.NDArray[np.int32]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    size, flat = beside(0, 0), np.abs(x).astype(np.int64) * _TAN_22
    steep, tall = flat + (np.abs(x).astype(np.int64) << 16), np.abs(y).astype(np.int64) << 15
    falls = (x ^ y) >= 0
    diagonal = np.where(
        falls,
        (size > beside(-1, -1)) & (size > beside(1, 1)),
        (size > beside(-1, 1)) & (size > beside(1, -1)),
    )
    level = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    return np.where(tall < flat, level, np.where(tall > steep, upright, diagonal))


def prepare_control(
    control: ControlInput, width: int, height: int, known: Mapping[str, Control]
) -> PreparedControl:
    """Creates a control's map.

    Args:
        width: width of the image to draw, in pixels.
        height: height of the image to draw, in pixels.
        known: the model's controls, keyed by name.

    Raises:
        BadInput: the model doesn't have the control, the control's image can't be read, or the
            control does not guide any of the steps.
    """
    entry = known.get(control.name)
    if entry is None:
        names = ", ".join(known) or "none"
        raise BadInput(f"unknown control {control.name!r}; use one of {names}", field="control")
    if not 0 <= control.start < control.end <= 1:
        raise BadInput(
            f"control_guidance_start ({control.start}) must be less than "
            f"control_guidance_end ({control.end}), and both must be from 0 to 1",
            field="control_guidance_start",
        )
    pixels = _read_source(control.image, width, height, "control_image")
    control_map = map_of(Image.frombytes("RGB", (width, height), pixels), entry).tobytes()
    return PreparedControl(control.name, control_map, control.scale, control.start, control.end)


def map_of(image: Image.Image, entry: Control) -> Image.Image:
    """Returns an image's map for a ControlNet, in RGB and at the same size."""
    if entry.preprocessor == "canny":
        outline = edges(np.asarray(image), entry.canny_low, entry.canny_high)
        return Image.fromarray(outline).convert("RGB")
    if entry.preprocessor == "tile" and entry.tile_factor > 1:
        small = [max(1, round(side / entry.tile_factor)) for side in image.size]
        coarse = image.resize((small[0], small[1]), Image.Resampling.BOX)
        return coarse.resize(image.size, Image.Resampling.BICUBIC)
    return image


class ImagePreparer:
    """Prepares ImageInput within the catalog's limits.

    Args:
        is_stepped: True if images with different sizes, steps, and schedulers are computed
            together.
        rounds_up: True if image-to-image rounds a fractional step up.
        sides_px: side of the square that each IP-Adapter's image encoder reads, keyed by adapter
            name.
    """

    def __init__(
        self,
        bounds: ImageDefaults,
        *,
        is_stepped: bool = False,
        rounds_up: bool = False,
        sides_px: Mapping[str, int] | None = None,
    ) -> None:
        self._bounds = bounds
        self._is_stepped = is_stepped
        self._rounds_up = rounds_up
        self._sides_px = sides_px or {}

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedImage | BadInput | ModelFailed]:
        """Returns one outcome per input, in order. A BadInput names the invalid field."""
        return [self._outcome(value) for value in inputs]

    def _outcome(self, value: Input) -> PreparedImage | BadInput | ModelFailed:
        try:
            if not isinstance(value, ImageInput):
                raise BadInput(
                    "the input to an image model must be an image request", field="input"
                )
            self._check(value)
            item = self._prepare_checked(value)
            known = self._bounds.controls
            item.controls = [
                prepare_control(control, value.width, value.height, known)
                for control in value.controls
            ]
            if value.ip_adapter is not None:
                item = self._with_ip_adapter(item, value.ip_adapter)
            return item
        except (BadInput, ModelFailed) as error:
            return error

    def _strength_of(self, value: ImageInput) -> float | None:
        """Returns the strength for an item that has an image.

        None if the item's pipeline edits whole images.
        """
        if self._bounds.accepts("strength"):
            return DEFAULT_STRENGTH if value.strength is None else value.strength
        if value.strength is not None:
            raise BadInput("strength: is not supported by this model; omit it", field="strength")
        return None

    def _check_adapter(self, value: ImageInput) -> None:
        chosen = value.adapter
        if chosen is None:
            return
        if chosen.object_key:
            is_known = self._bounds.adapter_urls is not None
        else:
            known = self._bounds.adapters.get(chosen.name)
            is_known = known is not None and known.version == chosen.version
        if not is_known:
            raise _make_catalog_error("adapter", chosen.name, "lora_weights")

    def _with_ip_adapter(self, item: PreparedImage, chosen: IpAdapterInput) -> PreparedImage:
        known = self._bounds.ip_adapters.get(chosen.name)
        if known is None or known.version != chosen.version:
            raise _make_catalog_error("IP-Adapter", chosen.name, "ip_adapter")
        if not 0 <= chosen.scale <= MAX_IP_ADAPTER_SCALE:
            raise BadInput(
                f"ip_adapter_scale must be from 0 to {MAX_IP_ADAPTER_SCALE:g}, got {chosen.scale}",
                field="ip_adapter_scale",
            )
        image = _decode_image(chosen.image, "RGB", "ip_adapter_image")
        return msgspec.structs.replace(
            item,
            ip_adapter=chosen.name,
            ip_adapter_pixels=_square_of(image, self._sides_px[chosen.name]),
            ip_adapter_scale=chosen.scale,
        )

    def _check(self, value: ImageInput) -> None:
        bounds = self._bounds
        for name in ("width", "height"):
            side = getattr(value, name)
            if side < bounds.multiple or side % bounds.multiple:
                raise BadInput(
                    f"{name} must be a positive multiple of {bounds.multiple}, got {side}",
                    field=name,
                )
        if value.width * value.height > bounds.largest_pixels:
            raise InputTooLarge(
                f"{value.width} x {value.height} exceeds the maximum of "
                f"{bounds.largest_pixels} pixels",
                field="width",
            )
        self._check_adapter(value)
        _check_numbers(value, bounds)
        if value.scheduler not in SCHEDULER_NAMES:
            known = ", ".join(SCHEDULER_NAMES)
            raise BadInput(
                f"unknown scheduler {value.scheduler!r}; use one of {known}", field="scheduler"
            )
        choice = SCHEDULERS.get(value.scheduler)
        if choice is not None and choice.steps_max is not None and value.steps > choice.steps_max:
            raise BadInput(
                f"scheduler {value.scheduler!r} supports at most {choice.steps_max} steps",
                field="steps",
            )

    def _prepare_checked(self, value: ImageInput) -> PreparedImage:
        strength = source = mask = None
        steps_run = value.steps
        if value.mask is not None:
            mask = _read_mask(value)
        if value.image is not None:
            strength = self._strength_of(value)
            if strength is not None:
                steps_run = image_to_image_steps(value.steps, strength, rounds_up=self._rounds_up)
            source = _read_source(value.image, value.width, value.height)
        pixel_steps = value.width * value.height * steps_run
        return PreparedImage(
            # A whole batch finishes when its longest image does.
            key="" if self._is_stepped else f"{value.width}x{value.height}/{steps_run}",
            length=pixel_steps,
            # Each image runs its own steps, so only its pixels take up room in a shared batch.
            room=value.width * value.height * self._bounds.steps if self._is_stepped else 0,
            prompt=value.prompt,
            negative_prompt=value.negative_prompt,
            width=value.width,
            height=value.height,
            steps=value.steps,
            guidance_scale=value.guidance_scale,
            seed=value.seed,
            scheduler=value.scheduler,
            strength=strength,
            source=source,
            mask=mask,
            clip_skip=value.clip_skip or None,
            guidance_rescale=value.guidance_rescale,
            adapter="" if value.adapter is None else value.adapter.name,
            adapter_scale=1.0 if value.adapter is None else value.adapter.scale,
            adapter_key="" if value.adapter is None else value.adapter.object_key,
            adapter_owner="" if value.adapter is None else value.adapter.owner,
        )


def _make_catalog_error(noun: str, name: str, field: str) -> ModelFailed:
    # Otherwise, the result would be cached as the result for the file in the API's catalog.
    return ModelFailed(
        f"{noun} {name!r} differs between the catalogs of this worker and the API; try again later",
        field=field,
    )


def _square_of(image: Image.Image, side_px: int) -> bytes:
    """Returns the image's center as side x side RGB pixels, cropped the way CLIP does it."""
    short = min(image.size)
    # CLIP resizes the whole image first. A very long, narrow image would not fit in memory.
    near = _middle(image, *(min(side, short * _MAX_RESIZED) for side in image.size))
    width, height = (int(side_px * side / short) for side in near.size)
    resized = near.resize((width, height), Image.Resampling.BICUBIC)
    return _middle(resized, side_px, side_px).tobytes()


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left_px, above = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left_px, above, left_px + width, above + height))


def _check_numbers(value: ImageInput, bounds: ImageDefaults) -> None:
    if not 1 <= value.steps <= bounds.longest_steps:
        raise BadInput(
            f"steps must be from 1 to {bounds.longest_steps}, got {value.steps}", field="steps"
        )
    if not (math.isfinite(value.guidance_scale) and value.guidance_scale >= 0):
        raise BadInput(
            f"guidance_scale must be at least 0, got {value.guidance_scale}", field="guidance_scale"
        )
    if not 0 <= value.guidance_rescale <= 1:
        raise BadInput(
            f"guidance_rescale must be from 0 to 1, got {value.guidance_rescale}",
            field="guidance_rescale",
        )
    if value.clip_skip is not None and value.clip_skip < 0:
        raise BadInput(f"clip_skip must be at least 0, got {value.clip_skip}", field="clip_skip")
    if not 0 <= value.seed < SEED_LIMIT:
        raise BadInput(f"seed must be from 0 to 2^63 - 1, got {value.seed}", field="seed")


def image_to_image_steps(steps: int, strength: float, *, rounds_up: bool = False) -> int:
    """Returns how many steps image-to-image runs: `strength` times the number of steps.

    Args:
        steps: number of steps for an image drawn from text.
        strength: greater than 0 and at most 1.
        rounds_up: True if a fractional step counts as a whole one, as in diffusers' flow-matching
            pipelines. Other pipelines drop the fraction.

    Raises:
        BadInput: strength is not above 0 and at most 1, or is so low that no steps are left.
    """
    if not 0 < strength <= 1:
        raise BadInput(
            f"strength must be greater than 0 and at most 1, got {strength}", field="strength"
        )
    run = steps - int(max(steps - steps * strength, 0)) if rounds_up else int(steps * strength)
    if run < 1:
        raise BadInput(
            f"strength {strength} is too low: none of the {steps} steps would run",
            field="strength",
        )
    return run


def _read_source(blob: Blob, width: int, height: int, field: str = "image") -> bytes:
    """Returns a source image as width x height RGB pixels, rotated according to its EXIF data."""
    upright = _decode_image(blob, "RGB", field)
    if upright.size != (width, height):
        upright = upright.resize((width, height), Image.Resampling.LANCZOS)
    return upright.tobytes()


def _read_mask(value: ImageInput) -> bytes:
    """Returns an input's mask as width x height bytes."""
    if value.image is None or value.mask is None:
        raise BadInput("a mask requires an image", field="mask")
    mask = _decode_image(value.mask, "L", "mask")
    if mask.size != (value.width, value.height):
        raise BadInput("the mask and the image must have the same size", field="mask")
    if mask.getbbox() is None:
        raise BadInput("the mask leaves nothing to redraw", field="mask")
    return mask.tobytes()


def _decode_image(blob: Blob, mode: str, field: str) -> Image.Image:
    """Returns the image in a Pillow mode, rotated according to its EXIF data.

    Errors name the field.
    """
    if not blob.data:
        raise BadInput(f"the {field} has no data", field=field)
    try:
        with Image.open(io.BytesIO(blob.data), formats=SOURCE_FORMATS) as image:
            if image.width * image.height > SOURCE_MAX_PIXELS:
                raise Image.DecompressionBombError
            return ImageOps.exif_transpose(image).convert(mode)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputTooLarge(
            f"the {field} exceeds the maximum of {SOURCE_MAX_PIXELS} pixels", field=field
        ) from error
    except UnidentifiedImageError as error:
        raise BadInput(
            f"the {field} must be in one of these formats: {', '.join(SOURCE_FORMATS)}", field=field
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow's decoders raise these errors for damaged files, depending on where the damage is.
        raise BadInput(f"the {field} can't be decoded: {error}", field=field) from error
