"""The messages between the API and a picture process on their socket: MessagePack, then the picture's bytes.

A frame is two lengths in bytes (unsigned 32-bit, little-endian), then one of the structs below, then the bytes of a
picture, which are never copied into a struct. To the process go an order (Prepare or Encode) and, once there is room
for what it costs, Go; from it come Opened, and then Prepared, Encoded or Refused. Refused may come instead of Opened.
"""

from __future__ import annotations

import struct

import msgspec

LENGTHS = struct.Struct("<II")


class Limits(msgspec.Struct):
    """What a model draws, as far as it decides about the size of a source: `width` x `height` is its usual."""

    width: int
    height: int
    multiple: int
    largest_pixels: int


class Prepare(msgspec.Struct, tag="prepare"):
    """Make a source image out of the file behind this; without `size`, in its own shape within `limits`."""

    size: tuple[int, int] | None
    limits: Limits


class Encode(msgspec.Struct, tag="encode"):
    """Turn the PNG behind this into `output_format`."""

    output_format: str
    quality: int


class Go(msgspec.Struct, tag="go"):
    """There is room for it: decode."""


class Opened(msgspec.Struct, tag="opened"):
    """The header was read; decoding will take so many bytes of memory."""

    cost_bytes: int


class Prepared(msgspec.Struct, tag="prepared"):
    """The source image, a PNG of this size, is behind this."""

    width: int
    height: int


class Encoded(msgspec.Struct, tag="encoded"):
    """The picture in the format asked for is behind this."""


class Refused(msgspec.Struct, tag="refused"):
    """The file is none that is taken: why, and the code of shared/errors.py for it."""

    code: str
    reason: str


Order = Prepare | Encode
Asked = Prepare | Encode | Go
Answer = Opened | Prepared | Encoded | Refused

decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
_encode = msgspec.msgpack.Encoder().encode


def head_of(frame: Asked | Answer, data_bytes: int = 0) -> bytes:
    """All of a frame but the picture's bytes, of which there are `data_bytes`."""
    encoded = _encode(frame)
    return LENGTHS.pack(len(encoded), data_bytes) + encoded
