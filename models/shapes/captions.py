"""Describes a scene in words, in one of many wordings."""

from __future__ import annotations

import random

from models.shapes.world import USUAL_BACKGROUND, DrawnShape, Scene

_OPENINGS = ("", "", "", "a picture of ", "a drawing of ", "draw ", "there is ", "please draw ")
_PLACES: dict[str, tuple[str, ...]] = {
    "center": ("", "", "in the middle", "in the center"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "left": ("on the left", "at the left"),
    "right": ("on the right", "at the right"),
    "top left": ("in the top left corner", "at the top left"),
    "top right": ("in the top right corner", "at the top right"),
    "bottom left": ("in the bottom left corner", "at the bottom left"),
    "bottom right": ("in the bottom right corner", "at the bottom right"),
}
_RELATIONS: dict[str, tuple[str, ...]] = {
    "left of": (
        "{a} left of {b}",
        "{a} to the left of {b}",
        "{b} right of {a}",
        "{b} to the right of {a}",
        "{a} on the left and {b} on the right",
    ),
    "above": (
        "{a} above {b}",
        "{a} over {b}",
        "{b} below {a}",
        "{b} under {a}",
        "{a} at the top and {b} at the bottom",
    ),
    "beside": ("{a} and {b}", "{a} beside {b}", "{a} next to {b}", "{b} and {a}"),
}


def tell(scene: Scene, rng: random.Random) -> str:
    """Returns a caption of the scene. `rng` picks the wording."""
    figures = [_figure(figure, rng) for figure in scene.figures]
    if scene.relation is None:
        scene_text = f"{figures[0]} {rng.choice(_PLACES[scene.place or 'center'])}".rstrip()
    else:
        scene_text = rng.choice(_RELATIONS[scene.relation]).format(a=figures[0], b=figures[1])
    ground = _background(scene.background, rng)
    if ground.startswith("on ") and rng.random() < 0.15:
        return f"{ground}, {scene_text}"
    comma = "," if ground and not ground.startswith("on ") else ""
    return f"{rng.choice(_OPENINGS)}{scene_text}{comma} {ground}".rstrip()


def _figure(figure: DrawnShape, rng: random.Random) -> str:
    sizes = {"small": ("small", "small", "little"), "medium": ("",), "large": ("large", "big")}
    article = "an" if figure.size == "medium" and figure.color == "orange" else "a"
    return " ".join(
        word
        for word in (article, rng.choice(sizes[figure.size]), figure.color, figure.shape)
        if word
    )


def _background(name: str, rng: random.Random) -> str:
    if name == USUAL_BACKGROUND and rng.random() < 0.5:
        return ""
    return rng.choice(
        (f"on a {name} background", f"on a {name} background", f"on {name}", f"{name} background")
    )
