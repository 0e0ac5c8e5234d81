"""The score for images whose ground truth is known: drawn by the generator, or wrong on purpose."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from models.shapes.draw import draw
from models.shapes.score import Asked, held_out, score_text
from models.shapes.world import Scene

pytestmark = pytest.mark.slow


class Painter:
    """Imitates a pipeline, but ignores the captions and paints the given scenes in turn."""

    def __init__(self, scenes: list[Scene]) -> None:
        self._scenes = iter(scenes)

    def __call__(self, captions: list[str], **_: Any) -> Any:
        return SimpleNamespace(images=[draw(next(self._scenes)) for _ in captions])


def are_alike(scene: Scene) -> bool:
    return len({(figure.shape, figure.color) for figure in scene.figures}) == 1


def test_right_images_score_full_marks() -> None:
    asked = held_out(60)
    table = score_text(Painter([one.scene for one in asked]), asked)
    assert all(tally.part >= 0.98 for tally in table.values())
    assert table["color right"].of == 90
    assert table["two objects both right"].of == 30
    assert 0 < table["relation right"].of < 30


def test_swapped_figures_miss_the_relation_alone() -> None:
    asked = [
        one for one in held_out(80) if one.scene.relation == "left of" and not are_alike(one.scene)
    ]
    swapped = []
    for one in asked:
        first, second = one.scene.figures
        moved = (replace(first, x=second.x, y=second.y), replace(second, x=first.x, y=first.y))
        swapped.append(replace(one.scene, figures=moved))
    table = score_text(Painter(swapped), asked)
    assert table["relation right"].right == 0
    assert table["two objects both right"].part >= 0.95


def test_images_of_other_captions_score_low() -> None:
    asked = held_out(60)
    others = [one.scene for one in asked]
    random.Random(0).shuffle(others)
    table = score_text(Painter(others), asked)
    assert table["two objects both right"].part < 0.1
    assert table["one object right"].part < 0.2


def test_held_out_captions_are_the_same_each_time() -> None:
    assert held_out(30) == held_out(30)
    assert all(isinstance(one, Asked) and one.scene.is_held_out for one in held_out(30))
