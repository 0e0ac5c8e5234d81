"""Pictures that come in and go out: source images are checked and brought to size, results to the format asked for.

Both happen in threads (decoding takes milliseconds to a second), few at a time, since a decoded picture is large.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import zlib
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from PIL import Image, ImageOps

from shared.catalogue import ImageDefaults
from shared.errors import BadInput, InputTooLarge
from shared.messages import Blob

SOURCE_LIMIT_PIXELS = 25_000_000
"""Decoded, such a picture takes 75 to 100 MB."""
SOURCE_FORMATS = ("PNG", "JPEG", "WEBP")
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
USUAL_QUALITY = 90
# What Pillow's decoders raise on broken data, each in its own way.
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
T = TypeVar("T")

# Pillow's own bound only warns at first, and it does so while the header is read; ours refuses right after that.
Image.MAX_IMAGE_PIXELS = None


class Studio:
    """Does the work on pictures, `at_once` of them at a time."""

    def __init__(self, at_once: int = 2) -> None:
        self._limiter = CapacityLimiter(at_once)

    async def prepare_source(
        self, data: bytes, size: tuple[int, int] | None, defaults: ImageDefaults
    ) -> tuple[Blob, tuple[int, int]]:
        """A source image as the model takes it: upright, RGB, PNG, and of the size to draw.

        Args:
            data: a PNG, JPEG or WebP file.
            size: width and height to draw in pixels; None: the source's shape with as many pixels as the model's usual.
            defaults: of the model.

        Returns:
            The picture, and its (width, height).

        Raises:
            BadInput: it is no such picture, or broken.
            InputTooLarge: it has more than SOURCE_LIMIT_PIXELS; told from its header, nothing is decoded.
        """
        return await self._work(lambda: _prepare_source(data, size, defaults))

    async def encode(self, png: bytes, output_format: str, quality: int | None) -> bytes:
        """A result in the format asked for; PNG is what workers give and passes as it is."""
        if output_format == "png":
            return png
        return await self._work(lambda: _encode(png, output_format, quality))

    async def _work(self, work: Callable[[], T]) -> T:
        return await to_thread.run_sync(work, limiter=self._limiter)


def data_of_uri(uri: str, where: str, *, field: str) -> bytes:
    """The bytes of a data: URI (RFC 2397) in base64; `where` and `field` name it in errors.

    Raises:
        BadInput: it is none.
    """
    header, comma, text = uri.partition(",")
    if not comma or not header.startswith("data:") or not header.endswith(";base64"):
        raise BadInput(f"{where}: only data: URIs with ;base64 are taken", field=field)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"{where}: not base64: {error}", field=field) from error


def _prepare_source(data: bytes, size: tuple[int, int] | None, defaults: ImageDefaults) -> tuple[Blob, tuple[int, int]]:
    try:
        with Image.open(io.BytesIO(data), formats=SOURCE_FORMATS) as opened:
            if opened.width * opened.height > SOURCE_LIMIT_PIXELS:
                limit = f"{SOURCE_LIMIT_PIXELS // 1_000_000} megapixels is the most"
                raise InputTooLarge(f"image: {opened.width}x{opened.height} pixels, and {limit}", field="image")
            ImageOps.exif_transpose(opened, in_place=True)
            target = size or size_like(opened.width, opened.height, defaults)
            drawn = _flat(opened).resize(target, Image.Resampling.LANCZOS)
    except _UNDECODABLE as error:
        raise BadInput("image: not a PNG, JPEG or WebP picture, or a broken one", field="image") from error
    return Blob(MEDIA_TYPES["png"], data=_saved(drawn, "png", compress_level=1)), target


def size_like(width: int, height: int, defaults: ImageDefaults) -> tuple[int, int]:
    """The source's shape at the model's usual number of pixels, in the multiples the model needs."""
    scale = math.sqrt(defaults.width * defaults.height / (width * height))
    step, most = defaults.multiple, defaults.largest_pixels

    def fitted(length: int, longest: int) -> int:
        return max(step, min(round(length * scale), longest) // step * step)

    fitted_width = fitted(width, most // step)
    return fitted_width, fitted(height, most // fitted_width)


def _flat(picture: Image.Image) -> Image.Image:
    """Without transparency: laid on white, as a viewer shows it."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _encode(png: bytes, output_format: str, quality: int | None) -> bytes:
    with Image.open(io.BytesIO(png), formats=("PNG",)) as picture:
        return _saved(picture.convert("RGB"), output_format, quality=USUAL_QUALITY if quality is None else quality)


def _saved(picture: Image.Image, output_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, output_format, **options)
    return buffer.getvalue()
