"""Pictures that strangers send, whole and broken in every way."""

import io
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from api.pictures import SOURCE_LIMIT_PIXELS, Studio, size_like
from shared.catalogue import ImageDefaults
from shared.errors import BadInput, InputTooLarge

DEFAULTS = ImageDefaults(width=64, height=64, largest_pixels=64 * 64)
pytestmark = pytest.mark.anyio


def _encoded(kind: str, mode: str) -> bytes:
    buffer = io.BytesIO()
    picture = Image.radial_gradient("L").resize((48, 32)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 3
    picture.save(buffer, kind, exif=exif)
    return buffer.getvalue()


WHOLE = [
    _encoded(kind, mode)
    for kind, mode in [
        ("png", "RGBA"),
        ("png", "P"),
        ("png", "I;16"),
        ("jpeg", "CMYK"),
        ("jpeg", "L"),
        ("webp", "RGBA"),
    ]
]


@pytest.mark.parametrize("data", WHOLE)
async def test_every_kind_of_picture_is_taken(data: bytes) -> None:
    blob, size = await Studio().prepare_source(data, None, DEFAULTS)
    assert blob.data is not None
    with Image.open(io.BytesIO(blob.data)) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", size)


# Pillow warns about broken EXIF data and goes on without it, which is what we want.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=150, deadline=None)
@given(
    whole=st.sampled_from(WHOLE),
    edits=st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=0, max_size=4)), max_size=6),
    keep=st.floats(0.05, 1),
)
async def test_broken_picture_is_refused_or_drawn_never_worse(
    whole: bytes, edits: list[tuple[float, bytes]], keep: float
) -> None:
    broken = bytearray(whole)
    for place, patch in edits:
        start = int(place * len(broken))
        broken[start : start + len(patch)] = patch
    try:
        blob, _ = await Studio().prepare_source(bytes(broken[: int(keep * len(broken))]), (8, 8), DEFAULTS)
    except BadInput:
        return
    assert blob.data is not None


@pytest.mark.parametrize("size", [(5000, 5001), (1, SOURCE_LIMIT_PIXELS + 1), (30000, 30000)])
async def test_too_many_pixels_are_refused_by_the_header_alone(size: tuple[int, int]) -> None:
    header = _encoded("png", "L")
    at = header.index(b"IHDR") + 4
    claimed = header[:at] + size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big") + header[at + 8 : at + 13]
    checksum = zlib.crc32(claimed[at - 4 :]).to_bytes(4, "big")
    with pytest.raises(InputTooLarge, match="megapixels"):
        await Studio().prepare_source(claimed + checksum + header[at + 17 :], (8, 8), DEFAULTS)


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), step=st.sampled_from([8, 16, 64]))
def test_auto_size_is_always_one_the_model_takes(width: int, height: int, step: int) -> None:
    limits = ImageDefaults(width=512, height=512, largest_pixels=512 * 512, multiple=step)
    drawn = size_like(width, height, limits)
    assert all(length >= step and length % step == 0 for length in drawn)
    assert drawn[0] * drawn[1] <= limits.largest_pixels
