"""`python -m api.inputs.codec_server`: decodes, resizes and encodes images for the API.

It handles one image at a time, over a socket. A thread is not enough: decoding can't be stopped in
a thread, holds the interpreter for up to a third of a second (alpha_composite, WebP), and may take
any amount of memory. This process can be killed at a deadline, has a lower priority than the event
loop, gets limits on memory and CPU time from the kernel, and has none of the API's settings or
secrets. It imports only Pillow and msgspec, so it starts within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable

from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

from api.inputs.codec_protocol import (
    LENGTHS,
    CodecCommand,
    CodecError,
    CodecReply,
    CodecRequest,
    HeaderRead,
    ImageEncoded,
    PrepareSource,
    Proceed,
    SourceLimits,
    SourcePrepared,
    decode_request,
    frame_header,
)

SOURCE_LIMIT_PIXELS = 25_000_000
SOURCE_FORMATS = ("PNG", "JPEG", "WEBP")
NICENESS = 10
"""The API's event loop goes first. Under contention this process still gets a tenth of a core."""
CPU_LIMIT_S = 20
"""For one image. 25 megapixels take 1 s, but a JPEG may have thousands of scans over all pixels."""
ADDRESS_SPACE_BYTES = 1024 * 1024 * 1024
"""The largest image takes 400 MB."""
REDUCING_GAP = 3
"""Images are averaged in boxes down to three times the target, then resampled, as for
thumbnails."""
STRIP_PIXELS = 1 << 18
"""How many pixels of the decoded image are flattened and reduced at a time."""
WORKING_BYTES = 24 * 1024 * 1024
"""The most memory for decoder, strips and encoder."""

# Pillow's own bound only warns at first. The bound here refuses right after the header was read.
Image.MAX_IMAGE_PIXELS = None


# The errors that Pillow's decoders raise on broken data.
_UNDECODABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_SMALL_MODES = {"1": 1, "L": 1, "P": 1, "I;16": 2}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


class _TooLargeError(Exception):
    """Too many pixels, or too much memory."""


class _HungUpError(Exception):
    """The API closed the socket."""


def main() -> int:
    """Serves the socket whose file descriptor is the argument, until the API closes it."""
    # The API handles signals to the process group (Ctrl-C, SIGTERM): it drains, then closes the
    # socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(_HungUpError, ConnectionError),
    ):
        while True:
            _serve_one(connection)
    return 0


def _serve_one(connection: socket.socket) -> None:
    def reserve(cost_bytes: int) -> None:
        _send(connection, HeaderRead(cost_bytes))
        if not isinstance(_read(connection)[0], Proceed):
            raise RuntimeError("only Proceed follows HeaderRead; this is a bug")

    command, data = _read(connection)
    if isinstance(command, Proceed):
        raise RuntimeError("Proceed follows HeaderRead only; this is a bug")
    _bound_cpu_time()
    _send(connection, *run_command(command, data, reserve))


def _bound_cpu_time() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_LIMIT_S, hard))


def run_command(
    command: CodecCommand, data: bytes, reserve: Callable[[int], None]
) -> tuple[CodecReply, bytes]:
    """Runs a command on the image in `data`. Calls `reserve` after reading the image header."""
    try:
        if isinstance(command, PrepareSource):
            source = _prepared(data, command, reserve)
            return SourcePrepared(*source.size), _saved(source, "png", compress_level=1)
        with _opened(data, ("PNG",)) as picture:
            reserve(_cost_bytes(picture, picture.size))
            return ImageEncoded(), _saved(
                picture.convert("RGB"), command.output_format, quality=command.quality
            )
    except (_TooLargeError, MemoryError) as error:
        return CodecError(
            "input_too_large", str(error) or "it takes more memory to decode than there is"
        ), b""
    except (_HungUpError, ConnectionError):
        raise
    except Exception as error:
        if not isinstance(error, _UNDECODABLE):
            traceback.print_exc()
        return CodecError("invalid_input", "not a PNG, JPEG or WebP picture, or a broken one"), b""


def _prepared(data: bytes, command: PrepareSource, reserve: Callable[[int], None]) -> Image.Image:
    """The image in `data`, upright, in RGB, and resized to the output size."""
    with _opened(data, SOURCE_FORMATS) as picture:
        shape = picture.size
        # The orientation of a PNG may follow its pixels. Until it is known, assume upright.
        target = command.size or size_like(*shape, command.limits)
        if isinstance(picture, JpegImageFile):
            target = _target(picture, shape, command)
            width, height = _unturned(target, picture)
            # The decoder skips what the target does not need.
            picture.draft(None, (2 * width, 2 * height))
        reserve(_cost_bytes(picture, shape, target))
        picture.load()
        target = _target(picture, shape, command)
        drawn = _reduced(picture, _unturned(target, picture))
        turn = _TURNS.get(_orientation(picture))
        return drawn if turn is None else drawn.transpose(turn)


def size_like(width: int, height: int, limits: SourceLimits) -> tuple[int, int]:
    """The aspect ratio of the source at the default pixel count of the model, in its multiples."""
    scale = math.sqrt(limits.width * limits.height / (width * height))
    step, most = limits.multiple, limits.largest_pixels

    def fitted(length: int, longest: int) -> int:
        return max(step, min(round(length * scale), longest) // step * step)

    fitted_width = fitted(width, most // step)
    return fitted_width, fitted(height, most // fitted_width)


def _opened(data: bytes, formats: tuple[str, ...]) -> Image.Image:
    picture = Image.open(io.BytesIO(data), formats=formats)
    if picture.width * picture.height > SOURCE_LIMIT_PIXELS:
        limit = f"at most {SOURCE_LIMIT_PIXELS // 1_000_000} megapixels are allowed"
        raise _TooLargeError(f"{picture.width}x{picture.height} pixels; {limit}")
    return picture


def _orientation(picture: Image.Image) -> int:
    return int(picture.getexif().get(ExifTags.Base.Orientation, 1))


def _target(
    picture: Image.Image, shape: tuple[int, int], command: PrepareSource
) -> tuple[int, int]:
    """The output width and height, in the displayed orientation."""
    width, height = _unturned(shape, picture)
    return command.size or size_like(width, height, command.limits)


def _unturned(size: tuple[int, int], picture: Image.Image) -> tuple[int, int]:
    """Converts `size` between the orientations of display and file, in both directions."""
    return (size[1], size[0]) if _orientation(picture) in _SIDEWAYS else size


def _cost_bytes(
    picture: Image.Image, shape: tuple[int, int], target: tuple[int, int] | None = None
) -> int:
    """The most memory that the work takes, measured.

    Pillow uses four bytes per pixel in most modes.
    """
    pixels = picture.width * picture.height
    decoded = _SMALL_MODES.get(picture.mode, 4) * pixels
    loading = decoded
    if picture.format == "WEBP":
        loading = 16 * pixels
    elif picture.info.get("progressive"):
        # A progressive JPEG is held as two-byte coefficients at full size, whatever its decoded
        # size.
        loading += 8 * shape[0] * shape[1]
    # The orientation may follow the pixels, so both are possible.
    targets = [target, target[::-1]] if target else []
    made = max([_reduced_bytes(picture.size, one) for one in targets], default=4 * pixels)
    return WORKING_BYTES + max(loading, decoded + made)


def _reduced_bytes(have: tuple[int, int], want: tuple[int, int]) -> int:
    """The memory of `_reduced`: averaged, resampled in both directions, and rotated."""
    across, down = _factors(have, want)
    height = math.ceil(have[1] / down)
    return 4 * (math.ceil(have[0] / across) * height + want[0] * height + 2 * want[0] * want[1])


def _factors(have: tuple[int, int], want: tuple[int, int]) -> tuple[int, int]:
    """How many pixels are averaged into one, horizontally and vertically."""
    return max(1, int(have[0] / want[0] / REDUCING_GAP)), max(
        1, int(have[1] / want[1] / REDUCING_GAP)
    )


def _reduced(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image without alpha, in `size`.

    Works in strips, so there is no second full copy in memory.
    """
    across, down = _factors(picture.size, size)
    width, height = picture.size
    small = Image.new("RGB", (math.ceil(width / across), math.ceil(height / down)))
    rows = max(1, STRIP_PIXELS // width // down) * down
    for top in range(0, height, rows):
        strip = _flat(picture.crop((0, top, width, min(height, top + rows))))
        small.paste(strip.reduce((across, down)), (0, top // down))
    return small.resize(size, Image.Resampling.LANCZOS, box=(0, 0, width / across, height / down))


def _flat(picture: Image.Image) -> Image.Image:
    """The image on a white background, without transparency."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _saved(picture: Image.Image, output_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, output_format, **options)
    return buffer.getvalue()


def _read(connection: socket.socket) -> tuple[CodecRequest, bytes]:
    frame_bytes, data_bytes = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    return decode_request(_exactly(connection, frame_bytes)), _exactly(connection, data_bytes)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. If the API closes the socket, the process ends."""
    found = bytearray(size)
    place = memoryview(found)
    while place:
        count = connection.recv_into(place)
        if not count:
            raise _HungUpError
        place = place[count:]
    return bytes(found)


def _send(connection: socket.socket, reply: CodecReply, data: bytes = b"") -> None:
    connection.sendall(frame_header(reply, len(data)))
    connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
