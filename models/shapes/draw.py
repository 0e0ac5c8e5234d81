"""Draws a scene as an image of 64 x 64 pixels with smooth edges, and many as one array."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from models.shapes.world import BACKGROUNDS, COLORS, SIDE, DrawnShape, Scene

FINER = 4
"""Factor by which scenes are drawn larger and then averaged, to smooth edges."""
RING_HOLE = 0.55
STAR_INNER = 0.42
CROSS_ARM = 0.34
"""Fractions of the radius: hole of a ring, inner corners of a star, half the arms of a cross."""


def draw_many(scenes: Iterable[Scene]) -> npt.NDArray[np.uint8]:
    """Returns RGB pixels, [scenes, 64, 64, 3]."""
    return np.stack([np.asarray(draw(scene)) for scene in scenes])


def draw(scene: Scene) -> Image.Image:
    """Returns the scene in RGB, 64 x 64."""
    image = Image.new("RGB", (SIDE * FINER, SIDE * FINER), BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(image)
    for figure in scene.figures:
        _draw_figure(pen, figure, BACKGROUNDS[scene.background])
    return image.reduce(FINER)


def _draw_figure(
    pen: ImageDraw.ImageDraw, figure: DrawnShape, background: tuple[int, int, int]
) -> None:
    x, y, radius = figure.x * FINER, figure.y * FINER, figure.radius * FINER
    color = COLORS[figure.color]
    if figure.shape in ("circle", "ring"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        if figure.shape == "ring":
            hole = radius * RING_HOLE
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=background)
        return
    pen.polygon(
        [(x + radius * right, y + radius * down) for right, down in _OUTLINES[figure.shape]],
        fill=color,
    )


def _star() -> list[tuple[float, float]]:
    turns = [(n * math.pi / 5, 1.0 if n % 2 == 0 else STAR_INNER) for n in range(10)]
    return [(far * math.sin(turn), -far * math.cos(turn)) for turn, far in turns]


def _cross() -> list[tuple[float, float]]:
    arm = CROSS_ARM
    corner = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    # Each quarter turn maps (right, down) to (-down, right).
    outline = []
    for _ in range(4):
        outline += corner[:]
        corner = [(-down, right) for right, down in corner]
    return outline


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
    "star": _star(),
    "cross": _cross(),
}
"""Corners in radii from the center, to the right and down."""
