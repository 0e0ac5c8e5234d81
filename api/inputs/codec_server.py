"""`python -m api.inputs.codec_server`: runs codec commands on images for the API.

It handles one image at a time over a socket. A thread would not be enough: decoding in a thread
can't be stopped, holds the interpreter lock for up to a third of a second (alpha_composite, WebP),
and may take any amount of memory. This process can be killed at a deadline, runs at a lower
priority than the event loop, has kernel limits on memory and CPU time, and has no access to the
API's settings or secrets. It imports only Pillow and msgspec, so it starts within a tenth of a
second.

A command decodes, resizes, or encodes an image with Pillow in bounded memory: it first reads the
header, and then reserves as much memory as the rest may need.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

from PIL import (
    AvifImagePlugin,
    ExifTags,
    Image,
    ImageChops,
    ImageCms,
    ImageFilter,
    ImageOps,
    ImageStat,
)
from PIL.JpegImagePlugin import JpegImageFile

from api.inputs.codec_protocol import (
    LENGTHS,
    UNPADDED,
    CodecCommand,
    CodecError,
    CodecReply,
    CodecRequest,
    CompareImages,
    HeaderRead,
    ImageEncoded,
    ImagesCompared,
    MaskPrepared,
    Padding,
    PrepareMask,
    PrepareSource,
    Proceed,
    SourceLimits,
    SourcePrepared,
    decode_request,
    frame_header,
)

SOURCE_LIMIT_PIXELS = 25_000_000
SOURCE_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF", "BMP")
ACCEPTED = "PNG, JPEG, WebP, AVIF, GIF, TIFF or BMP"
_REFUSED = (
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (0, b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"8BPS", "Photoshop"),
    (0, b"%PDF-", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG"),
    (0, b"\x00\x00\x01\x00", "ICO"),
)
"""The leading bytes of unsupported file types, with the types' names."""
_MAX_PROFILE_BYTES = 4 * 1024 * 1024
REDUCING_GAP = 3
"""Images are box-averaged down to three times the target size and then resampled, as thumbnails
are.
"""
EQUAL_DB = 100.0
"""The ratio reported for equal images, for which the formula is undefined."""
MAX_SCANS = 100
"""Maximum scans per JPEG, as in libtiff (MAX_SCAN_NUMBER in tif_jpeg.c). Encoders write at most
about 15. A 25-megapixel scan can be 42 bytes long and take 17 ms.
"""
STRIP_PIXELS = 1 << 18
"""Number of decoded pixels to flatten and reduce at a time."""
WORKING_BYTES = 24 * 1024 * 1024
"""Maximum memory for the decoder, strips, and encoder."""

# Pillow's own limit only causes a warning at first. The limit here rejects an image right after its
# header is read.
Image.MAX_IMAGE_PIXELS = None
# Use one thread per image, so that the limit on CPU time also limits wall time.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

# Errors that Pillow's decoders raise on broken data.
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
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = (b"tRNS", b"eXIf", b"iCCP")
"""PNG chunks, other than pixels and palette, that affect the image's appearance.

Critical chunks begin with a capital letter: https://www.w3.org/TR/png-3/#5Chunk-naming-conventions
"""
_TO_8_BITS = [(value * 255 + 32767) // 65535 for value in range(65536)]
_DEPTHS = {"L;2": 3, "L;4": 15}
"""Maximum sample value of PNGs whose samples Pillow stretches to 8 bits, keyed by Pillow's mode
name.
"""
_INNER_HALF = [max(0, 2 * level - 255) for level in range(256)]
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

_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd8-\xfe])")
"""A marker with a segment, or one that starts or ends an image (ITU-T T.81, B.1).

Lower markers are reserved. libjpeg rejects them between segments. In coded data with restart
intervals, it drops them as if they had no length and continues after them (jpeg_resync_to_restart
in jdmarker.c). In coded data, a 0xFF byte is followed by a zero byte.
"""
_END_OF_IMAGE, _START_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xD8, 0xDA

_PROFILE_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_SRGB = ImageCms.createProfile("sRGB")

NICENESS = 10
"""Makes the API's event loop take priority over this process. Under contention, this process still
gets a tenth of a core.
"""
CPU_LIMIT_S = 6
"""Maximum CPU seconds for an image sent by a caller. 25 megapixels take 0.6 to 1.8 s, depending on
the format.
"""
RESULT_CPU_LIMIT_S = 20
"""Maximum CPU seconds for an image computed by a worker. 16 megapixels as WebP take 4 s."""
ADDRESS_SPACE_BYTES = 1024 * 1024 * 1024
"""Maximum address space. The largest image takes 400 MB."""
SPARE_BYTES = 48 * 1024 * 1024
"""Additional address space beyond an image's reservation, because allocators take it in large
chunks.
"""


class _TooLargeError(Exception):
    """Too many pixels, or too much memory."""

    field: str | None = None


class _PaddedTooLargeError(_TooLargeError):
    """The padding makes the image too large."""

    field = "padding"


class _NotDrawnError(Exception):
    """A kind of image that can't be drawn correctly. The message names the kind."""


def run_command(
    command: CodecCommand, data: bytes, reserve: Callable[[int], None]
) -> tuple[CodecReply, bytes]:
    """Runs a command on the image in `data`. Calls `reserve` after reading the image header."""
    try:
        if isinstance(command, PrepareSource):
            source, file_size = _prepare_image(data, command, reserve)
            png = _save(source, "png", compress_level=1)
            return SourcePrepared(*source.size, file_size), png
        if isinstance(command, PrepareMask):
            return MaskPrepared(), _save(_mask(data, command, reserve), "png")
        if isinstance(command, CompareImages):
            return ImagesCompared(_psnr_db(data, command.first_bytes, reserve)), b""
        with _open_image(data, ("PNG", "WEBP")) as image:
            reserve(_cost_bytes(image, image.size, command.size))
            rgb = image.convert("RGB")
            if command.size is not None:
                rgb = rgb.resize(command.size, Image.Resampling.BICUBIC)
            options = {} if command.output_format == "png" else {"quality": command.quality}
            return ImageEncoded(), _save(rgb, command.output_format, **options)
    except (_TooLargeError, MemoryError) as error:
        reason = str(error) or "not enough memory to decode the image"
        return CodecError("input_too_large", reason, getattr(error, "field", None)), b""
    except _NotDrawnError as error:
        return CodecError("invalid_input", str(error)), b""
    except ConnectionError:  # the API closed the connection during `reserve`
        raise
    except Exception as error:
        if not isinstance(error, _UNDECODABLE):
            traceback.print_exc()
        return CodecError("invalid_input", _why_not(data)), b""


def _check_scans(data: bytes) -> None:
    """Raises _NotDrawnError if a JPEG has more than MAX_SCANS scans, without decoding anything."""
    if data.count(b"\xff\xda") <= MAX_SCANS:  # segments may contain these bytes too
        return
    at, scans = 0, 0
    while (marker := _MARKER.search(data, at)) is not None:
        kind, at = marker[1][0], marker.end()
        if kind == _END_OF_IMAGE:
            return
        if kind == _START_OF_IMAGE:
            continue
        scans += kind == _START_OF_SCAN
        if scans > MAX_SCANS:
            raise _NotDrawnError(
                f"JPEGs with more than {MAX_SCANS} scans are not supported; save the image as a "
                "baseline JPEG"
            )
        at += int.from_bytes(data[at : at + 2], "big")


def _why_not(data: bytes) -> str:
    """Returns the reason a file can't be drawn."""
    for at, begins, name in _REFUSED:
        if data[at : at + len(begins)] == begins:
            return f"{name} is not supported; send {ACCEPTED}"
    return f"not a valid {ACCEPTED} image"


def _psnr_db(data: bytes, first_bytes: int, reserve: Callable[[int], None]) -> float:
    """Returns two PNGs' PSNR in dB, 10 log10(255^2 / MSE) as in ITU-T J.340."""
    with (
        _open_image(data[:first_bytes], ("PNG",)) as first,
        _open_image(data[first_bytes:], ("PNG",)) as other,
    ):
        reserve(_cost_bytes(first, first.size) + _cost_bytes(other, other.size))
        if first.size != other.size:
            return 0.0
        difference = ImageStat.Stat(
            ImageChops.difference(first.convert("RGB"), other.convert("RGB"))
        )
    error = sum(difference.sum2) / sum(difference.count)
    return EQUAL_DB if error == 0 else min(EQUAL_DB, 10 * math.log10(255**2 / error))


def _prepare_image(
    data: bytes, command: PrepareSource, reserve: Callable[[int], None]
) -> tuple[Image.Image, tuple[int, int]]:
    """Returns the image in `data`, upright, in RGB, and resized to the output size.

    Also returns its original upright size.
    """
    with _open_image(_without_metadata(data), SOURCE_FORMATS) as image:
        shape = image.size
        _scale_transparent_color(image)
        # The orientation of a PNG may come after its pixels. Until it is known, assume that the
        # image is upright.
        target = _inner(command) or size_like(*shape, command.limits)
        if isinstance(image, JpegImageFile):
            target = _target(image, shape, command)
            width, height = _swap_if_sideways(target, image)
            # The decoder skips detail that the target size does not need.
            image.draft(None, (2 * width, 2 * height))
        # If the image is rotated later, the other side may be the longer one.
        padded_bytes = max(
            _compute_padded_bytes(size, command.padding) for size in (target, target[::-1])
        )
        reserve(_cost_bytes(image, shape, target) + padded_bytes)
        image.load()
        if image.format == "TIFF":  # Pillow has already rotated it
            shape = image.size
        target = _target(image, shape, command)
        _check_padded(target, command)
        reduced = _in_srgb(_reduce(image, _swap_if_sideways(target, image)), image)
        turn = _TURNS.get(_orientation(image))
        upright = reduced if turn is None else reduced.transpose(turn)
        return _with_edges(upright, command.padding), _swap_if_sideways(shape, image)


def _inner(command: PrepareSource | PrepareMask) -> tuple[int, int] | None:
    """Returns the output size without padding."""
    if command.size is None:
        return None
    left, above, right, below = command.padding
    return command.size[0] - left - right, command.size[1] - above - below


def _compute_padded_bytes(size: tuple[int, int], padding: Padding) -> int:
    """Returns the memory, in bytes, needed for an image including its padding."""
    if padding == UNPADDED:
        return 0
    left, above, right, below = padding
    return 4 * (size[0] + left + right) * (size[1] + above + below)


def _check_padded(size: tuple[int, int], command: PrepareSource) -> None:
    """Raises _PaddedTooLargeError if the image and its padding are too large for the model."""
    left, above, right, below = command.padding
    width, height = size[0] + left + right, size[1] + above + below
    if command.padding != UNPADDED and width * height > command.limits.largest_pixels:
        raise _PaddedTooLargeError(
            f"with padding, the image is {width}x{height} pixels, which exceeds the maximum "
            f"of {command.limits.largest_pixels}"
        )


def _with_edges(image: Image.Image, padding: Padding) -> Image.Image:
    """Returns the image, extended outward by repeating its edge pixels."""
    if padding == UNPADDED:
        return image
    left, above, right, below = padding
    (width, height), (across, down) = image.size, (left + right, above + below)
    padded = Image.new(image.mode, (width + across, height + down))
    padded.paste(image, (left, above))
    # Fill the left and right sides first, then entire rows.
    columns = ((left, 0, 0), (right, width - 1, left + width))
    rows = ((above, above, 0), (below, above + height - 1, above + height))
    for count, source, target in columns:
        if count:
            edge = image.crop((source, 0, source + 1, height))
            padded.paste(edge.resize((count, height)), (target, above))
    for count, source, target in rows:
        if count:
            edge = padded.crop((0, source, padded.width, source + 1))
            padded.paste(edge.resize((padded.width, count)), (0, target))
    return padded


def _mask(data: bytes, command: PrepareMask, reserve: Callable[[int], None]) -> Image.Image:
    """Returns how strongly to redraw each pixel of the upright source, from 0 to 255.

    Raises:
        _NotDrawnError: the mask differs in size from the source, has no transparency, or leaves
            nothing to draw.
    """
    inner = _inner(command) or command.size
    border = _compute_padded_bytes(inner, command.padding)
    if data:
        mask = _mask_in(data, command, inner, lambda cost_bytes: reserve(cost_bytes + border))
    else:
        reserve(WORKING_BYTES + border)
        mask = Image.new("L", inner)
    mask = ImageOps.expand(mask, command.padding, fill=255)
    if mask.getbbox() is None:
        raise _NotDrawnError(f"it has no {command.redraws} pixels, so there is nothing to redraw")
    return _blur_inward(mask, command.blur)


def _mask_in(
    data: bytes,
    command: PrepareMask,
    size: tuple[int, int],
    reserve: Callable[[int], None],
) -> Image.Image:
    """Returns the mask in `data`, upright and resized."""
    with _open_image(_without_metadata(data), SOURCE_FORMATS) as image:
        _scale_transparent_color(image)
        reserve(_cost_bytes(image, image.size, size) + image.width * image.height)
        image.load()
        have = _swap_if_sideways(image.size, image)
        if have != command.file_size:
            raise _NotDrawnError(
                f"the mask is {have[0]}x{have[1]} pixels, but the image is "
                f"{command.file_size[0]}x{command.file_size[1]}; send a mask of the same size"
            )
        levels = _levels(image, command.redraws)
        # Resize each pixel's level, so that fully masked pixels stay fully masked.
        mask = levels.resize(_swap_if_sideways(size, image), Image.Resampling.BOX)
        turn = _TURNS.get(_orientation(image))
        return mask if turn is None else mask.transpose(turn)


def _levels(image: Image.Image, redraws: str) -> Image.Image:
    """Returns how transparent or how white each pixel is, from 0 to 255. Works in strips."""
    levels = Image.new("L", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(image.height, top + rows)))
        levels.paste(_transparent(strip) if redraws == "transparent" else _white(strip), (0, top))
    return levels


def _transparent(strip: Image.Image) -> Image.Image:
    strip = _with_8_bits(strip) if strip.mode.startswith("I;16") else strip
    if not strip.has_transparency_data:
        raise _NotDrawnError(
            "the mask has no alpha channel; the area to redraw must be transparent"
        )
    return ImageChops.invert(strip.convert("RGBA").getchannel("A"))


def _white(strip: Image.Image) -> Image.Image:
    return _flat(strip).convert("L")


def _blur_inward(mask: Image.Image, radius: float) -> Image.Image:
    """Returns the mask with soft edges. Pixels that were 0 stay 0.

    Half of a Gaussian edge lies inside the mask. The edge is stretched so that a straight edge is 0
    at the boundary and reaches 255 three radii inside.

    Raises:
        _NotDrawnError: the blurred mask is empty.
    """
    if not radius:
        return mask
    soft = mask.filter(ImageFilter.GaussianBlur(radius)).point(_INNER_HALF)
    blurred = ImageChops.darker(mask, soft)
    if blurred.getbbox() is None:
        raise _NotDrawnError(
            f"with mask_blur {radius:g}, nothing is left of the mask; use a smaller value"
        )
    return blurred


def size_like(width: int, height: int, limits: SourceLimits) -> tuple[int, int]:
    """Returns a size with the source's aspect ratio and the model's default pixel count.

    A smaller source keeps its pixel count unless the limits enlarge it.
    """
    scale = math.sqrt(limits.width * limits.height / (width * height))
    if not limits.enlarges:
        scale = min(scale, 1.0)
    step, max_pixels = limits.multiple, limits.largest_pixels

    def fit(length: int, longest: int) -> int:
        return max(step, min(round(length * scale), longest) // step * step)

    fitted_width = fit(width, max_pixels // step)
    return fitted_width, fit(height, max_pixels // fitted_width)


def _open_image(data: bytes, formats: tuple[str, ...]) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=formats)
    if image.width * image.height > SOURCE_LIMIT_PIXELS:
        limit = f"the image exceeds the maximum of {SOURCE_LIMIT_PIXELS // 1_000_000} megapixels"
        raise _TooLargeError(f"{image.width}x{image.height} pixels; {limit}")
    if isinstance(image, JpegImageFile):
        _check_scans(data)
    return image


def _without_metadata(data: bytes) -> bytes:
    """Removes a PNG's chunks that don't affect its pixels, because they could contain errors.

    Other files are returned unchanged.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return data
    parts: list[bytes | memoryview] = [_PNG_SIGNATURE]
    at, is_shorter = len(_PNG_SIGNATURE), False
    while at + 12 <= len(data):
        size_bytes, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + size_bytes
        is_kept = kind[:1].isupper() or kind in _PNG_CHUNKS
        if is_kept and (kind != b"iCCP" or _is_profile(data[at + 8 : end - 4])):
            parts.append(memoryview(data)[at:end])
        else:
            is_shorter = True
        at = end
    return b"".join(parts) if is_shorter else data


def _is_profile(chunk: bytes) -> bool:
    """True if an iCCP chunk can be read: a name, 0, a method, and a zlib-compressed profile."""
    name, _, packed = chunk.partition(b"\0")
    if not 0 < len(name) < 80:
        return False
    reader = zlib.decompressobj()
    try:
        reader.decompress(packed[1:], _MAX_PROFILE_BYTES)
    except zlib.error:
        return False
    return reader.eof


def _scale_transparent_color(image: Image.Image) -> None:
    """Adjusts a PNG's transparent color (tRNS) to the bit depth its pixels will have.

    Raises:
        _NotDrawnError: the PNG has 16 bits per channel. Pillow keeps only eight of those bits, so
            other colors would become transparent too.
    """
    tile: Any = next(iter(getattr(image, "tile", ())), None)
    if image.format != "PNG" or tile is None or "transparency" not in image.info:
        return
    if tile.args == "RGB;16B":
        raise _NotDrawnError(
            "PNGs with 16 bits per channel and a transparent color (tRNS) are not "
            "supported; send the image with an alpha channel or with 8 bits per channel"
        )
    if highest := _DEPTHS.get(tile.args):
        image.info["transparency"] = image.info["transparency"] * 255 // highest


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, from 1 to 8, or 1 (upright) if there is none."""
    try:
        tag = image.getexif().get(ExifTags.Base.Orientation, 1)
        # Values with a nonstandard type arrive as bytes or in a tuple.
        (tag,) = tag if isinstance(tag, bytes | tuple) else (tag,)
        orientation = int(tag)
    except Exception:
        # Unreadable metadata never makes an image invalid, so all errors from Pillow's reader are
        # caught here.
        return 1
    return orientation if orientation in _TURNS else 1


def _target(image: Image.Image, shape: tuple[int, int], command: PrepareSource) -> tuple[int, int]:
    """Returns the output width and height, in the displayed orientation."""
    width, height = _swap_if_sideways(shape, image)
    return _inner(command) or size_like(width, height, command.limits)


def _swap_if_sideways(size: tuple[int, int], image: Image.Image) -> tuple[int, int]:
    """Converts `size` between the display and file orientations, in either direction."""
    return (size[1], size[0]) if _orientation(image) in _SIDEWAYS else size


def _cost_bytes(
    image: Image.Image, shape: tuple[int, int], target: tuple[int, int] | None = None
) -> int:
    """Returns the maximum memory needed for the work, in bytes, based on measurements.

    Pillow uses four bytes per pixel in most modes.
    """
    pixels = image.width * image.height
    decoded = _SMALL_MODES.get(image.mode, 4) * pixels
    loading = decoded
    if image.format in ("WEBP", "AVIF"):
        loading = 16 * pixels
    elif image.info.get("progressive"):
        # A progressive JPEG is stored as full-size two-byte coefficients, no matter what size it is
        # decoded to.
        loading += 8 * shape[0] * shape[1]
    # The orientation may come after the pixels, so allow for either orientation.
    targets = [target, target[::-1]] if target else []
    resized_bytes = max(
        [_compute_reduced_bytes(image.size, size) for size in targets], default=4 * pixels
    )
    return WORKING_BYTES + max(loading, decoded + resized_bytes)


def _compute_reduced_bytes(have: tuple[int, int], want: tuple[int, int]) -> int:
    """Returns the memory `_reduce` needs to average, resample in both directions, and rotate."""
    across, down = _factors(have, want)
    height = math.ceil(have[1] / down)
    return 4 * (math.ceil(have[0] / across) * height + want[0] * height + 2 * want[0] * want[1])


def _factors(have: tuple[int, int], want: tuple[int, int]) -> tuple[int, int]:
    """Returns how many pixels to average into one, horizontally and vertically."""
    return max(1, int(have[0] / want[0] / REDUCING_GAP)), max(
        1, int(have[1] / want[1] / REDUCING_GAP)
    )


def _reduce(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Returns the image resized to `size`, without alpha: in RGB, or in CMYK if it has a profile.

    Works in strips to avoid a second full copy in memory.
    """
    across, down = _factors(image.size, size)
    width, height = image.size
    mode = "CMYK" if image.mode == "CMYK" and "icc_profile" in image.info else "RGB"
    small = Image.new(mode, (math.ceil(width / across), math.ceil(height / down)))
    rows = max(1, STRIP_PIXELS // width // down) * down
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(height, top + rows)))
        strip = strip if mode == "CMYK" else _flat(strip)
        small.paste(strip.reduce((across, down)), (0, top // down))
    return small.resize(size, Image.Resampling.LANCZOS, box=(0, 0, width / across, height / down))


def _in_srgb(image: Image.Image, source: Image.Image) -> Image.Image:
    """Returns `image` in sRGB, using the source file's ICC profile if it is suitable.

    Without a profile, colors are assumed to be sRGB, as in browsers.
    """
    profile = source.info.get("icc_profile")
    if not profile:
        return image
    try:
        icc = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = _PROFILE_MODES.get(icc.profile.xcolor_space, "")
        if mode == "L" and source.mode in ("L", "LA", "1", "I;16"):
            image = image.convert("L")
        if mode == image.mode:
            turned = ImageCms.profileToProfile(
                image, icc, _SRGB, ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB"
            )
            return turned or image.convert("RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):
        pass  # an unreadable profile is ignored, as in browsers
    return image.convert("RGB")


def _flat(image: Image.Image) -> Image.Image:
    """Returns the image composited onto a white background, without transparency."""
    if image.mode in ("F", "I"):
        raise _NotDrawnError(
            "32 bits per channel are not supported; send the image with 8 or 16 bits per channel"
        )
    if image.mode.startswith("I;16"):
        image = _with_8_bits(image)
    if image.mode == "LAB":
        lab = ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(image, lab, _SRGB, outputMode="RGB") or image
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Converts a 16-bit gray image to 8 bits, with alpha if one of the grays is transparent.

    Without this, Pillow would turn all values above 255 white.
    """
    wide = image.convert("I")  # the mode that accepts lookup tables of 65,536 entries
    gray = wide.point(_TO_8_BITS, "L")
    clear = image.info.get("transparency")
    if clear is None:
        return gray
    alpha = wide.point([0 if value == clear else 255 for value in range(65536)], "L")
    return Image.merge("LA", (gray, alpha))


def _save(image: Image.Image, output_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, output_format, **options)
    return buffer.getvalue()


def main() -> int:
    """Serves the socket whose file descriptor is the argument, until the API closes it."""
    # The API handles signals to the process group (Ctrl-C, SIGTERM): it drains, then closes the
    # socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # not available on every system
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(ConnectionError),  # the API closed the socket
    ):
        while True:
            _serve_one(connection)
    return 0


def _serve_one(connection: socket.socket) -> None:
    def reserve(cost_bytes: int) -> None:
        _send(connection, HeaderRead(cost_bytes))
        if not isinstance(_read(connection)[0], Proceed):
            raise RuntimeError("expected Proceed after HeaderRead; this is a bug")
        if is_of_caller:
            _limit_memory(cost_bytes)

    command, data = _read(connection)
    if isinstance(command, Proceed):
        raise RuntimeError("Proceed is only valid after HeaderRead; this is a bug")
    is_of_caller = isinstance(command, PrepareSource | PrepareMask)
    _limit_memory(ADDRESS_SPACE_BYTES)
    _bound_cpu_time(CPU_LIMIT_S if is_of_caller else RESULT_CPU_LIMIT_S)
    _send(connection, *run_command(command, data, reserve))


def _limit_memory(more_bytes: int) -> None:
    """Limits this process to `more_bytes` of additional address space.

    The total is limited to ADDRESS_SPACE_BYTES.

    A file's header may declare fewer pixels than its data has. For example, a 64 x 64 pixel AVIF
    image whose AV1 frame is 8000 x 8000 takes five times its reservation.
    """
    with contextlib.suppress(ValueError, OSError):  # not available on every system
        with open("/proc/self/statm", "rb") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limit_bytes = min(ADDRESS_SPACE_BYTES, used_bytes + more_bytes + SPARE_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, ADDRESS_SPACE_BYTES))


def _bound_cpu_time(limit_s: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + limit_s, hard))


def _read(connection: socket.socket) -> tuple[CodecRequest, bytes]:
    frame_bytes, data_bytes = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    return decode_request(_exactly(connection, frame_bytes)), _exactly(connection, data_bytes)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes.

    Raises:
        ConnectionError: the API closed the socket.
    """
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the API closed the socket")
        rest = rest[count:]
    return bytes(data)


def _send(connection: socket.socket, reply: CodecReply, data: bytes = b"") -> None:
    connection.sendall(frame_header(reply, len(data)))
    connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
