"""Messages between the API and a codec process: MessagePack followed by image data.

A frame consists of two lengths in bytes (unsigned 32-bit, little-endian), one of the structs below,
and the image data, which is never copied into a struct. The API sends a command (PrepareSource,
PrepareMask, EncodeImage, or CompareImages). The process replies with HeaderRead and waits for
Proceed, which is sent once there is room for the image. It then replies with SourcePrepared,
MaskPrepared, ImageEncoded, or ImagesCompared. CodecError may replace any of these replies.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

LENGTHS = struct.Struct("<II")

Padding = tuple[int, int, int, int]
"""Number of output pixels to add on the left, top, right, and bottom."""
UNPADDED: Padding = (0, 0, 0, 0)

_encode = msgspec.msgpack.Encoder().encode


class SourceLimits(msgspec.Struct):
    """A model's limits on source image size. `width` x `height` is the default size.

    `enlarges`: whether smaller sources are enlarged to the default number of pixels.
    """

    width: int
    height: int
    multiple: int
    largest_pixels: int
    enlarges: bool = True


class PrepareSource(msgspec.Struct, tag="prepare"):
    """Creates a source image from the file.

    Without `size`, the aspect ratio is kept, subject to `limits`. `padding` is added around the
    image, is filled with the image's edge pixels, and is part of `size`.
    """

    size: tuple[int, int] | None
    limits: SourceLimits
    padding: Padding = UNPADDED


class PrepareMask(msgspec.Struct, tag="mask"):
    """Creates a mask from the file, for a source image that has already been prepared.

    Without a file, only the source's `padding` is masked.

    `redraws`: which pixels to redraw, `transparent` or `white`, in proportion to how transparent or
    white they are. `blur`: standard deviation, in output pixels, of the Gaussian that blurs the
    mask's edge inward.
    """

    size: tuple[int, int]
    """Output width and height."""
    file_size: tuple[int, int]
    """The upright source image's width and height."""
    redraws: Literal["transparent", "white"]
    blur: float
    padding: Padding = UNPADDED


class EncodeImage(msgspec.Struct, tag="encode"):
    """Converts the PNG or WebP to `output_format`, and resizes it to `size` if set."""

    output_format: str
    quality: int
    size: tuple[int, int] | None = None


class CompareImages(msgspec.Struct, tag="compare"):
    """Compares two PNGs. The first image is `first_bytes` bytes long, and the second follows it."""

    first_bytes: int


class Proceed(msgspec.Struct, tag="go"):
    """There is room in the memory budget: decode now."""


class HeaderRead(msgspec.Struct, tag="opened"):
    """The image header was read. Decoding takes up to `cost_bytes` of memory."""

    cost_bytes: int


class SourcePrepared(msgspec.Struct, tag="prepared"):
    """The source image follows: a PNG of this size.

    `file_size` is the upright size of the image in the file.
    """

    width: int
    height: int
    file_size: tuple[int, int]


class MaskPrepared(msgspec.Struct, tag="masked"):
    """The mask follows: a gray PNG in which 255 means redraw and 0 means keep the source."""


class ImageEncoded(msgspec.Struct, tag="encoded"):
    """The image follows, in the requested format."""


class ImagesCompared(msgspec.Struct, tag="compared"):
    """The images' peak signal-to-noise ratio, in dB. 100 if equal, 0 if their sizes differ."""

    psnr_db: float


class CodecError(msgspec.Struct, tag="refused"):
    """The file was rejected, for this reason and with this error code, as in shared/errors.py.

    `field`: the command field that caused the error, or None if the file caused it.
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
    """Returns a frame, except for its `data_bytes` bytes of image data."""
    encoded = _encode(frame)
    return LENGTHS.pack(len(encoded), data_bytes) + encoded
