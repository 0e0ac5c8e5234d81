"""ControlNet maps: edges as OpenCV finds them, coarse images, and unchanged images."""

import hashlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw

from shared.errors import BadInput
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from shared.models.image_entry import Control, ImageDefaults
from shared.models.tasks.image import ControlInput, ImageInput
from workers.models.base import PreparedImage
from workers.models.image.preprocessing import ImagePreparer, edges, map_of

Pixels = npt.NDArray[np.uint8]


def noise() -> Pixels:
    return np.random.default_rng(7).integers(0, 256, (37, 53, 3), np.uint8)


def waves() -> Pixels:
    y, x = np.mgrid[:64, :96]
    return np.stack([x * x // 9 + y, x * y // 11, (x + 2 * y) * 3], axis=2).astype(np.uint8)


def figures() -> Pixels:
    image = Image.new("RGB", (64, 64), (205, 205, 205))
    pen = ImageDraw.Draw(image)
    pen.rectangle((8, 8, 30, 40), fill=(35, 70, 215))
    pen.polygon([(40, 10), (60, 50), (34, 44)], fill=(250, 225, 40))
    return np.asarray(image)


def digest(found: Pixels) -> str:
    return hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()[:16]


OF_OPENCV = {
    ("noise", 300, 900): "e09d849667c6bb7f",
    ("noise", 600, 1200): "2369fe1fe55bc727",
    ("waves", 100, 200): "a6f26ebfe8ead56c",
    ("waves", 50, 400): "a6f26ebfe8ead56c",
    ("figures", 100, 200): "7941d341de3fb354",
    ("figures", 50, 400): "7941d341de3fb354",
}
"""Digests of maps from `cv2.Canny(image, low, high)` in OpenCV 5.0.0."""


@pytest.mark.parametrize(("kind", "low", "high"), OF_OPENCV)
def test_edges_are_those_of_opencv(kind: str, low: int, high: int) -> None:
    image = {"noise": noise, "waves": waves, "figures": figures}[kind]()
    found = edges(image, low, high)
    assert 0 < np.count_nonzero(found) < found.size / 2
    assert digest(found) == OF_OPENCV[kind, low, high]


def test_picture_of_one_color_has_no_edges() -> None:
    assert not edges(np.full((16, 16, 3), 77, np.uint8), 0, 0).any()


def test_preprocessors_make_maps_of_pictures() -> None:
    image = Image.fromarray(figures())
    canny = Control(source="local:a", preprocessor="canny", canny_low=50, canny_high=100)
    outline = np.asarray(map_of(image, canny))
    assert np.array_equal(outline, np.stack([edges(figures(), 50, 100)] * 3, axis=2))
    plain = Control(source="local:a")
    assert map_of(image, plain) is image
    tile = Control(source="local:a", preprocessor="tile", tile_factor=8)
    coarse = np.asarray(map_of(image, tile)).astype(int)
    assert coarse.shape == figures().shape
    steepest = [np.abs(np.diff(one.astype(int), axis=1)).max() for one in (coarse, figures())]
    assert steepest[0] < steepest[1] / 2
    assert np.abs(coarse.mean(axis=(0, 1)) - figures().mean(axis=(0, 1))).max() < 3
    same = map_of(image, Control(source="local:a", preprocessor="tile"))
    assert np.array_equal(np.asarray(same), figures())


def png(size: tuple[int, int] = (32, 32)) -> Blob:
    data = io.BytesIO()
    Image.fromarray(figures()).resize(size).save(data, "PNG")
    return Blob("image/png", data.getvalue())


BOUNDS = ImageDefaults(controls={"edges": Control(source="local:a", preprocessor="canny")})


def drawing(control: ControlInput) -> ImageInput:
    return ImageInput("a", 64, 48, 4, 2.0, 1, "ddim", control=control)


def test_preparer_fits_the_picture_to_the_image() -> None:
    given = ControlInput("edges", "", png(), 0.5, start=0.2, end=0.9)
    (item,) = ImagePreparer(BOUNDS, is_stepped=True).prepare([drawing(given)])
    assert isinstance(item, PreparedImage)
    (control,) = item.controls
    assert len(control.map) == 3 * 64 * 48
    assert set(control.map) == {0, 255}
    assert (control.name, control.scale, control.start, control.end) == ("edges", 0.5, 0.2, 0.9)


@pytest.mark.parametrize(
    ("control", "field", "reason"),
    [
        (ControlInput("pose", "", png(), 1.0), "control", "use one of edges"),
        (
            ControlInput("edges", "", Blob("image/png", b"x"), 1.0),
            "control_image",
            "one of these formats",
        ),
        (
            ControlInput("edges", "", png(), 1.0, 0.5, 0.5),
            "control_guidance_start",
            "must be less than",
        ),
    ],
    ids=["name", "image", "part"],
)
def test_preparer_refuses_by_name(control: ControlInput, field: str, reason: str) -> None:
    (refused,) = ImagePreparer(BOUNDS, is_stepped=True).prepare([drawing(control)])
    assert isinstance(refused, BadInput)
    assert refused.field == field
    assert reason in refused.message


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ({"controls": {"edges": {"source": "flow:a"}}}, "pattern"),
        ({"controls": {"edges": {"source": "edges"}}}, "pattern"),
        ({"controls": {"edges": {}}}, "source"),
        ({"controls": {"an edge": {"source": "local:a"}}}, "pattern"),
        ({"controls": {"edges": {"source": "local:a", "preprocessor": "hed"}}}, "'none', 'canny'"),
        (
            {"controls": {"edges": {"source": "local:a", "canny_low": 300}}},
            "must not exceed canny_high",
        ),
        ({"controls": {"edges": {"source": "local:a", "scale": 3}}}, "less than or equal to 2"),
        ({"controls": {"edges": {"source": "local:a", "revision": 1.1}}}, "must be quoted"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_catalog_refuses_by_name(catalog: Catalog, image: dict[str, object], reason: str) -> None:
    entry = catalog.default("image").model_dump()
    with pytest.raises(ValueError, match=reason):
        Model.model_validate(entry | {"image": entry["image"] | image})


def test_version_of_a_control_changes_with_each_field_that_decides_results() -> None:
    usual: dict[str, Any] = {"source": "local:a", "preprocessor": "canny"}
    changes: dict[str, Any] = {
        "source": "local:b",
        "revision": "2",
        "preprocessor": "tile",
        "canny_low": 50,
        "canny_high": 300,
        "tile_factor": 2.0,
    }
    assert changes.keys() == Control.model_fields.keys() - {"scale"}
    others = [usual, *(usual | {name: value} for name, value in changes.items())]
    assert len({Control(**other).version for other in others}) == len(others)
    assert Control(**usual, scale=0.5).version == Control(**usual).version
