"""Pictures that come in and go out: source images are checked and brought to size, results to the format asked for.

The work is done in processes of its own (api/inputs/codec_pool.py): this one never decodes a picture.
"""

from __future__ import annotations

import asyncio
import binascii

from api.inputs.codec_pool import PicturePool
from api.inputs.codec_protocol import Encode, Limits, Prepare, Prepared
from shared.blob import Blob
from shared.catalog_entry import ImageDefaults
from shared.errors import BadInput, PenstockError

MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
USUAL_QUALITY = 90
BASE64_PIECE = 256 * 1024
"""Characters decoded without a pause: 20 MB in one go would hold the event loop for 45 ms. A multiple of four."""


class Studio:
    """Has the work on pictures done by `pool`."""

    def __init__(self, pool: PicturePool) -> None:
        self._pool = pool

    async def prepare_source(
        self, data: bytes, size: tuple[int, int] | None, defaults: ImageDefaults, deadline_s: float
    ) -> tuple[Blob, tuple[int, int]]:
        """A source image as the model takes it: upright, RGB, PNG, and of the size to draw.

        Args:
            data: a PNG, JPEG or WebP file.
            size: width and height to draw in pixels; None: the source's shape with as many pixels as the model's usual.
            defaults: of the model.
            deadline_s: Unix time until which it is worth the work.

        Returns:
            The picture, and its (width, height).

        Raises:
            BadInput: it is no such picture, or broken.
            InputTooLarge: it has too many pixels; told from its header, nothing is decoded.
            Overloaded: too many wait to be decoded.
            DeadlineExceeded: it was not done in time.
            Unavailable: the process that had it died.
        """
        limits = Limits(defaults.width, defaults.height, defaults.multiple, defaults.largest_pixels)
        try:
            answer, png = await self._pool.run(Prepare(size, limits), data, deadline_s=deadline_s, is_new=True)
        except BadInput as error:
            raise type(error)(f"image: {error.message}", field="image") from error
        if not isinstance(answer, Prepared):
            raise PenstockError(f"a picture process answered {type(answer).__name__}; this is a bug")
        return Blob(MEDIA_TYPES["png"], data=png), (answer.width, answer.height)

    async def encode(
        self, png: bytes, output_format: str, quality: int | None, deadline_s: float, *, is_new: bool
    ) -> bytes:
        """A result in the format asked for; PNG is what workers give and passes as it is.

        Args:
            png: as a worker gave it.
            output_format: a key of MEDIA_TYPES.
            quality: of jpeg and webp, 0 to 100.
            deadline_s: Unix time until which it is worth the work.
            is_new: it may be asked for again; what was drawn for this request may not be refused.

        Raises:
            Overloaded: too many wait to be encoded.
            DeadlineExceeded: it was not done in time.
            Unavailable: the process that had it died.
        """
        if output_format == "png":
            return png
        order = Encode(output_format, USUAL_QUALITY if quality is None else quality)
        try:
            _, encoded = await self._pool.run(order, png, deadline_s=deadline_s, is_new=is_new)
        except BadInput as error:
            raise PenstockError(f"a worker gave what is no PNG: {error.message}; this is a bug") from error
        return encoded


async def data_of_uri(uri: str, where: str, *, field: str) -> bytes:
    """The bytes of a data: URI (RFC 2397) in base64; `where` and `field` name it in errors.

    Raises:
        BadInput: it is none.
    """
    header, comma, text = uri.partition(",")
    if not comma or not header.startswith("data:") or not header.endswith(";base64"):
        raise BadInput(f"{where}: only base64 data: URIs are accepted", field=field)
    pieces = []
    try:
        if 0 <= text.find("=") < len(text) - 2:
            raise ValueError("padding before the end")
        for start in range(0, len(text), BASE64_PIECE):
            pieces.append(binascii.a2b_base64(text[start : start + BASE64_PIECE], strict_mode=True))
            if len(text) > BASE64_PIECE:
                await asyncio.sleep(0)
    except ValueError as error:
        raise BadInput(f"{where}: not valid base64: {error}", field=field) from error
    return b"".join(pieces)
