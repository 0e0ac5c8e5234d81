"""`python -m api.inputs.codec_server`: decodes, resizes and encodes pictures for the API, one at a time, over a socket.

A thread would not do. Decoding can't be stopped in a thread, holds the interpreter for up to a third of a second
(alpha_composite, WebP), and may take any amount of memory. This process can be killed at a deadline, has a lower
priority than the event loop, gets limits on memory and CPU time from the kernel, and has none of the API's settings or
secrets. It imports Pillow and msgspec only, so it starts within a tenth of a second.
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
    Answer,
    Asked,
    Encoded,
    Go,
    Limits,
    Opened,
    Order,
    Prepare,
    Prepared,
    Refused,
    decode_asked,
    head_of,
)

SOURCE_LIMIT_PIXELS = 25_000_000
SOURCE_FORMATS = ("PNG", "JPEG", "WEBP")
NICENESS = 10
"""A tenth of a core that others want: the API's event loop goes first, and pictures still get on beside busy models."""
CPU_LIMIT_S = 20
"""For one picture; 25 megapixels take 1 s. A JPEG may have thousands of scans, each over all of its pixels."""
ADDRESS_SPACE_BYTES = 1024 * 1024 * 1024
"""The largest picture takes 400 MB."""
REDUCING_GAP = 3
"""Pixels are averaged in boxes down to three times the target, and only those resampled, as for thumbnails."""
STRIP_PIXELS = 1 << 18
"""Of the decoded picture, what is flattened and reduced at once."""
WORKING_BYTES = 24 * 1024 * 1024
"""What decoder, strips and encoder take besides, at most."""

# Pillow's own bound only warns at first, and it does so while the header is read; ours refuses right after that.
Image.MAX_IMAGE_PIXELS = None


# What Pillow's decoders raise on broken data, each in its own way.
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
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
    """More pixels, or more memory, than is taken."""


class _HungUpError(Exception):
    """The API closed the socket, or is gone."""


def main() -> int:
    """Serves the socket whose number is the argument until the other end closes it."""
    # Signals to the whole group (Ctrl-C, a supervisor's TERM) are the API's to obey: it drains, then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(_HungUpError, ConnectionError):
        while True:
            _serve_one(connection)
    return 0


def _serve_one(connection: socket.socket) -> None:
    def wait_for_room(cost_bytes: int) -> None:
        _send(connection, Opened(cost_bytes))
        if not isinstance(_read(connection)[0], Go):
            raise RuntimeError("only Go follows Opened; this is a bug")

    order, data = _read(connection)
    if isinstance(order, Go):
        raise RuntimeError("Go follows Opened only; this is a bug")
    _bound_cpu_time()
    _send(connection, *done(order, data, wait_for_room))


def _bound_cpu_time() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_LIMIT_S, hard))


def done(order: Order, data: bytes, wait_for_room: Callable[[int], None]) -> tuple[Answer, bytes]:
    """What came of `order` on the picture in `data`: once its header was read, there must be room for what it costs."""
    try:
        if isinstance(order, Prepare):
            drawn = _prepared(data, order, wait_for_room)
            return Prepared(*drawn.size), _saved(drawn, "png", compress_level=1)
        with _opened(data, ("PNG",)) as picture:
            wait_for_room(_cost_bytes(picture, picture.size))
            return Encoded(), _saved(picture.convert("RGB"), order.output_format, quality=order.quality)
    except (_TooLargeError, MemoryError) as error:
        return Refused("input_too_large", str(error) or "it takes more memory to decode than there is"), b""
    except (_HungUpError, ConnectionError):
        raise
    except Exception as error:
        if not isinstance(error, _UNDECODABLE):
            traceback.print_exc()
        return Refused("invalid_input", "not a PNG, JPEG or WebP picture, or a broken one"), b""


def _prepared(data: bytes, order: Prepare, wait_for_room: Callable[[int], None]) -> Image.Image:
    """The picture in `data` upright, in RGB, and of the size to draw."""
    with _opened(data, SOURCE_FORMATS) as picture:
        shape = picture.size
        # Of a PNG the orientation may come after its pixels; until then it is taken for upright.
        target = order.size or size_like(*shape, order.limits)
        if isinstance(picture, JpegImageFile):
            target = _target(picture, shape, order)
            width, height = _unturned(target, picture)
            # The decoder drops what the target does not need.
            picture.draft(None, (2 * width, 2 * height))
        wait_for_room(_cost_bytes(picture, shape, target))
        picture.load()
        target = _target(picture, shape, order)
        drawn = _reduced(picture, _unturned(target, picture))
        turn = _TURNS.get(_orientation(picture))
        return drawn if turn is None else drawn.transpose(turn)


def size_like(width: int, height: int, limits: Limits) -> tuple[int, int]:
    """The source's shape at the model's usual number of pixels, in the multiples the model needs."""
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


def _target(picture: Image.Image, shape: tuple[int, int], order: Prepare) -> tuple[int, int]:
    """The width and height to draw, as the picture is looked at."""
    width, height = _unturned(shape, picture)
    return order.size or size_like(width, height, order.limits)


def _unturned(size: tuple[int, int], picture: Image.Image) -> tuple[int, int]:
    """`size` between as the picture is looked at and as it lies in the file; the same both ways."""
    return (size[1], size[0]) if _orientation(picture) in _SIDEWAYS else size


def _cost_bytes(picture: Image.Image, shape: tuple[int, int], target: tuple[int, int] | None = None) -> int:
    """What the work takes at most, measured: Pillow keeps four bytes a pixel for all modes but the smallest."""
    pixels = picture.width * picture.height
    decoded = _SMALL_MODES.get(picture.mode, 4) * pixels
    loading = decoded
    if picture.format == "WEBP":
        loading = 16 * pixels
    elif picture.info.get("progressive"):
        # A JPEG of this kind is held whole in coefficients of two bytes, in whatever size it is decoded.
        loading += 8 * shape[0] * shape[1]
    # How it is turned may stand behind its pixels.
    targets = [target, target[::-1]] if target else []
    made = max([_reduced_bytes(picture.size, one) for one in targets], default=4 * pixels)
    return WORKING_BYTES + max(loading, decoded + made)


def _reduced_bytes(have: tuple[int, int], want: tuple[int, int]) -> int:
    """Of what `_reduced` makes: averaged, resampled along one side, then along the other, and turned."""
    across, down = _factors(have, want)
    height = math.ceil(have[1] / down)
    return 4 * (math.ceil(have[0] / across) * height + want[0] * height + 2 * want[0] * want[1])


def _factors(have: tuple[int, int], want: tuple[int, int]) -> tuple[int, int]:
    """How many pixels are averaged into one, across and down."""
    return max(1, int(have[0] / want[0] / REDUCING_GAP)), max(1, int(have[1] / want[1] / REDUCING_GAP))


def _reduced(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture flat and in `size`; a strip at a time, so that no second whole one lies in memory."""
    across, down = _factors(picture.size, size)
    width, height = picture.size
    small = Image.new("RGB", (math.ceil(width / across), math.ceil(height / down)))
    rows = max(1, STRIP_PIXELS // width // down) * down
    for top in range(0, height, rows):
        strip = _flat(picture.crop((0, top, width, min(height, top + rows))))
        small.paste(strip.reduce((across, down)), (0, top // down))
    return small.resize(size, Image.Resampling.LANCZOS, box=(0, 0, width / across, height / down))


def _flat(picture: Image.Image) -> Image.Image:
    """Without transparency: laid on white, as a viewer shows it."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _saved(picture: Image.Image, output_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, output_format, **options)
    return buffer.getvalue()


def _read(connection: socket.socket) -> tuple[Asked, bytes]:
    frame_bytes, data_bytes = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    return decode_asked(_exactly(connection, frame_bytes)), _exactly(connection, data_bytes)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; the other end closing ends the process."""
    found = bytearray(size)
    place = memoryview(found)
    while place:
        count = connection.recv_into(place)
        if not count:
            raise _HungUpError
        place = place[count:]
    return bytes(found)


def _send(connection: socket.socket, answer: Answer, data: bytes = b"") -> None:
    connection.sendall(head_of(answer, len(data)))
    connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
