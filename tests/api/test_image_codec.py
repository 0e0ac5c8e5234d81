"""Images from untrusted callers: intact, unusual, and broken in every possible way."""

import base64
import io
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from api.inputs.codec_protocol import (
    CodecError,
    EncodeImage,
    PrepareSource,
    SourceLimits,
    SourcePrepared,
)
from api.inputs.codec_server import MAX_SCANS, SOURCE_LIMIT_PIXELS, run_command, size_like
from api.inputs.image_codec import BASE64_CHUNK, data_of_uri
from shared.errors import BadInput
from shared.models.tasks.image import ImageInput
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.hostile_jpeg import RESERVED_MARKER, hide_scans, repeat_scans
from tests.tiers import examples

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
LIMITS = SourceLimits(width=64, height=64, multiple=8, largest_pixels=64 * 64)


@pytest.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path_factory.mktemp("api"))) as running:
        yield running


def _encoded(kind: str, mode: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = Image.radial_gradient("L").resize((48, 32)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 3
    image.save(buffer, kind, exif=exif, **options)
    return buffer.getvalue()


WHOLE = [
    _encoded(kind, mode, **options)
    for kind, mode, options in [
        ("png", "RGBA", {}),
        ("png", "P", {}),
        ("png", "I;16", {}),
        ("jpeg", "CMYK", {}),
        ("jpeg", "L", {}),
        ("jpeg", "RGB", {"progressive": True}),
        ("webp", "RGBA", {}),
    ]
]


def _prepared(data: bytes, size: tuple[int, int] | None) -> tuple[object, Image.Image | None]:
    answer, png = run_command(PrepareSource(size, LIMITS), data, lambda cost_bytes: None)
    return answer, Image.open(io.BytesIO(png)) if png else None


@pytest.mark.parametrize("data", WHOLE)
async def test_every_kind_of_image_is_taken(api: ApiUnderTest, data: bytes) -> None:
    prompt = str(hash(data))
    response = await api.http.post(
        "/v1/images/edits", files={"image": data}, data={"prompt": prompt, "size": "48x32"}
    )
    assert response.status_code == 200, response.text
    (given,) = [item.input for item in api.worker.items if item.input.prompt == prompt]  # type: ignore[union-attr]
    assert isinstance(given, ImageInput)
    assert given.image is not None
    assert given.image.data is not None
    with Image.open(io.BytesIO(given.image.data)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (48, 32))


# Pillow warns about broken EXIF data and continues without it, as intended.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=examples(150), deadline=None)
@given(
    whole=st.sampled_from(WHOLE),
    edits=st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=0, max_size=4)), max_size=6),
    keep=st.floats(0.05, 1),
)
def test_broken_image_is_refused_or_drawn_never_worse(
    whole: bytes, edits: list[tuple[float, bytes]], keep: float
) -> None:
    broken = bytearray(whole)
    for place, patch in edits:
        start = int(place * len(broken))
        broken[start : start + len(patch)] = patch
    answer, drawn = _prepared(bytes(broken[: int(keep * len(broken))]), (8, 8))
    assert isinstance(answer, CodecError) or (
        isinstance(answer, SourcePrepared)
        and (answer.width, answer.height) == (8, 8)
        and drawn is not None
        and drawn.size == (8, 8)
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png_with(header: tuple[int, int], *chunks: bytes) -> bytes:
    """A PNG that claims a size, with extra chunks between its header and its few pixels."""
    shape = struct.pack(">IIBBBBB", *header, 8, 0, 0, 0, 0)
    pixels = _chunk(b"IDAT", zlib.compress(bytes(9 * 8)))
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", shape)
        + b"".join(chunks)
        + pixels
        + _chunk(b"IEND", b"")
    )


def test_jpeg_with_many_scans_is_refused_before_it_is_decoded() -> None:
    def reserve(cost_bytes: int) -> None:
        raise AssertionError("nothing is decoded")

    data = repeat_scans(4000, 1000)
    assert len(data) < 105_000
    answer, png = run_command(PrepareSource(None, LIMITS), data, reserve)
    assert isinstance(answer, CodecError)
    assert (answer.code, png) == ("invalid_input", b"")
    assert (
        answer.reason
        == "JPEGs with more than 100 scans are not supported; save the image as a baseline JPEG"
    )


def test_jpeg_whose_scans_look_like_a_segment_is_refused() -> None:
    """A decoder reads every scan, so decoding time grows with the number of scans."""

    def reserve(cost_bytes: int) -> None:
        raise AssertionError("nothing is decoded")

    data = hide_scans(64, 2000)
    assert len(data) - data.index(RESERVED_MARKER) < 65_535, "one segment would hold them all"
    answer, _ = run_command(PrepareSource(None, LIMITS), data, reserve)
    assert isinstance(answer, CodecError)
    assert (
        answer.reason
        == "JPEGs with more than 100 scans are not supported; save the image as a baseline JPEG"
    )
    few, _ = _prepared(hide_scans(64, 10), (64, 64))
    assert isinstance(few, SourcePrepared), few


def test_scans_are_counted_in_linear_time() -> None:
    """A 0xFF byte may be preceded by any number of fill bytes. Each is examined once."""
    whole = _encoded("jpeg", "RGB", comment=b"\xff\xda" * (MAX_SCANS + 1))
    filled = whole.removesuffix(b"\xff\xd9") + b"\xff" * 150_000 + b"\x00\xff\xd9"
    begun_s = time.process_time()
    answer, _ = _prepared(filled, (64, 64))
    assert isinstance(answer, SourcePrepared), answer
    assert time.process_time() - begun_s < 2, "it would be 10 s and more in quadratic time"


@pytest.mark.parametrize("kind", ["many scans", "thumbnail", "video behind it"])
def test_jpeg_within_the_limit_of_scans_is_drawn(kind: str) -> None:
    """Bytes that look like a scan don't count as one if they are in metadata or after the image."""
    scan = b"\xff\xda" * 5000
    data = {
        "many scans": repeat_scans(64, MAX_SCANS - 6),
        "thumbnail": _encoded("jpeg", "RGB", comment=scan),
        "video behind it": _encoded("jpeg", "RGB", progressive=True) + scan,
    }[kind]
    answer, _ = _prepared(data, (64, 64))
    assert isinstance(answer, SourcePrepared), answer


@pytest.mark.parametrize("size", [(5000, 5001), (1, SOURCE_LIMIT_PIXELS + 1), (30000, 30000)])
def test_too_many_pixels_are_refused_by_the_header_alone(size: tuple[int, int]) -> None:
    def never(cost_bytes: int) -> None:
        raise AssertionError("nothing is to be decoded")

    answer, _ = run_command(PrepareSource((8, 8), LIMITS), _png_with(size), never)
    assert isinstance(answer, CodecError)
    assert answer.code == "input_too_large"
    assert "megapixels" in answer.reason


def _animated(kind: str) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(250)]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], lossless=True)
    return buffer.getvalue()


@cache
def _blown_up() -> bytes:
    """60 MB when inflated."""
    return zlib.compress(bytes(60_000_000), 9)


# Created by the tests themselves; otherwise, each process in a test run would create them during
# collection.
@pytest.mark.parametrize(
    ("make", "is_taken"),
    [
        (partial(_animated, "png"), True),
        (partial(_animated, "webp"), True),
        (partial(_animated, "gif"), True),
        (partial(_animated, "tiff"), True),
        (partial(_animated, "avif"), True),
        (lambda: _png_with((8, 8)), True),
        (lambda: _png_with((8, 8), _chunk(b"iCCP", b"a\0\0" + _blown_up())), True),
        (lambda: _png_with((8, 8), _chunk(b"zTXt", b"a\0\0" + _blown_up())), True),
        (lambda: _png_with((8, 8), *[_chunk(b"tEXt", b"a\0" + bytes(1000))] * 5000), True),
        # It claims to have more pixels than it does.
        (lambda: _png_with((4000, 4000)), False),
        (lambda: _png_with((0, 8)), False),
        (lambda: b"GIF89a" + bytes(100), False),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", False),
        (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', False),
    ],
)
def test_what_is_odd_costs_no_more_than_what_is_usual(
    make: Callable[[], bytes], is_taken: bool
) -> None:
    answer, drawn = _prepared(make(), (8, 8))
    assert isinstance(answer, SourcePrepared) == is_taken, answer
    if drawn is not None:
        # The first of many frames.
        assert drawn.getpixel((4, 4)) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("turn", [1, 6])
def test_large_image_is_drawn_as_if_resampled_whole(kind: str, mode: str, turn: int) -> None:
    if (kind, mode) == ("jpeg", "RGBA"):
        return
    whole = Image.merge(
        "RGBA", [Image.linear_gradient("L").rotate(90 * side) for side in range(4)]
    ).resize((900, 700))
    whole = whole.convert(mode)
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    whole.save(buffer, kind, exif=exif, quality=95, lossless=True)
    flat = whole.convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", flat.size, "white"), flat).convert("RGB")
    if turn == 6:
        flat = flat.transpose(Image.Transpose.ROTATE_270)
    answer, drawn = _prepared(buffer.getvalue(), (64, 40))
    assert answer == SourcePrepared(64, 40, file_size=(700, 900) if turn == 6 else (900, 700))
    assert drawn is not None
    expected = np.asarray(flat.resize((64, 40), Image.Resampling.LANCZOS), dtype=int)
    # The two filters ring slightly differently at the ends of the gradients.
    off = np.abs(np.asarray(drawn, dtype=int) - expected)
    assert off.mean() < 1
    assert off.max() < 24


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_results_are_encoded(output_format: str) -> None:
    _, encoded = run_command(EncodeImage(output_format, 80), WHOLE[0], lambda cost_bytes: None)
    with Image.open(io.BytesIO(encoded)) as image:
        assert (image.format, image.size) == (output_format.upper(), (48, 32))


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), step=st.sampled_from([8, 16, 64]))
def test_auto_size_is_always_one_the_model_takes(width: int, height: int, step: int) -> None:
    limits = SourceLimits(width=512, height=512, multiple=step, largest_pixels=512 * 512)
    drawn = size_like(width, height, limits)
    assert all(length >= step and length % step == 0 for length in drawn)
    assert drawn[0] * drawn[1] <= limits.largest_pixels


@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_image_to_look_at_keeps_its_size_or_is_shrunk(width: int, height: int) -> None:
    limits = SourceLimits(1024, 1024, 1, 1024 * 1024, enlarges=False)
    shown = size_like(width, height, limits)
    assert shown[0] * shown[1] <= limits.largest_pixels
    if width * height <= limits.largest_pixels:
        assert shown == (width, height)


PIECE_BYTES = BASE64_CHUNK // 4 * 3


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 2]
)
async def test_data_uri_of_any_length_is_read(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    plain, wrapped = base64.b64encode(data).decode(), base64.encodebytes(data).decode()
    forms = [plain, plain.rstrip("="), wrapped, wrapped.replace("\n", "\r\n").rstrip("=\r\n")]
    for text in forms:
        uri = f"data:image/png;base64,{text}"
        assert await data_of_uri(uri, "image", field="image") == data


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "ab=",
        "a=b=",
        "====",
        "AAA=" * BASE64_CHUNK,
        "A" * BASE64_CHUNK + "%AAA",
        "é",
        "AAAA\nA",
        "\n=",
        "AAAA=",
    ],
)
async def test_data_uri_that_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not valid base64"):
        await data_of_uri(f"data:image/png;base64,{text}", "image", field="image")


MEASURED = """
import sys
from pathlib import Path
from api.inputs.codec_protocol import SourceLimits, PrepareSource, SourcePrepared
from api.inputs.codec_server import run_command

def peak_bytes():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

data, costs = sys.stdin.buffer.read(), []
before = peak_bytes()
prepare = PrepareSource((512, 512), SourceLimits(512, 512, 8, 262144))
answer, _ = run_command(prepare, data, costs.append)
assert isinstance(answer, SourcePrepared), answer
print(costs[0], peak_bytes() - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux tells the peak of a process's memory in a file"
)
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("png", "L", {}),
        ("jpeg", "RGB", {}),
        ("gif", "P", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow(about_s=2))
            for case in (
                ("png", "RGBA", {}),
                ("png", "P", {}),
                ("png", "I;16", {}),
                ("jpeg", "RGB", {"progressive": True, "subsampling": 0}),
                ("jpeg", "CMYK", {"progressive": True}),
                ("webp", "RGBA", {}),
                ("webp", "RGB", {"lossless": True}),
                ("avif", "RGBA", {"speed": 10}),
                ("avif", "RGB", {"speed": 10, "subsampling": "4:4:4"}),
                ("bmp", "RGB", {}),
                ("tiff", "RGB", {"compression": "tiff_lzw"}),
                ("tiff", "CMYK", {"compression": "tiff_adobe_deflate"}),
                ("tiff", "I;16", {}),
            )
        ),
    ],
)
def test_image_takes_no_more_memory_than_is_reckoned(
    kind: str, mode: str, options: dict[str, object]
) -> None:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((3000, 3000)).convert(mode).save(buffer, kind, **options)
    command = [sys.executable, "-c", MEASURED]
    found = subprocess.run(
        command, input=buffer.getvalue(), stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    cost_bytes, taken_bytes = (int(number) for number in found.stdout.split())
    assert taken_bytes <= cost_bytes, (taken_bytes / 9e6, cost_bytes / 9e6)
