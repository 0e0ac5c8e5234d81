"""Scenes with a masked figure to redraw as another one, and a check by the judge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from models.shapes.captions import tell
from models.shapes.judge import Pixels, read
from models.shapes.world import COLORS, SHAPES, SIDE, DrawnShape, Scene, sample_scene

SEED = 48
MARGIN_PX = 4.0
"""Margin between a figure and the edge of its mask."""
STRENGTH = 0.8
REDRAWN_MIN = 0.85
"""Minimum share that the shipped model must redraw correctly."""


@dataclass(frozen=True)
class Redrawing:
    """A scene, the requested scene, and the mask (L, white is redrawn) of their difference."""

    before: Scene
    after: Scene
    caption: str
    mask: Image.Image
    seed: int


def redrawings(number: int) -> Iterator[Redrawing]:
    """Yields held-out scenes, alternating one and two figures. The first figure is masked."""
    rng = random.Random(SEED)
    for seed in range(number):
        before = sample_scene(rng, held_out=True, figures=1 + seed % 2)
        after = _with_another_figure(before, rng)
        mask = _mask_of(before.figures[0])
        yield Redrawing(before, after, tell(after, rng), mask, seed)


def shows(image: Pixels, scene: Scene) -> bool:
    """True if an image of [height, width, 3] shows exactly the figures of a scene."""
    seen = sorted((figure.color, figure.shape) for figure in read(image).figures)
    return seen == sorted((figure.color, figure.shape) for figure in scene.figures)


def _with_another_figure(scene: Scene, rng: random.Random) -> Scene:
    """Returns the scene with another color and shape for its first figure."""
    old = scene.figures[0]
    others = {old.color, scene.background} | {figure.color for figure in scene.figures}
    color = rng.choice([name for name in COLORS if name not in others])
    shape = rng.choice([name for name in SHAPES if name != old.shape])
    new = DrawnShape(shape, color, old.size, old.x, old.y, old.radius)
    return Scene(scene.background, (new, *scene.figures[1:]), scene.place, scene.relation)


def _mask_of(figure: DrawnShape) -> Image.Image:
    far = figure.radius + MARGIN_PX
    left, right, top, bottom = (
        min(SIDE, max(0, round(middle + way * far)))
        for middle in (figure.x, figure.y)
        for way in (-1, 1)
    )
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(255, (left, top, right, bottom))
    return mask
