"""The world of the images: shapes, colors, sizes, places, relations, and random scenes.

Training starts here: a scene is sampled here, drawn in draw.py and described in captions.py.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

SIDE = 64
"""Pixels per image side."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "orange": (250, 140, 20),
    "yellow": (250, 225, 40),
    "green": (40, 150, 60),
    "cyan": (30, 200, 215),
    "blue": (35, 70, 215),
    "purple": (130, 45, 170),
    "pink": (250, 130, 190),
    "brown": (125, 75, 35),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
"""sRGB of each figure's color."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": COLORS["white"],
    "black": COLORS["black"],
    "gray": (205, 205, 205),
    "light blue": (185, 215, 245),
}
USUAL_BACKGROUND = "white"
"""The color that a caption may omit."""

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = ("small", "medium", "large")
"""A caption omits "medium"."""
RADII_ALONE = {"small": (10.5, 12.0), "medium": (14.5, 16.5), "large": (19.5, 22.0)}
RADII_OF_TWO = {"small": (9.0, 9.8), "medium": (11.0, 11.8), "large": (13.0, 13.5)}
"""Range of a figure's radius: half the side, in pixels, of the square that it fills."""

PLACES: dict[str, tuple[int, int]] = {
    "center": (0, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
"""The place of a single figure: steps right and down of PLACE_STEP pixels from the center."""
PLACE_STEP = 14.0
EDGE = 2.0
"""Pixels that every figure keeps from the edge."""

RELATIONS = ("left of", "above", "beside")
"""Relations of the first figure to the second. "beside" means left or right."""
RELATION_STEP = 15.0
"""Distance of each of two figures from the center, in pixels."""

HELD_OUT_IN = 10
"""One in this many kinds of scenes is never trained on."""


@dataclass(frozen=True)
class DrawnShape:
    """A shape in an image, with its center (x, y from the top left) and radius in pixels."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """The content of an image: one figure at a place, or two in a relation."""

    background: str
    figures: tuple[DrawnShape, ...]
    place: str | None = None
    relation: str | None = None

    @property
    def kind(self) -> str:
        """Returns the scene without its jitter, which a caption can describe."""
        figures = [f"{figure.size} {figure.color} {figure.shape}" for figure in self.figures]
        if self.relation == "beside":
            figures.sort()
        return f"{self.background}: {self.place or self.relation}: {', '.join(figures)}"

    @property
    def is_held_out(self) -> bool:
        """True if this kind of scene is reserved for scoring: a tenth, chosen by its hash."""
        return hashlib.sha256(self.kind.encode()).digest()[0] % HELD_OUT_IN == 0


def sample_scene(
    rng: random.Random, *, held_out: bool = False, figures: int | None = None
) -> Scene:
    """Returns a random scene, of a kind to train on or a held-out one.

    Args:
        rng: only source of randomness. The same state produces the same scene.
        held_out: True for held-out kinds, False for kinds to train on.
        figures: 1 or 2. None means either.
    """
    while True:
        number = figures or rng.choice((1, 2, 2))
        scene = _one(rng) if number == 1 else _two(rng)
        if scene.is_held_out == held_out:
            return scene


def _one(rng: random.Random) -> Scene:
    background = _background(rng)
    place = rng.choice(tuple(PLACES)) if rng.random() < 0.6 else "center"
    right, down = PLACES[place]
    figure = _figure(
        rng, background, RADII_ALONE, (right * PLACE_STEP, down * PLACE_STEP), jitter=2.5
    )
    return Scene(background, (figure,), place=place)


def _two(rng: random.Random) -> Scene:
    background = _background(rng)
    relation = rng.choice(RELATIONS)
    first = (0.0, -RELATION_STEP) if relation == "above" else (-RELATION_STEP, 0.0)
    if relation == "beside" and rng.random() < 0.5:
        first = (RELATION_STEP, 0.0)
    second = (-first[0], -first[1])
    figures = tuple(
        _figure(rng, background, RADII_OF_TWO, offset, jitter=1.0) for offset in (first, second)
    )
    return Scene(background, figures, relation=relation)


def _background(rng: random.Random) -> str:
    return USUAL_BACKGROUND if rng.random() < 0.25 else rng.choice(tuple(BACKGROUNDS))


def _figure(
    rng: random.Random,
    background: str,
    radii: dict[str, tuple[float, float]],
    offset: tuple[float, float],
    jitter: float,
) -> DrawnShape:
    size = rng.choice(("medium", *SIZES))
    radius = rng.uniform(*radii[size])
    least, most = EDGE + radius, SIDE - EDGE - radius
    x, y = (
        min(max(SIDE / 2 + step + rng.uniform(-jitter, jitter), least), most) for step in offset
    )
    color = rng.choice([name for name in COLORS if name != background])
    return DrawnShape(rng.choice(SHAPES), color, size, x, y, radius)
