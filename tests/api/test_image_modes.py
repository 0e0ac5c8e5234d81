"""Every mode, depth and container of images: drawn as numpy reckons it, or refused by name.

The oracle is what the image was made of. It never reads the file.
"""

from __future__ import annotations

import io
import struct
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageMode

from api.inputs.codec_protocol import CodecError, PrepareSource, SourceLimits, SourcePrepared
from api.inputs.codec_server import run_command

LIMITS = SourceLimits(8, 8, 1, 1 << 20)
WIDTH, HEIGHT = 19, 13
Pixels = np.ndarray[Any, np.dtype[Any]]
CONTAINERS = {"PNG": 0, "WEBP": 0, "JPEG": 40}
"""How far a channel may be off, as JPEG loses some."""


def drawn(data: bytes) -> Pixels:
    """The RGB pixels that a model gets of a file."""
    pixels = drawn_or_refused(data)
    assert not isinstance(pixels, CodecError), pixels
    return pixels


def drawn_or_refused(data: bytes) -> Pixels | CodecError:
    answer, png = run_command(PrepareSource((WIDTH, HEIGHT), LIMITS), data, lambda cost: None)
    if isinstance(answer, CodecError):
        return answer
    assert answer == SourcePrepared(WIDTH, HEIGHT)
    pixels: Pixels = np.asarray(Image.open(io.BytesIO(png)))
    return pixels


def slopes(channels: int, highest: int) -> Pixels:
    """Smooth values from 0 to `highest`, another slope in each channel."""
    across, down = np.meshgrid(np.linspace(0, 1, WIDTH), np.linspace(0, 1, HEIGHT))
    each = [across, down, (across + down) / 2, 1 - across]
    stacked = np.stack(each[:channels], axis=-1) * highest
    return np.round(stacked).astype(np.uint16 if highest > 255 else np.uint8)


def on_white(color: Pixels, alpha: Pixels) -> Pixels:
    """RGB over white. Alpha is from 0 to 1."""
    mixed: Pixels = color * alpha[..., None] + 255 * (1 - alpha[..., None])
    return np.round(mixed)


def gray(values: Pixels) -> Pixels:
    return np.repeat(np.asarray(values, float)[..., None], 3, axis=-1)


def ycbcr(given: Pixels) -> Pixels:
    """ITU-T T.871, section 7."""
    y, blue, red = (given[..., place].astype(float) for place in range(3))
    blue, red = blue - 128, red - 128
    rgb = [y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue]
    return np.clip(np.stack(rgb, axis=-1), 0, 255)


def made(mode: str) -> tuple[Image.Image, Pixels] | None:
    """An image of a mode, and its RGB. None: images of the mode can't be made of an array."""
    if mode == "1":
        bits = slopes(1, 255)[..., 0] > 127
        return Image.fromarray(bits), gray(bits * 255)
    if mode in ("L", "I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        highest = 255 if mode in ("L", "F") else 65535
        values = slopes(1, highest)[..., 0]
        kind = {"L": "u1", "I;16B": ">u2", "I": "<i4", "F": "<f4"}.get(mode, "<u2")
        image = Image.frombytes(mode, (WIDTH, HEIGHT), values.astype(kind).tobytes())
        return image, gray(np.round(values * (255 / highest)))
    if mode in ("P", "PA"):
        colors = slopes(3, 255).reshape(-1, 3)[:256]
        places = np.arange(WIDTH * HEIGHT, dtype=np.uint8).reshape(HEIGHT, WIDTH)
        image = Image.fromarray(places, "L").convert("P")
        image.putdata(places.ravel().tolist())
        image.putpalette(colors.tobytes())
        return image, colors[places].astype(float)
    channels = len(ImageMode.getmode(mode).bands)
    values = slopes(channels, 255)
    image = Image.frombytes(mode, (WIDTH, HEIGHT), values.tobytes())
    return image, rgb_of(mode, values)


def rgb_of(mode: str, values: Pixels) -> Pixels:
    if mode in ("LA", "La"):
        return on_white(gray(values[..., 0]), values[..., 1] / 255)
    if mode in ("RGBA", "RGBa"):
        return on_white(values[..., :3].astype(float), values[..., 3] / 255)
    if mode == "CMYK":
        inks = 255.0 - values
        return inks[..., :3] * inks[..., 3:] / 255
    if mode == "YCbCr":
        return ycbcr(values)
    return values[..., :3].astype(float)


def saved(mode: str, container: str) -> tuple[bytes, Pixels] | None:
    found = made(mode)
    if found is None:
        return None
    image, rgb = found
    options = {"quality": 100, "subsampling": 0} if container == "JPEG" else {}
    options |= {"lossless": True, "exact": True} if container == "WEBP" else {}
    buffer = io.BytesIO()
    try:
        image.save(buffer, container, **options)
    except (OSError, ValueError, KeyError):
        return None
    return buffer.getvalue(), rgb


MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB"]
MODES += ["HSV", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"]
# WebP has RGB and RGBA only. What Pillow makes of these modes before it writes them is its own.
REWRITTEN = {"RGBa", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"}


@pytest.mark.parametrize(("mode", "container"), list(product(MODES, CONTAINERS)))
def test_each_mode_that_is_written_is_drawn_as_it_was_made(mode: str, container: str) -> None:
    written = saved(mode, container)
    if written is None or (container == "WEBP" and mode in REWRITTEN):
        pytest.skip("no file of this container has this mode")
    data, rgb = written
    pixels = drawn(data)
    assert np.abs(pixels - rgb).max() <= 0.75 + CONTAINERS[container]


@pytest.mark.parametrize("container", ["GIF", "BMP", "TIFF", "ICO", "PPM", "TGA", "JPEG2000"])
def test_other_containers_are_refused_by_name(container: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(buffer, container)
    refused = drawn_or_refused(buffer.getvalue())
    assert isinstance(refused, CodecError)
    assert "PNG, JPEG or WebP" in refused.reason


CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Of the color types of PNG: https://www.w3.org/TR/png-3/#table111"""
PNGS = [
    *((0, depth) for depth in (1, 2, 4, 8, 16)),
    *((3, depth) for depth in (1, 2, 4, 8)),
    *((kind, depth) for kind in (2, 4, 6) for depth in (8, 16)),
]
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
ADAM7 += [(0, 1, 1, 2)]
"""First column and row, and the steps to the next ones: https://www.w3.org/TR/png-3/#8Interlace"""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def lines(values: Pixels, depth: int) -> bytes:
    """The rows of an image, each behind its filter, which is none."""
    rows = values.reshape(values.shape[0], -1)
    if depth == 16:
        return b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    bits = (rows[..., None] >> np.arange(depth - 1, -1, -1)) & 1
    packed = np.packbits(bits.reshape(len(rows), -1).astype(np.uint8), axis=1)
    return b"".join(b"\0" + row.tobytes() for row in packed)


def png(values: Pixels, kind: int, depth: int, *chunks: bytes, is_interlaced: bool) -> bytes:
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, kind, 0, 0, is_interlaced)
    passes = ADAM7 if is_interlaced else [(0, 0, 1, 1)]
    parts = [values[y::down, x::across] for x, y, across, down in passes]
    pixels = b"".join(lines(part, depth) for part in parts if part.size)
    ends = (chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b""))
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *chunks, *ends))


def content(kind: int, depth: int) -> tuple[Pixels, Pixels, list[bytes]]:
    """The samples of a PNG, its RGB over white, and its palette."""
    highest = 2**depth - 1
    if kind == 3:
        places = np.round(slopes(1, 255) * (highest / 255)).astype(np.uint8)
        colors = slopes(3, 255).reshape(-1, 3)[: highest + 1]
        places = np.minimum(places, len(colors) - 1)
        return places, colors[places[..., 0]].astype(float), [chunk(b"PLTE", colors.tobytes())]
    values = slopes(CHANNELS[kind], highest)
    shades = values * (255 / highest)
    color = shades[..., :3] if kind in (2, 6) else gray(shades[..., 0])
    alpha = shades[..., -1] / 255 if kind in (4, 6) else np.ones((HEIGHT, WIDTH))
    return values, on_white(color, alpha), []


@pytest.mark.parametrize("is_interlaced", [False, True])
@pytest.mark.parametrize(("kind", "depth"), PNGS)
def test_each_depth_of_png_is_drawn(kind: int, depth: int, *, is_interlaced: bool) -> None:
    values, rgb, chunks = content(kind, depth)
    pixels = drawn(png(values, kind, depth, *chunks, is_interlaced=is_interlaced))
    # The high byte of 16 bits is up to one below what rounding gives.
    assert np.abs(pixels - rgb).max() <= (1.5 if depth == 16 else 0.75)


@pytest.mark.parametrize(("kind", "depth"), [one for one in PNGS if one[0] in (0, 2, 3)])
def test_transparent_color_of_a_png_is_white(kind: int, depth: int) -> None:
    """The chunk tRNS: one sample value, or the alpha of each color of the palette."""
    values, rgb, chunks = content(kind, depth)
    one = values[HEIGHT // 2, WIDTH // 3]
    clear = (values == one).all(axis=-1)
    if kind == 3:
        chunks.append(chunk(b"tRNS", bytes(0 if n == one[0] else 255 for n in range(one[0] + 1))))
    else:
        chunks.append(chunk(b"tRNS", one.astype(">u2").tobytes()))
    data = png(values, kind, depth, *chunks, is_interlaced=False)
    if (kind, depth) == (2, 16):
        refused = drawn_or_refused(data)
        assert isinstance(refused, CodecError)
        assert "transparent color" in refused.reason
        return
    pixels = drawn(data)
    rgb[clear] = 255
    assert np.abs(pixels - rgb).max() <= (1.5 if depth == 16 else 0.75)


def exif(kind: int, count: int, value: bytes) -> bytes:
    """A block of EXIF with one entry, the orientation, of any type."""
    entry = struct.pack("<HHHI", 1, 0x0112, kind, count) + value.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", 8) + entry + bytes(4)


ODD_EXIF = {
    "byte": exif(1, 1, b"\x06"),
    "text": exif(2, 2, b"6\0"),
    "two": exif(3, 2, b"\x06\0\x06\0"),
    "long": exif(4, 1, b"\x06"),
    "rational": exif(5, 1, b"\xff\xff\xff\xff"),
    "undefined": exif(7, 4, b"\x06"),
    "type 99": exif(99, 1, b"\x06"),
    "none": exif(3, 0, b""),
    "nine": exif(3, 1, b"\x09"),
    "cut": exif(3, 1, b"\x06")[:14],
    "nonsense": b"not EXIF at all",
    "empty": b"",
}


def with_exif(container: str, block: bytes) -> bytes:
    image, _ = made("RGB") or (Image.new("RGB", (WIDTH, HEIGHT)), None)
    buffer = io.BytesIO()
    prefix = b"" if container == "PNG" else b"Exif\0\0"
    if container == "PNG":
        image.save(buffer, container)
        data = buffer.getvalue()
        return data[:33] + chunk(b"eXIf", block) + data[33:]
    image.save(buffer, container, exif=prefix + block)
    return buffer.getvalue()


@pytest.mark.parametrize(("container", "name"), list(product(CONTAINERS, ODD_EXIF)))
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_odd_exif_refuses_no_image(container: str, name: str) -> None:
    assert drawn(with_exif(container, ODD_EXIF[name])).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["byte", "long"])
def test_orientation_of_another_type_counts(container: str, name: str) -> None:
    usual = drawn(with_exif(container, exif(3, 1, b"\x06")))
    assert np.array_equal(drawn(with_exif(container, ODD_EXIF[name])), usual)


@pytest.mark.parametrize(
    "odd",
    [
        chunk(b"pHYs", b"\0"),
        chunk(b"gAMA", b""),
        chunk(b"iCCP", b"a\0\0not zlib"),
        chunk(b"zTXt", b"a\0\0not zlib"),
        chunk(b"cHRM", b"\0\0"),
        chunk(b"tEXt", b"a\0b")[:-4] + b"bad!",
        chunk(b"sRGB", b""),
        chunk(b"acTL", bytes(8)),
    ],
    ids=lambda odd: odd[4:8].decode(),
)
def test_odd_metadata_refuses_no_png(odd: bytes) -> None:
    whole, rgb = saved("RGB", "PNG") or (b"", np.empty(0))
    assert np.abs(drawn(whole[:33] + odd + whole[33:]) - rgb).max() <= 0.75
