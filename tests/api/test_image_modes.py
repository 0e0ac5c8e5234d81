"""Every image mode, depth and container: drawn as numpy computes it, or rejected by name.

The expected pixels come from the data used to create the image. The test never reads the file.
"""

from __future__ import annotations

import io
import struct
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageMode

from api.inputs.codec_protocol import CodecError, PrepareSource, SourceLimits, SourcePrepared
from api.inputs.codec_server import ACCEPTED, run_command

LIMITS = SourceLimits(8, 8, 1, 1 << 20)
WIDTH, HEIGHT = 19, 13
Pixels = np.ndarray[Any, np.dtype[Any]]
CONTAINERS = {"PNG": 0, "WEBP": 0, "JPEG": 40, "AVIF": 10, "GIF": 0, "TIFF": 0.25, "BMP": 0}
"""Tolerance per channel, because JPEG and AVIF are lossy. YCbCr in TIFF is rounded twice."""
WITH_EXIF = ("PNG", "WEBP", "JPEG")


def drawn(data: bytes) -> Pixels:
    """The RGB pixels that a model gets from a file."""
    pixels = drawn_or_refused(data)
    assert not isinstance(pixels, CodecError), pixels
    return pixels


def drawn_or_refused(data: bytes) -> Pixels | CodecError:
    answer, png = run_command(PrepareSource((WIDTH, HEIGHT), LIMITS), data, lambda cost: None)
    if isinstance(answer, CodecError):
        return answer
    assert isinstance(answer, SourcePrepared)
    assert (answer.width, answer.height) == (WIDTH, HEIGHT)
    pixels: Pixels = np.asarray(Image.open(io.BytesIO(png)))
    return pixels


def slopes(channels: int, highest: int) -> Pixels:
    """Smooth values from 0 to `highest`, with a different slope in each channel."""
    across, down = np.meshgrid(np.linspace(0, 1, WIDTH), np.linspace(0, 1, HEIGHT))
    each = [across, down, (across + down) / 2, 1 - across]
    stacked = np.stack(each[:channels], axis=-1) * highest
    return np.round(stacked).astype(np.uint16 if highest > 255 else np.uint8)


def on_white(color: Pixels, alpha: Pixels) -> Pixels:
    """The pixels' RGB values over white. Alpha ranges from 0 to 1."""
    mixed: Pixels = color * alpha[..., None] + 255 * (1 - alpha[..., None])
    return np.round(mixed)


def gray(values: Pixels) -> Pixels:
    return np.repeat(np.asarray(values, float)[..., None], 3, axis=-1)


def ycbcr(given: Pixels) -> Pixels:
    """As specified in ITU-T T.871, section 7."""
    y, blue, red = (given[..., place].astype(float) for place in range(3))
    blue, red = blue - 128, red - 128
    rgb = [y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue]
    return np.clip(np.stack(rgb, axis=-1), 0, 255)


def made(mode: str) -> tuple[Image.Image, Pixels] | None:
    """An image in a given mode, and its RGB values.

    None if such images can't be created from an array.
    """
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
    each: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100, "subsampling": 0},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
        "WEBP": {"lossless": True, "exact": True},
    }
    options = each.get(container, {})
    buffer = io.BytesIO()
    try:
        image.save(buffer, container, **options)
    except (OSError, ValueError, KeyError):
        return None
    return buffer.getvalue(), rgb


MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB"]
MODES += ["HSV", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"]
# Pillow decides how to convert these modes before it writes them: WebP and AVIF have only RGB and
# RGBA, GIF has palettes, and BMP has no alpha.
_SIXTEEN = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}
REWRITTEN = {
    "WEBP": {"RGBa", "YCbCr", "LAB", "HSV", *_SIXTEEN},
    "AVIF": {"RGBa", "YCbCr", "LAB", "HSV", "PA", "CMYK", "RGBX", "LA", *_SIXTEEN},
    "GIF": {"LA", "RGBA", "RGB", "PA", "CMYK", "RGBX", "YCbCr", *_SIXTEEN},
    "BMP": {"RGBA"},
    "TIFF": {"LAB"},
}
NOT_DRAWN = {("TIFF", "I"), ("TIFF", "F")}


@pytest.mark.parametrize(("mode", "container"), list(product(MODES, CONTAINERS)))
def test_each_mode_that_is_written_is_drawn_as_it_was_made(mode: str, container: str) -> None:
    written = saved(mode, container)
    if written is None or mode in REWRITTEN.get(container, ()):
        pytest.skip("no file of this container has this mode")
    data, rgb = written
    if (container, mode) in NOT_DRAWN:
        refused = drawn_or_refused(data)
        assert isinstance(refused, CodecError)
        assert "32 bits per channel are not" in refused.reason
        return
    pixels = drawn(data)
    assert np.abs(pixels - rgb).max() <= 0.75 + CONTAINERS[container]


@pytest.mark.parametrize("container", ["ICO", "PPM", "TGA", "JPEG2000"])
def test_other_containers_are_refused_by_name(container: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(buffer, container)
    refused = drawn_or_refused(buffer.getvalue())
    assert isinstance(refused, CodecError)
    assert "PNG, JPEG, WebP, AVIF, GIF, TIFF or BMP" in refused.reason


CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Channels per PNG color type: https://www.w3.org/TR/png-3/#table111"""
PNGS = [
    *((0, depth) for depth in (1, 2, 4, 8, 16)),
    *((3, depth) for depth in (1, 2, 4, 8)),
    *((kind, depth) for kind in (2, 4, 6) for depth in (8, 16)),
]
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
ADAM7 += [(0, 1, 1, 2)]
"""First column and row, and the step to the next: https://www.w3.org/TR/png-3/#8Interlace"""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def lines(values: Pixels, depth: int) -> bytes:
    """An image's rows, each preceded by its filter type, which is always "none"."""
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
    """A PNG's samples, their RGB values over white, and the palette."""
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
    # The high byte of a 16-bit value is up to one less than the rounded value.
    assert np.abs(pixels - rgb).max() <= (1.5 if depth == 16 else 0.75)


@pytest.mark.parametrize(("kind", "depth"), [one for one in PNGS if one[0] in (0, 2, 3)])
def test_transparent_color_of_a_png_is_white(kind: int, depth: int) -> None:
    """The tRNS chunk holds one sample value or an alpha value for each palette color."""
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
    """An EXIF block with a single entry, the orientation, stored as any type."""
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


@pytest.mark.parametrize(("container", "name"), list(product(WITH_EXIF, ODD_EXIF)))
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_odd_exif_refuses_no_image(container: str, name: str) -> None:
    assert drawn(with_exif(container, ODD_EXIF[name])).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("container", WITH_EXIF)
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


@pytest.mark.parametrize(
    ("begins", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"8BPS\0\1", "Photoshop"),
        (b"%PDF-1.7\n", "PDF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    ],
)
def test_kinds_that_people_send_and_that_are_not_read_are_named(begins: bytes, name: str) -> None:
    refused = drawn_or_refused(begins + bytes(64))
    assert isinstance(refused, CodecError)
    assert refused.reason == f"{name} is not supported; send {ACCEPTED}"


@pytest.mark.parametrize("container", ["PNG", "WEBP", "JPEG", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_drawn_upright(container: str, orientation: int) -> None:
    """The visible shape is used, so an output of the same size is not stretched."""
    corner = np.zeros((24, 40, 3), np.uint8)
    corner[:12, :20] = (255, 0, 0)  # top left as stored
    buffer, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = orientation
    options: dict[str, Any] = {"quality": 95} if container != "PNG" else {}
    Image.fromarray(corner).save(buffer, container, exif=tags.tobytes(), **options)
    limits = SourceLimits(40, 24, 1, 1 << 20)
    answer, png = run_command(PrepareSource(None, limits), buffer.getvalue(), lambda cost: None)
    assert isinstance(answer, SourcePrepared)
    upright = np.asarray(Image.open(io.BytesIO(png)))
    # EXIF 2.3, section 4.6.4: which stored corner is at the top left when the image is displayed.
    turned = {
        1: corner,
        2: corner[:, ::-1],
        3: corner[::-1, ::-1],
        4: corner[::-1],
        5: corner.swapaxes(0, 1),
        6: corner.swapaxes(0, 1)[:, ::-1],
        7: corner.swapaxes(0, 1)[::-1, ::-1],
        8: corner.swapaxes(0, 1)[::-1],
    }[orientation]
    assert upright.shape == turned.shape
    assert np.abs(upright.astype(int) - turned).mean() < 12


def test_of_several_pictures_the_first_is_taken() -> None:
    frames = [Image.new("RGB", (WIDTH, HEIGHT), color) for color in ("red", "blue")]
    for container in ("GIF", "WEBP", "TIFF", "PNG", "AVIF"):
        buffer = io.BytesIO()
        frames[0].save(buffer, container, save_all=True, append_images=frames[1:])
        assert np.abs(drawn(buffer.getvalue()).astype(int) - (255, 0, 0)).max() <= 6, container


def wide_gamut() -> ImageCms.ImageCmsProfile:
    """A profile that swaps colors, with sRGB's green as its red: an image that ignores it looks
    obviously wrong.
    """
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    names = {data[at : at + 4].decode("latin1"): at for at in range(132, 132 + 12 * 20, 12)}
    places = [names[name] for name in ("rXYZ", "gXYZ", "bXYZ")]
    offsets = [data[at + 4 : at + 8] for at in places]
    for at, offset in zip(places, offsets[1:] + offsets[:1], strict=True):
        data[at + 4 : at + 8] = offset
    return ImageCms.ImageCmsProfile(io.BytesIO(bytes(data)))


@pytest.mark.parametrize("container", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_colors_are_those_of_the_profile(container: str) -> None:
    image = Image.new("RGB", (WIDTH, HEIGHT), (250, 10, 20))
    buffer = io.BytesIO()
    image.save(buffer, container, icc_profile=wide_gamut().tobytes(), quality=100)
    assert np.abs(drawn(buffer.getvalue()).astype(int) - (20, 250, 10)).max() <= 12


def test_a_gray_picture_with_a_profile_is_gray() -> None:
    image = Image.new("L", (WIDTH, HEIGHT), 100)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", icc_profile=wide_gamut().tobytes())  # wrong kind, so ignored
    assert (drawn(buffer.getvalue()) == 100).all()


@pytest.mark.parametrize("profile", [b"", b"nonsense", bytes(200), b"x" * 5_000_000])
def test_a_profile_that_can_not_be_read_is_none(profile: bytes) -> None:
    whole, rgb = saved("RGB", "PNG") or (b"", np.empty(0))
    odd = chunk(b"iCCP", b"name\0\0" + zlib.compress(profile))
    assert np.abs(drawn(whole[:33] + odd + whole[33:]) - rgb).max() <= 0.75


def test_lab_is_drawn_by_its_colors() -> None:
    """In CIE 15, sRGB's red is L* = 53.2, a* = 80.1, b* = 67.2; Pillow stores 0 as 128."""
    image = Image.new("LAB", (WIDTH, HEIGHT), (136, 208, 195))
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    assert np.abs(drawn(buffer.getvalue()).astype(int) - (255, 0, 0)).max() <= 12


@pytest.mark.parametrize(
    "compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"]
)
def test_tiffs_of_each_compression(compression: str) -> None:
    image, rgb = made("RGB") or (Image.new("RGB", (1, 1)), np.empty(0))
    buffer = io.BytesIO()
    options = {"quality": 100} if compression == "jpeg" else {}
    image.save(buffer, "TIFF", compression=compression, **options)
    assert np.abs(drawn(buffer.getvalue()) - rgb).max() <= (40 if compression == "jpeg" else 0.75)
