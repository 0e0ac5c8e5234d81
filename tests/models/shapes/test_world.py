import random
from collections import Counter

import numpy as np
import pytest

from models.shapes.captions import tell
from models.shapes.draw import draw, draw_many
from models.shapes.train import make_tokenizer
from models.shapes.world import (
    BACKGROUNDS,
    COLORS,
    RELATIONS,
    SHAPES,
    SIDE,
    DrawnShape,
    Scene,
    sample_scene,
)

pytestmark = pytest.mark.slow


def scenes(number: int, seed: int = 3, *, held_out: bool = False) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, held_out=held_out) for _ in range(number)]


def test_same_seed_gives_the_same_scenes_captions_and_pixels() -> None:
    first, again = scenes(20), scenes(20)
    assert first == again != scenes(20, seed=4)
    assert [tell(scene, random.Random(1)) for scene in first] == [
        tell(scene, random.Random(1)) for scene in again
    ]
    assert np.array_equal(draw_many(first), draw_many(again))


def test_held_out_scenes_are_of_kinds_that_training_never_sees() -> None:
    trained, kept = scenes(3000), scenes(300, held_out=True)
    assert not {scene.kind for scene in trained} & {scene.kind for scene in kept}


def test_beside_is_one_kind_in_both_orders() -> None:
    red = DrawnShape("circle", "red", "small", 17, 32, 7)
    blue = DrawnShape("star", "blue", "large", 47, 32, 13)
    assert (
        Scene("white", (red, blue), relation="beside").kind
        == Scene("white", (blue, red), relation="beside").kind
    )
    assert (
        Scene("white", (red, blue), relation="left of").kind
        != Scene("white", (blue, red), relation="left of").kind
    )


def test_whole_world_is_sampled_and_nothing_leaves_the_image() -> None:
    seen = Counter[str]()
    for scene in scenes(3000):
        seen.update([scene.background, scene.relation or "alone"])
        for figure in scene.figures:
            seen.update([figure.shape, figure.color])
            assert figure.color != scene.background
            assert min(figure.x, figure.y) >= figure.radius
            assert max(figure.x, figure.y) <= SIDE - figure.radius
    assert set(seen) == {*BACKGROUNDS, *COLORS, *SHAPES, *RELATIONS, "alone"}


def test_two_figures_stand_to_each_other_as_told() -> None:
    for scene in scenes(500):
        if scene.relation == "left of":
            assert (
                scene.figures[1].x - scene.figures[0].x
                > scene.figures[0].radius + scene.figures[1].radius
            )
        if scene.relation == "above":
            assert (
                scene.figures[1].y - scene.figures[0].y
                > scene.figures[0].radius + scene.figures[1].radius
            )


def test_image_has_its_colors() -> None:
    figure = DrawnShape("circle", "red", "medium", 32, 32, 13)
    image = draw(Scene("light blue", (figure,), place="center"))
    assert image.size == (SIDE, SIDE)
    assert image.getpixel((32, 32)) == COLORS["red"]
    assert image.getpixel((0, 0)) == BACKGROUNDS["light blue"]


def test_every_word_of_the_captions_is_one_token() -> None:
    tokenizer = make_tokenizer()
    rng = random.Random(8)
    for scene in scenes(1000, seed=9):
        caption = tell(scene, rng)
        words = caption.replace(",", " ,").split()
        assert tokenizer.tokenize(caption) == [f"{word}</w>" for word in words]
        assert len(words) + 2 <= tokenizer.model_max_length


def test_tokenizer_takes_any_text() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("Zürich \N{SNOWMAN} 東京 a RED circle").input_ids
    assert tokenizer.unk_token_id == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer("red").input_ids == tokenizer("RED").input_ids
