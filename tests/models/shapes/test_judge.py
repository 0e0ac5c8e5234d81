import random

import numpy as np
import pytest

from models.shapes.draw import draw
from models.shapes.judge import UNNAMED, read
from models.shapes.world import BACKGROUNDS, COLORS, SHAPES, DrawnShape, Scene, sample_scene

pytestmark = pytest.mark.slow

WHITE = np.full((64, 64, 3), 250, np.uint8)


def test_judge_is_right_on_99_percent_of_generated_images() -> None:
    rng = random.Random(21)
    right = 0
    for _ in range(500):
        scene = sample_scene(rng)
        reading = read(np.asarray(draw(scene)))
        asked = sorted((figure.shape, figure.color) for figure in scene.figures)
        seen = sorted((figure.shape, figure.color) for figure in reading.figures)
        near = all(
            min(abs(figure.x - other.x) + abs(figure.y - other.y) for other in reading.figures) < 4
            for figure in scene.figures
            if reading.figures
        )
        right += asked == seen and near and reading.background == scene.background
    assert right >= 495


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", ["red", "green", "pink"])
def test_judge_reads_a_figure(shape: str, color: str) -> None:
    figure = DrawnShape(shape, color, "medium", 30.0, 35.0, 12.0)
    (seen,) = read(np.asarray(draw(Scene("gray", (figure,), place="center")))).figures
    assert (seen.shape, seen.color) == (shape, color)
    assert abs(seen.x - 30) < 1.5
    assert abs(seen.y - 35) < 2.5
    assert abs(seen.radius - 12) < 1.5


@pytest.mark.parametrize("background", list(BACKGROUNDS))
def test_empty_image_has_a_background_and_no_figure(background: str) -> None:
    reading = read(np.full((64, 64, 3), BACKGROUNDS[background], np.uint8))
    assert reading.background == background
    assert reading.figures == ()


def test_specks_and_noise_are_no_figures() -> None:
    image = WHITE.copy()
    image[10:13, 10:13] = COLORS["red"]
    assert read(image).figures == ()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert all(figure.shape == UNNAMED for figure in read(noise).figures)


def test_bar_and_blob_have_no_name() -> None:
    image = WHITE.copy()
    image[30:36, 8:56] = COLORS["blue"]
    (bar,) = read(image).figures
    assert (bar.shape, bar.color) == (UNNAMED, "blue")
