"""Detects background, figures, colors, shapes and places by plain image processing.

It uses neither a model nor the drawing code: it finds colors by their nearest name, and shapes by
how well they cover outlines defined here as inequalities. After training, score.py uses it to check
the pipeline's images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from models.shapes.world import BACKGROUNDS, COLORS

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CONTRAST = 45.0
"""Minimum difference from the background, in RGB steps, for a pixel of a figure."""
AREA_MIN = 25
"""Smaller groups of pixels are specks. The smallest figure, a star, has about 50."""
COVER_MIN = 0.65
"""Minimum overlap with an outline (intersection over union) for a shape to be recognized."""
GRID = 48
"""Points per side at which figures are compared with the outlines."""
UNNAMED = "unnamed"
COLORED_MAX = 0.01
"""Maximum share of colored pixels in an ink image: channels that differ by more than CONTRAST."""


@dataclass(frozen=True)
class DetectedShape:
    """A detected figure: center x, y in pixels from the top left; half its longer side."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class DetectedScene:
    """The figures in an image, from left to right."""

    background: str
    figures: tuple[DetectedShape, ...]


def read(image: Pixels) -> DetectedScene:
    """Analyzes an image of [height, width, 3]."""
    pixels = image.astype(np.float64)
    ground = _ground(pixels)
    labels, number = ndimage.label(_is_far(pixels, ground))
    figures = [_figure(pixels, ground, labels == label) for label in range(1, number + 1)]
    return DetectedScene(
        _nearest(ground, BACKGROUNDS), tuple(sorted((f for f in figures if f), key=lambda f: f.x))
    )


def is_ink(image: Pixels) -> bool:
    """True if an image of [height, width, 3] shows black figures on white, without any color."""
    seen = read(image)
    levels = image.astype(np.int64)
    is_colored = levels.max(axis=2) - levels.min(axis=2) > CONTRAST
    return (
        seen.background == "white"
        and bool(seen.figures)
        and all(figure.color == "black" for figure in seen.figures)
        and float(is_colored.mean()) < COLORED_MAX
    )


def silhouette(image: Pixels) -> Mask:
    """Returns the pixels of figures, [height, width], in an image of [height, width, 3]."""
    pixels = image.astype(np.float64)
    return _is_far(pixels, _ground(pixels))


def overlap(first: Mask, second: Mask) -> float:
    return float((first & second).sum() / max((first | second).sum(), 1))


def _ground(pixels: Floats) -> Floats:
    """Returns the background color, [3]."""
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground: Floats = np.median(edge, axis=0)
    return ground


def _is_far(pixels: Floats, ground: Floats) -> Mask:
    far: Mask = np.linalg.norm(pixels - ground, axis=2) > CONTRAST
    return far


def _figure(pixels: Floats, ground: Floats, part: Mask) -> DetectedShape | None:
    """Returns the figure in this connected part of the image, or None for a speck."""
    if part.sum() < AREA_MIN:
        return None
    inner = ndimage.binary_erosion(part)
    color = np.median(pixels[inner if inner.sum() >= AREA_MIN // 3 else part], axis=0)
    # Edge pixels are between the two colors: the figure ends halfway.
    along = (pixels - ground) @ (color - ground) / max(float(np.sum((color - ground) ** 2)), 1.0)
    solid = (along > 0.5) & ndimage.binary_dilation(part)
    if solid.sum() < AREA_MIN:
        return None
    rows, columns = np.nonzero(solid)
    top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    shape = _shape(
        np.clip(along[top:bottom, left:right], 0.0, 1.0)
        * ndimage.binary_dilation(solid)[top:bottom, left:right]
    )
    return DetectedShape(
        shape,
        _nearest(color, COLORS),
        x=float(left + right) / 2,
        y=float(top + bottom) / 2,
        radius=float(max(bottom - top, right - left)) / 2,
    )


def _nearest(color: Floats, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: math.dist(color.tolist(), names[name]))


def _shape(cover: Floats) -> str:
    """Returns the outline that matches the figure in this box best.

    The box must be about as wide as high.
    """
    height, width = cover.shape
    if not 0.7 < width / height < 1.43:
        return UNNAMED
    grid = (
        ndimage.zoom(cover, (GRID / height, GRID / width), order=1, grid_mode=True, mode="nearest")
        > 0.5
    )
    name, best = max(
        ((name, overlap(grid, outline)) for name, outline in _OUTLINES.items()),
        key=lambda pair: pair[1],
    )
    return name if best >= COVER_MIN else UNNAMED


def _outlines() -> dict[str, Mask]:
    """Returns each shape in its box, by inequalities on x (right) and y (down) from -1 to 1."""
    steps = (np.arange(GRID) + 0.5) / GRID * 2 - 1
    x, y = np.meshgrid(steps, steps)
    far = np.hypot(x, y)
    inequalities: dict[str, Callable[[], Mask]] = {
        "circle": lambda: far <= 1,
        "square": lambda: far < 9,
        "triangle": lambda: np.abs(x) <= (y + 1) / 2,
        "ring": lambda: (far <= 1) & (far >= 0.55),
        "cross": lambda: (np.abs(x) <= 0.34) | (np.abs(y) <= 0.34),
        "star": lambda: _star(x, y),
    }
    return {name: inside() for name, inside in inequalities.items()}


def _star(x: Floats, y: Floats) -> Mask:
    """Five points, one of them up, stretched to the box.

    In polar coordinates, a straight edge leads from each point to the next inner corner.
    """
    across, up, down = math.sin(2 * math.pi / 5), 1.0, math.cos(math.pi / 5)
    right, lower = x * across, (y + 1) / 2 * (up + down) - up
    turn = np.abs((np.arctan2(right, -lower) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    inner = 0.42
    # The line through the point (1 at angle 0) and the inner corner (0.42 at pi / 5), in polar
    # form.
    edge = (
        inner
        * math.sin(math.pi / 5)
        / (
            np.sin(turn) * (1 - inner * math.cos(math.pi / 5))
            + np.cos(turn) * inner * math.sin(math.pi / 5)
        )
    )
    return np.hypot(right, lower) <= edge


_OUTLINES = _outlines()
