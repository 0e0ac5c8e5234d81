"""What the demo says of a picture; the demo as a whole is what `make demo` runs."""

import io

import pytest

from infra.local.demo import what_it_shows
from models.shapes.draw import draw
from models.shapes.world import DrawnShape, Scene

RED_CIRCLE = DrawnShape("circle", "red", "medium", 17.0, 32.0, 10.0)
ORANGE_STAR = DrawnShape("star", "orange", "medium", 47.0, 32.0, 10.0)


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (Scene("white", (RED_CIRCLE,), place="left"), "a red circle on white"),
        (
            Scene("light blue", (RED_CIRCLE, ORANGE_STAR), relation="beside"),
            "a red circle and an orange star on light blue",
        ),
        (Scene("black", (), place="center"), "no figure on black"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_demo_says_what_a_picture_shows(scene: Scene, words: str) -> None:
    png = io.BytesIO()
    draw(scene).save(png, "PNG")
    assert what_it_shows(png.getvalue()) == words
