"""Prepares source images for models, and encodes results in the requested format.

The work is done in separate processes (api/inputs/codec_pool.py). This process never decodes an
image.
"""

from __future__ import annotations

import asyncio
import binascii
from typing import Literal, NamedTuple

from api.inputs.codec_pool import CodecPool
from api.inputs.codec_protocol import (
    UNPADDED,
    CompareImages,
    EncodeImage,
    ImagesCompared,
    MaskPrepared,
    Padding,
    PrepareMask,
    PrepareSource,
    SourceLimits,
    SourcePrepared,
)
from shared.errors import BadInput, PenstockError
from shared.models.blob import Blob
from shared.models.image_entry import ImageDefaults
from shared.predictions import MEDIA_TYPES

DEFAULT_QUALITY = 90
REFERENCE_SIDE = 1024
"""Side length of a square with a reference image's maximum pixel count. Encoders read 224 x 224
pixels.
"""
COMPARER = "penstock-canary"
"""The tenant under which comparisons are queued."""
BASE64_CHUNK = 256 * 1024
"""Number of characters to decode at a time, because 20 MB at once would block the event loop for 45
ms. Must be a multiple of 4.
"""


class PreparedSource(NamedTuple):
    """A source image in the form models expect."""

    image: Blob
    size: tuple[int, int]
    """Width and height in pixels."""
    file_size: tuple[int, int]
    """Width and height of the upright image in the file."""


class ImageCodec:
    """Converts images in `pool`'s processes."""

    def __init__(self, pool: CodecPool) -> None:
        self._pool = pool

    async def prepare_source(
        self,
        data: bytes,
        size: tuple[int, int] | None,
        defaults: ImageDefaults,
        deadline_s: float,
        *,
        tenant: str,
        padding: Padding = UNPADDED,
        field: str = "image",
    ) -> PreparedSource:
        """Returns a source image in the form models expect: an upright RGB PNG at the output size.

        Args:
            data: a file in one of the formats listed in codec_server.py.
            size: output width and height in pixels. None means a size with the source's aspect
                ratio and the model's default pixel count.
            deadline_s: Unix time at which to stop the work.
            tenant: the tenant who sent the file. Tenants take turns.
            padding: padding to add around the image, filled with the image's edge pixels. It is
                part of `size`, but is added to the default pixel count.

        Raises:
            BadInput: the file is not an image in a supported format, or is damaged.
            InputTooLarge: according to its header, the image has too many pixels. Nothing is
                decoded.
            Overloaded: too many images are waiting to be decoded.
            DeadlineExceeded: the work was not finished in time.
        """
        limits = SourceLimits(
            defaults.width, defaults.height, defaults.multiple, defaults.largest_pixels
        )
        command = PrepareSource(size, limits, padding)
        return await self._run_prepare(command, data, deadline_s, tenant, field)

    async def prepare_reference(
        self, data: bytes, deadline_s: float, *, tenant: str, field: str
    ) -> Blob:
        """Returns a reference image: an upright RGB PNG, shrunk if it is over 1 megapixel.

        Args:
            data: a file in one of the formats listed in codec_server.py.
            deadline_s: Unix time at which to stop the work.
            tenant: the tenant who sent the file. Tenants take turns.

        Raises:
            PenstockError: as raised by `prepare_source`.
        """
        limits = SourceLimits(
            REFERENCE_SIDE, REFERENCE_SIDE, 1, REFERENCE_SIDE * REFERENCE_SIDE, enlarges=False
        )
        command = PrepareSource(None, limits)
        return (await self._run_prepare(command, data, deadline_s, tenant, field)).image

    async def _run_prepare(
        self, command: PrepareSource, data: bytes, deadline_s: float, tenant: str, field: str
    ) -> PreparedSource:
        try:
            reply, png = await self._pool.run(
                command, data, tenant=tenant, deadline_s=deadline_s, is_new=True
            )
        except BadInput as error:
            wrong = error.field or field
            raise type(error)(f"{wrong}: {error.message}", field=wrong) from error
        if not isinstance(reply, SourcePrepared):
            raise PenstockError(f"a codec process returned {type(reply).__name__}; this is a bug")
        size = reply.width, reply.height
        return PreparedSource(Blob(MEDIA_TYPES["png"], data=png), size, reply.file_size)

    async def prepare_mask(
        self,
        data: bytes,
        source: PreparedSource,
        redraws: Literal["transparent", "white"],
        blur: float,
        deadline_s: float,
        *,
        tenant: str,
        padding: Padding = UNPADDED,
    ) -> Blob:
        """Returns a source's mask as models expect it: an upright gray PNG at the output size.

        255 redraws, 0 keeps the source, and values in between blend the two.

        Args:
            data: a file in one of the formats listed in codec_server.py, with the same dimensions
                as the source file. If empty, only the padding is redrawn.
            source: the source image to which the mask applies.
            blur: how far the edge is softened inward, as the standard deviation of a Gaussian, in
                pixels.
            deadline_s: Unix time at which to stop the work.
            tenant: the tenant who sent the file. Tenants take turns.
            padding: the source's padding, which is always redrawn.

        Raises:
            BadInput: the file is not in a supported image format, has different dimensions, or
                leaves nothing to redraw.
            InputTooLarge: as in `prepare_source`, which also describes Overloaded,
                DeadlineExceeded, and Unavailable.
        """
        command = PrepareMask(source.size, source.file_size, redraws, blur, padding)
        try:
            reply, png = await self._pool.run(
                command, data, tenant=tenant, deadline_s=deadline_s, is_new=True
            )
        except BadInput as error:
            raise type(error)(f"mask: {error.message}", field="mask") from error
        if not isinstance(reply, MaskPrepared):
            raise PenstockError(f"a codec process returned {type(reply).__name__}; this is a bug")
        return Blob(MEDIA_TYPES["png"], data=png)

    async def encode(
        self,
        png: bytes,
        output_format: str,
        quality: int | None,
        deadline_s: float,
        *,
        is_new: bool,
        tenant: str = "",
    ) -> bytes:
        """Returns a result in the requested format. Workers return PNG, which needs no conversion.

        Args:
            png: the image from the worker.
            quality: 0 to 100, for jpeg and webp.
            deadline_s: Unix time at which to stop the work.
            is_new: True if the call may be rejected. The current request's results must not be
                rejected.
            tenant: the tenant whose turn this call uses. All unknown callers share the empty
                tenant.

        Raises:
            Overloaded: too many images are waiting to be encoded.
            DeadlineExceeded: the work was not finished in time.
        """
        if output_format == "png":
            return png
        command = EncodeImage(output_format, DEFAULT_QUALITY if quality is None else quality)
        return await self._run_encode(command, png, deadline_s, tenant, is_new=is_new)

    async def enlarge(
        self,
        preview: bytes,
        output_format: str,
        quality: int | None,
        deadline_s: float,
        *,
        size: tuple[int, int],
        tenant: str,
    ) -> bytes:
        """Converts a preview, which is a small WebP, to the requested format and size.

        Raises the same errors as `encode`.
        """
        command = EncodeImage(output_format, DEFAULT_QUALITY if quality is None else quality, size)
        return await self._run_encode(command, preview, deadline_s, tenant, is_new=False)

    async def _run_encode(
        self, command: EncodeImage, data: bytes, deadline_s: float, tenant: str, *, is_new: bool
    ) -> bytes:
        try:
            _, encoded = await self._pool.run(
                command, data, tenant=tenant, deadline_s=deadline_s, is_new=is_new
            )
        except BadInput as error:  # not the caller's fault
            raise PenstockError(
                f"a worker returned an invalid image: {error.message}; this is a bug"
            ) from error
        return encoded

    async def psnr_db(self, ours: bytes, theirs: bytes, deadline_s: float) -> float:
        """Returns the peak signal-to-noise ratio of two PNGs, in dB.

        Returns 100 if they are identical.

        Args:
            deadline_s: Unix time at which to stop the work.

        Raises:
            PenstockError: a file is not a PNG, there is not enough time, or no process is
                available.
        """
        command, both = CompareImages(len(ours)), ours + theirs
        reply, _ = await self._pool.run(
            command, both, tenant=COMPARER, deadline_s=deadline_s, is_new=True
        )
        if not isinstance(reply, ImagesCompared):
            raise PenstockError(f"a codec process returned {type(reply).__name__}; this is a bug")
        return reply.psnr_db


async def data_of_uri(uri: str, where: str, *, field: str) -> bytes:
    """Decodes a base64 data: URI (RFC 2397). Errors refer to the URI using `where` and `field`.

    The base64 may be wrapped across lines, and padding may be missing because many encoders omit
    it.

    Raises:
        BadInput: the URI is not a base64 data: URI.
    """
    header, comma, text = uri.partition(",")
    if not comma or not header.startswith("data:") or not header.lower().endswith(";base64"):
        raise BadInput(f"{where}: must be a base64 data: URI", field=field)
    chunks, rest, text = [], "", text.rstrip()
    try:
        if 0 <= text.find("=") < len(text) - 2:
            raise ValueError("padding before the end of the data")
        for start in range(0, len(text), BASE64_CHUNK):
            rest += "".join(text[start : start + BASE64_CHUNK].split())
            whole = len(rest) // 4 * 4
            chunks.append(binascii.a2b_base64(rest[:whole], strict_mode=True))
            rest = rest[whole:]
            if len(text) > BASE64_CHUNK:
                await asyncio.sleep(0)
        padding = "=" * (-len(rest) % 4) if len(rest) > 1 and "=" not in rest else ""
        chunks.append(binascii.a2b_base64(rest + padding, strict_mode=True))
    except ValueError as error:
        raise BadInput(f"{where}: not valid base64: {error}", field=field) from error
    return b"".join(chunks)
