"""The messages between the API and a codec process: MessagePack, then the bytes of an image.

A frame has two lengths in bytes (unsigned 32-bit, little-endian), one of the structs below, and the
bytes of an image, which are never copied into a struct. The API sends a command (PrepareSource,
PrepareMask, EncodeImage or CompareImages). The process answers HeaderRead, waits for Proceed, which
comes once there is room for the image, and answers SourcePrepared, MaskPrepared, ImageEncoded or
ImagesCompared. CodecError may replace each of its answers.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

LENGTHS = struct.Struct("<II")

Padding = tuple[int, int, int, int]
"""Pixels of the output, to the left, above, to the right and below."""
UNPADDED: Padding = (0, 0, 0, 0)

_encode = msgspec.msgpack.Encoder().encode


class SourceLimits(msgspec.Struct):
    """The bounds of a model on the size of a source. `width` x `height` is its default size.

    `enlarges`: whether a smaller source gets as many pixels as that.
    """

    width: int
    height: int
    multiple: int
    largest_pixels: int
    enlarges: bool = True


class PrepareSource(msgspec.Struct, tag="prepare"):
    """Make a source image of the file.

    Without `size` it keeps its aspect ratio, within `limits`. `padding` goes around it, filled with
    the pixels of its edge, and is a part of `size`.
    """

    size: tuple[int, int] | None
    limits: SourceLimits
    padding: Padding = UNPADDED


class PrepareMask(msgspec.Struct, tag="mask"):
    """Make a mask of the file, for a source image that was prepared.

    Without a file only the source's `padding` is masked.

    `redraws`: what is drawn anew, in proportion: what is `transparent`, or what is `white`. `blur`:
    pixels of the output, the standard deviation of a Gaussian. Its edge is blurred inwards.
    """

    size: tuple[int, int]
    """The output width and height."""
    file_size: tuple[int, int]
    """The width and height of the upright source image."""
    redraws: Literal["transparent", "white"]
    blur: float
    padding: Padding = UNPADDED


class EncodeImage(msgspec.Struct, tag="encode"):
    """Convert the PNG or WebP to `output_format`, in another `size` if there is one."""

    output_format: str
    quality: int
    size: tuple[int, int] | None = None


class CompareImages(msgspec.Struct, tag="compare"):
    """Compare two PNGs. The first has `first_bytes` bytes, and the second follows it."""

    first_bytes: int


class Proceed(msgspec.Struct, tag="go"):
    """There is room in the memory budget: decode now."""


class HeaderRead(msgspec.Struct, tag="opened"):
    """The image header was read. Decoding takes up to `cost_bytes` of memory."""

    cost_bytes: int


class SourcePrepared(msgspec.Struct, tag="prepared"):
    """The source image follows, a PNG of this size. `file_size` is what it had upright."""

    width: int
    height: int
    file_size: tuple[int, int]


class MaskPrepared(msgspec.Struct, tag="masked"):
    """The mask follows, a gray PNG: 255 is drawn anew, and 0 is the source's own."""


class ImageEncoded(msgspec.Struct, tag="encoded"):
    """The image follows, in the requested format."""


class ImagesCompared(msgspec.Struct, tag="compared"):
    """Peak signal-to-noise ratio of the images, in dB. 100 if equal, 0 if sizes differ."""

    psnr_db: float


class CodecError(msgspec.Struct, tag="refused"):
    """The file was refused: the reason, and its error code as in shared/errors.py.

    `field`: of the command, if the file is not the reason.
    """

    code: str
    reason: str
    field: str | None = None


CodecCommand = PrepareSource | PrepareMask | EncodeImage | CompareImages
CodecRequest = PrepareSource | PrepareMask | EncodeImage | CompareImages | Proceed
CodecReply = HeaderRead | SourcePrepared | MaskPrepared | ImageEncoded | ImagesCompared | CodecError

decode_request = msgspec.msgpack.Decoder(CodecRequest).decode
decode_reply = msgspec.msgpack.Decoder(CodecReply).decode


def frame_header(frame: CodecRequest | CodecReply, data_bytes: int = 0) -> bytes:
    """Returns a frame without the `data_bytes` bytes of its image."""
    encoded = _encode(frame)
    return LENGTHS.pack(len(encoded), data_bytes) + encoded
