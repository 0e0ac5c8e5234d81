import io
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from shared.errors import BadInput, InputTooLarge
from shared.models.blob import Blob
from shared.models.image_entry import ImageDefaults
from shared.models.tasks.embedding import TextInput
from shared.models.tasks.image import ImageInput
from workers.models.base import PreparedImage
from workers.models.image.preprocessing import ImagePreparer

pytestmark = pytest.mark.slow

GOOD = ImageInput(
    prompt="a", width=64, height=64, steps=20, guidance_scale=7.5, seed=1, scheduler="ddim"
)
PREPARER = ImagePreparer(ImageDefaults(largest_pixels=128 * 128, longest_steps=100))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> Blob:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return Blob(f"image/{kind.lower()}", data.getvalue())


def changed(**fields: Any) -> ImageInput:
    return msgspec.structs.replace(GOOD, **fields)


def prepared(value: ImageInput) -> PreparedImage:
    (item,) = PREPARER.prepare([value])
    assert isinstance(item, PreparedImage), item
    return item


IMAGE = encoded(Image.linear_gradient("L").convert("RGB"))


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"width": -64},
        {"height": 65},
        {"steps": 0},
        {"steps": -5},
        {"steps": 101},
        {"steps": 51, "scheduler": "lcm"},
        {"guidance_scale": -1.0},
        {"guidance_scale": float("nan")},
        {"guidance_rescale": 1.1},
        {"guidance_rescale": float("nan")},
        {"clip_skip": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"scheduler": "quickest"},
        {"strength": 0.0, "image": IMAGE},
        {"strength": 1.5, "image": IMAGE},
        {"strength": 0.04, "image": IMAGE},
        {"image": Blob("image/png")},
        {"image": Blob("image/png", b"no image")},
        {"image": Blob("image/png", (IMAGE.data or b"")[:-300])},
        {"image": Blob("image/png", (IMAGE.data or b"")[:60])},
        {"image": encoded(Image.new("RGB", (8, 8)), "BMP")},
    ],
    ids=lambda fields: "-".join(
        f"{name}-{len(value.data or b'')}-bytes" if isinstance(value, Blob) else f"{name}-{value}"
        for name, value in fields.items()
    ),
)
def test_a_bad_field_is_named_and_harms_no_neighbor(fields: dict[str, Any]) -> None:
    first, error, last = PREPARER.prepare([GOOD, changed(**fields), GOOD])
    assert isinstance(error, BadInput)
    assert error.field == next(iter(fields))
    assert isinstance(first, PreparedImage)
    assert first == last


def test_what_is_too_large_says_so() -> None:
    bomb = encoded(Image.new("1", (10_000, 10_000)))
    wide = encoded(Image.new("1", (5_000, 4_000)))
    outcomes = PREPARER.prepare([changed(image=bomb), changed(image=wide), changed(width=1024)])
    assert [type(outcome) for outcome in outcomes] == [InputTooLarge] * 3


def test_a_text_is_no_image_request() -> None:
    (error,) = PREPARER.prepare([TextInput("a")])
    assert isinstance(error, BadInput)


def test_key_of_whole_batches_has_size_and_steps() -> None:
    """Everything else may differ, because each image runs its own pipeline."""
    same = [
        GOOD,
        changed(prompt="b", seed=9, guidance_scale=7.0, scheduler="euler", negative_prompt="c"),
        changed(image=IMAGE, strength=1.0),
    ]
    other = [
        changed(width=72),
        changed(height=72),
        changed(steps=21),
        changed(image=IMAGE, strength=0.5),
    ]
    assert len({prepared(value).key for value in same}) == 1
    assert len({prepared(value).key for value in [GOOD, *other]}) == 1 + len(other)


@pytest.mark.parametrize(("strength", "steps"), [(None, 16), (1.0, 20), (0.5, 10), (0.05, 1)])
def test_work_is_what_strength_leaves(strength: float | None, steps: int) -> None:
    item = prepared(changed(image=IMAGE, strength=strength))
    assert item.length == 64 * 64 * steps


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_source_becomes_rgb_pixels_of_the_size_asked_for(kind: str) -> None:
    item = prepared(
        changed(image=encoded(Image.new("L", (30, 90), 200), kind), width=32, height=16)
    )
    pixels = np.frombuffer(item.source or b"", np.uint8).reshape(16, 32, 3)
    assert np.abs(pixels.astype(int) - 200).max() <= 2


def test_a_photograph_is_turned_upright() -> None:
    lying = Image.new("RGB", (64, 32))
    lying.paste((255, 255, 255), (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned, so the left side of the file is the top of the image
    item = prepared(changed(image=encoded(lying, "PNG", exif=exif), width=32, height=64))
    pixels = np.frombuffer(item.source or b"", np.uint8).reshape(64, 32, 3)
    assert pixels[:30].min() == 255
    assert pixels[34:].max() == 0
