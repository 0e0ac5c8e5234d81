import io

import numpy as np
import pytest
import torch
from PIL import Image

from workers.models.base import PreparedImage
from workers.models.image.vae import copy_to_host, encode, sources_on

pytestmark = pytest.mark.slow


def with_source(pixels: np.ndarray) -> PreparedImage:
    height, width, _ = pixels.shape
    return PreparedImage(
        key="",
        length=1,
        prompt="",
        negative_prompt="",
        width=width,
        height=height,
        steps=1,
        guidance_scale=1.0,
        seed=0,
        scheduler="ddim",
        strength=0.5,
        source=pixels.tobytes(),
    )


def test_pixels_come_back_as_they_went() -> None:
    given = np.random.default_rng(1).integers(0, 256, (2, 16, 24, 3), np.uint8)
    placed = sources_on(torch.device("cpu"), [with_source(pixels) for pixels in given])
    assert placed.shape == (2, 3, 16, 24)
    assert 0 <= placed.min() <= placed.max() <= 1
    back = copy_to_host(placed).wait()
    assert np.array_equal([image for image in back if image is not None], given)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_only_the_image_that_is_no_number_is_lost(wrong: float) -> None:
    drawn = torch.full((3, 3, 8, 8), 0.5)
    drawn[1, 2, 3, 4] = wrong
    kinds = [None if image is None else int(image[0, 0, 0]) for image in copy_to_host(drawn).wait()]
    assert kinds == [128, None, 128]


def test_a_file_holds_the_pixels() -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (16, 24, 3), np.uint8)
    with Image.open(io.BytesIO(encode(pixels)), formats=["PNG"]) as image:
        assert np.array_equal(np.asarray(image), pixels)
